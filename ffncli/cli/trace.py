"""`ffn trace`."""

from __future__ import annotations

import re
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ffncli.block.cost import CONVENTIONS
from ffncli.cli.options import DimensionOptions, OutputOptions, RunOptions, TokenOptions, natural, positive, spread
from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import with_dimensions
from ffncli.models.examples import notebook
from ffncli.models.model import Model
from ffncli.run.sources import load
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import Excerpt, number_text

if TYPE_CHECKING:
    from ffncli.run.prepare import Prepared
    from ffncli.run.trace import StepRecord, Trace

Source = Annotated[
    str | None,
    typer.Argument(
        metavar="SOURCE",
        help="Model directory or name, 512x2048:gelu, my.py:Class (runs that file); default: a notebook's.",
    ),
]
Expert = Annotated[str | None, typer.Option("--expert", metavar="I,J|all", help="Show the steps inside experts.")]
Values = Annotated[str, typer.Option("--show", metavar="N|all", help="Values shown per axis.")]
Digits = Annotated[int, typer.Option("--digits", metavar="N", parser=natural("--digits", 17), help="Digits shown.")]


@spread
def command(
    *,
    source: Source = None,
    run: RunOptions,
    tokens: TokenOptions,
    expert: Expert = None,
    values: Values = "8",
    digits: Digits = 4,
    dimensions: DimensionOptions,
    show: OutputOptions,
) -> None:
    """Run a block step by step and print every intermediate.

    Try: ffn trace ./my-model --layer 1, ffn trace 512x2048:gelu
    """
    output = show.output()
    said = dimensions.dimensions()
    example = notebook() if source is None and said.d_model is None else None
    model = with_dimensions(example.model, said) if example else load(source, said, run.seed or 0)
    shown_values, inside, leading = _count("--show", values), _expert(expert, model, run.layer), tokens.leading()

    # From here on torch is needed; what can be wrong without it has been said.
    import torch

    from ffncli.run.prepare import Request, prepare
    from ffncli.run.trace import trace

    if run.threads:
        torch.set_num_threads(run.threads)
    request = Request(run.layer, run.input, leading, run.dtype, run.device, run.seed, run.train)
    ready = prepare(model, request, example)
    if run.train and not any(step.output == "dropout" for step in ready.steps):
        output.note("--train changes nothing: the block has no dropout")
    for note in (*model.notes, *map(str, model.differences), *ready.notes):
        output.note(note)
    result = trace(ready.steps, ready.weights, ready.inputs, ready.mode, shown_values, inside)
    idle = [e for e in sorted(inside or ()) if not any(s.name.startswith(f"experts.{e}.") for s in result.steps)]
    if idle:
        output.note(f"no token is routed to expert {', '.join(map(str, idle))}")
    output.show(answer(_block(model, ready, run.device), result, digits))


def answer(block: dict[str, Any], result: Trace, digits: int) -> Answer:
    """A trace as JSON, CSV (one row per step, without values) and as a page to read."""
    body = {"block": block, "ffn_input": result.ffn_input, "ffn_output": result.ffn_output}
    steps = [asdict(record) for record in result.steps]
    names = [name for name in steps[0] if name not in ("parameters", "values", "values_index", "tokens")]
    rows = Table(tuple(names), [tuple(step[name] for name in names) for step in steps])
    parts: list[Part] = [Heading(block["name"], block["weights"])]
    kind, bias = "gated" if block["gated"] else "plain", "bias" if block["bias"] else "no bias"
    parts.append(Line(f"d_model {block['d_model']}, d_ff {block['d_ff']}, {block['activation']}, {kind}, {bias}"))
    parts += [Line(text, quiet=True) for text in block["evidence"]]
    for record in result.steps:
        parts += _step(record, result, digits)
    return Answer("trace", {**body, "steps": steps}, rows, parts, CONVENTIONS)


def _step(record: StepRecord, result: Trace, digits: int) -> list[Part]:
    """One step: its formula and shape, the values, what they are like, what it costs."""
    marks = {result.ffn_input: "enters the FFN", result.ffn_output: "leaves the FFN"}
    head = record.name if record.op == "input" else f"{record.name} = {record.formula}"
    about = [
        f"[{', '.join(map(str, record.shape))}] {record.dtype}",
        *([marks[record.name]] if record.name in marks else []),
    ]
    if record.tokens is not None:
        about.append(f"token{'s' if len(record.tokens) != 1 else ''} {', '.join(map(str, _few(record.tokens)))}")
    parts: list[Part] = [Heading(head, ", ".join(about))]
    parts.append(Excerpt(record.shape, record.values_index, record.values, digits, record.tokens))
    parts += [
        Line(text, quiet=True) for text in (_statistics(record, digits), _counts(record), _weights(record)) if text
    ]
    if record.live is not None and record.dropped is not None:
        share = f" ({100 * record.dropped / record.live:.0f} %)" if record.live else ""
        text = f"dropped {record.dropped} of {record.live} live values{share}, the kept ones scaled"
        parts.append(Line(text, quiet=True))
    return parts


def _statistics(record: StepRecord, digits: int) -> str:
    numbers = (("min", record.min), ("max", record.max), ("mean", record.mean), ("std", record.std))
    return "  ".join(f"{name} {number_text(value, digits)}" for name, value in numbers if value is not None)


def _counts(record: StepRecord) -> str:
    share = f" ({100 * record.zeros / prod(record.shape):.0f} %)" if record.zeros else ""
    counts = [f"{record.negatives:,} negative", f"{record.zeros:,} zero{share}"]
    counts += [f"{n:,} {name}" for name, n in (("NaN", record.nan), ("Inf", record.inf)) if n]
    cost = [f"{record.params:,} parameters"] if record.params else []
    cost += [f"{record.flops:,} FLOPs"] if record.flops else []
    return ", ".join(counts) + (" · " + ", ".join(cost) if cost else "")


def _weights(record: StepRecord) -> str:
    """`W1 = up.weightᵀ [4, 8], b1 = up.bias [8]`: the shapes multiply as the formula reads."""
    out = []
    for p in record.parameters:
        matrix = len(p.shape) >= 2 and p.name.endswith(".weight")
        shape = (*p.shape[:-2], p.shape[-1], p.shape[-2]) if matrix else p.shape
        symbol = f"{p.symbol} = " if p.symbol in record.formula or record.op == "experts" else ""
        out.append(f"{symbol}{p.name}{'ᵀ' if matrix else ''} [{', '.join(map(str, shape))}]")
    return ", ".join(out)


def _few(tokens: tuple[int, ...]) -> list[object]:
    """The first tokens, `…` for the rest."""
    return [*tokens[:8], *(["…"] if len(tokens) > 8 else [])]


def _block(model: Model, ready: Prepared, device: str) -> dict[str, Any]:
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


def _count(option: str, text: str) -> int | None:
    """A number of values, None for all."""
    return None if text == "all" else positive(option)(text)


def _expert(text: str | None, model: Model, layer: str | None) -> frozenset[int] | None:
    """The experts to look into: none, some (`0,3`), or all (None). FFNError where the model has no such expert."""
    if text is None:
        return frozenset()
    moe = model.layer(layer).spec.moe
    if moe is None:
        first = next((g.layers[0] for g in model.groups if g.spec.moe), None)
        advice = "it is dense" if first is None else f"the first MoE layer is {first}"
        raise FFNError(f"--expert {shown(text)}: this layer of {model.name} has no experts", advice)
    if text == "all":
        return None
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise FFNError(f"--expert must be a number, a comma list or all, got {shown(text)}")
    chosen = frozenset(int(word) for word in text.split(","))
    if max(chosen) >= moe.experts:
        raise FFNError(f"--expert {max(chosen)} is out of range", f"{model.name} has experts 0 to {moe.experts - 1}")
    return chosen
