"""`ffn trace`."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any

import typer

from ffncli.block.cost import CONVENTIONS
from ffncli.cli.options import DimensionOptions, OutputOptions, natural, positive, spread
from ffncli.errors import FFNError, shown
from ffncli.models.examples import notebook
from ffncli.models.model import Model
from ffncli.models.source import load, with_dimensions
from ffncli.show.output import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import Excerpt

_RUN = "The run"


@spread
def command(
    *,
    source: Annotated[
        str | None,
        typer.Argument(metavar="SOURCE", help="Model directory or name, 512x2048:gelu; default: a notebook's block."),
    ] = None,
    layer: Annotated[
        str | None,
        typer.Option(
            "--layer", metavar="I", help="Layer from 0; decoder.3 where there are two stacks.", rich_help_panel=_RUN
        ),
    ] = None,
    input: Annotated[
        str | None,
        typer.Option(
            "--input", metavar="X", help="arange, randn, zeros, ones, 0.1,0.2,..., FILE or -.", rich_help_panel=_RUN
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            parser=positive("--tokens"),
            help="Tokens in the input, default 4.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(
            "--batch",
            metavar="B",
            parser=positive("--batch"),
            help="Batch, with --seq-len instead of --tokens.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    seq_len: Annotated[
        int | None,
        typer.Option(
            "--seq-len",
            metavar="L",
            parser=positive("--seq-len"),
            help="Tokens per sequence of the batch.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype", metavar="NAME", help="Compute in fp32 (default), fp64, bf16, fp16.", rich_help_panel=_RUN
        ),
    ] = None,
    device: Annotated[
        str, typer.Option("--device", metavar="WHERE", help="cpu, cuda or cuda:1.", rich_help_panel=_RUN)
    ] = "cpu",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="N",
            parser=natural("--seed"),
            help="For random weights and input, default 0.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", metavar="N", parser=positive("--threads"), help="CPU threads.", rich_help_panel=_RUN),
    ] = None,
    train: Annotated[
        bool | None, typer.Option("--train/--eval", help="Whether dropout is active.", rich_help_panel=_RUN)
    ] = None,
    expert: Annotated[
        str | None,
        typer.Option("--expert", metavar="I|all", help="Show the steps inside an expert.", rich_help_panel=_RUN),
    ] = None,
    values: Annotated[
        str, typer.Option("--show", metavar="N|all", help="Values shown per axis.", rich_help_panel=_RUN)
    ] = "8",
    digits: Annotated[
        int,
        typer.Option(
            "--digits", metavar="N", parser=natural("--digits", 17), help="Digits shown.", rich_help_panel=_RUN
        ),
    ] = 4,
    dimensions: DimensionOptions,
    show: OutputOptions,
) -> None:
    """Run a block step by step and print every intermediate.

    Try: ffn trace ./my-model --layer 1, ffn trace 512x2048:gelu
    """
    output = show.output()
    said = dimensions.dimensions()
    example = notebook() if source is None and said.d_model is None else None
    model = with_dimensions(example.model, said) if example else load(source, said)
    shown_values, inside = _count("--show", values), _expert(expert)
    leading = _leading(tokens, batch, seq_len)

    # From here on torch is needed; everything that can be wrong without it has been said.
    import torch

    from ffncli.run.prepare import Request, prepare
    from ffncli.run.trace import trace

    if threads:
        torch.set_num_threads(threads)
    ready = prepare(model, Request(layer, input, leading, dtype, device, seed, train), example)
    for note in (*model.notes, *ready.notes):
        output.note(note)
    result = trace(ready.steps, ready.weights, ready.inputs, ready.mode, shown_values, inside)
    block = _block(model, ready, device)
    output.show(answer(block, result, digits, ready.mode.train))


def answer(block: dict[str, Any], result: Any, digits: int, train: bool) -> Answer:
    """A trace as JSON, CSV (one row per step, without values) and as a page to read."""
    body = {"block": block, "ffn_input": result.ffn_input, "ffn_output": result.ffn_output}
    steps = [asdict(record) for record in result.steps]
    names = [name for name in steps[0] if name not in ("parameters", "values", "values_index")]
    rows = Table(tuple(names), [tuple(step[name] for name in names) for step in steps])
    parts: list[Part] = [Heading(block["name"], block["weights"])]
    parts += [Line(text, quiet=True) for text in block["evidence"]]
    for record in result.steps:
        parts += _step(record, result, digits, train)
    return Answer("trace", {**body, "steps": steps}, rows, parts, CONVENTIONS)


def _step(record: Any, result: Any, digits: int, train: bool) -> list[Part]:
    """One step: its formula and shape, the values, what they are like, what it costs."""
    marks = {result.ffn_input: "enters the FFN", result.ffn_output: "leaves the FFN"}
    head = record.name if record.op == "input" else f"{record.name} = {record.formula}"
    about = [
        f"[{', '.join(map(str, record.shape))}] {record.dtype}",
        *([marks[record.name]] if record.name in marks else []),
    ]
    if record.tokens is not None:
        about.append(f"tokens {', '.join(map(str, _few(record.tokens)))}")
    parts: list[Part] = [Heading(head, ", ".join(about))]
    parts.append(Excerpt(record.shape, record.values_index, record.values, digits))
    parts += [
        Line(text, quiet=True) for text in (_statistics(record, digits), _counts(record), _weights(record)) if text
    ]
    if record.op == "dropout" and train:
        before = result.step(record.inputs[0])
        live, dropped = _size(before) - before.zeros, record.zeros - before.zeros
        share = f" ({100 * dropped / live:.0f} %)" if live else ""
        parts.append(Line(f"dropped {dropped} of {live} live values{share}, the kept ones scaled", quiet=True))
    return parts


def _statistics(record: Any, digits: int) -> str:
    numbers = [
        f"{name} {getattr(record, name):.{digits}g}" if abs(getattr(record, name)) >= 1e5 else
        f"{name} {getattr(record, name):.{digits}f}"
        for name in ("min", "max", "mean", "std") if getattr(record, name) is not None
    ]  # fmt: skip
    return "  ".join(numbers)


def _counts(record: Any) -> str:
    counts = [f"{record.negatives:,} negative", f"{record.zeros:,} zero"]
    counts += [f"{n:,} {name}" for name, n in (("NaN", record.nan), ("Inf", record.inf)) if n]
    cost = [f"{record.params:,} parameters"] if record.params else []
    cost += [f"{record.flops:,} FLOPs"] if record.flops else []
    return ", ".join(counts) + (" · " + ", ".join(cost) if cost else "")


def _weights(record: Any) -> str:
    """`W1 = up.weightᵀ [4, 8], b1 = up.bias [8]`: the shapes multiply as the formula reads."""
    out = []
    for p in record.parameters:
        matrix = len(p.shape) >= 2
        shape = (*p.shape[:-2], p.shape[-1], p.shape[-2]) if matrix else p.shape
        symbol = f"{p.symbol} = " if p.symbol in record.formula or record.op == "experts" else ""
        out.append(f"{symbol}{p.name}{'ᵀ' if matrix else ''} [{', '.join(map(str, shape))}]")
    return ", ".join(out)


def _few(tokens: tuple[int, ...]) -> list[object]:
    """The first tokens, `…` for the rest."""
    return [*tokens[:8], *(["…"] if len(tokens) > 8 else [])]


def _size(record: Any) -> int:
    size = 1
    for n in record.shape:
        size *= n
    return size


def _block(model: Model, ready: Any, device: str) -> dict[str, Any]:
    spec = ready.layer.spec
    return {
        "name": model.name if model.bare else f"{model.name}, {ready.layer.stack} layer {ready.layer.index}",
        "source": model.source,
        "layer": None if model.bare else ready.layer.index,
        "stack": None if model.bare else ready.layer.stack,
        "d_model": spec.d_model,
        "d_ff": spec.d_ff,
        "activation": spec.activation,
        "gated": spec.gated,
        "bias": spec.bias,
        "weights": ready.origin,
        "mode": "train" if ready.mode.train else "eval",
        "device": device,
        "evidence": list(model.evidence),
    }


def _leading(tokens: int | None, batch: int | None, seq_len: int | None) -> tuple[int, ...] | None:
    """The axes before d_model, or None where nothing was said."""
    if tokens is not None and (batch is not None or seq_len is not None):
        raise FFNError("--tokens contradicts --batch and --seq-len", "give one or the other")
    if tokens is not None:
        return (tokens,)
    return (batch or 1, seq_len or 1) if batch is not None or seq_len is not None else None


def _count(option: str, text: str) -> int | None:
    """A number of values, None for all."""
    return None if text == "all" else max(1, natural(option)(text))


def _expert(text: str | None) -> frozenset[int] | None:
    """The experts to look into: none, some (`0,3`), or all (None)."""
    if text is None:
        return frozenset()
    if text == "all":
        return None
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise FFNError(f"--expert must be a number, a comma list or all, got {shown(text)}")
    return frozenset(int(word) for word in text.split(","))
