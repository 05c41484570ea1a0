"""A trace as JSON, as CSV and as a page to read: records go in, an Answer comes out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from math import prod
from typing import TYPE_CHECKING, Any

from ffncli.block.cost import CONVENTIONS
from ffncli.block.steps import Dropout, Linear, walk
from ffncli.block.units import NEAR_ZERO
from ffncli.cli.insight import unit_parts
from ffncli.cli.prompt_page import labels
from ffncli.cli.traced import Traced
from ffncli.models.model import Resolved
from ffncli.show.bars import bars
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import Excerpt, number_text

if TYPE_CHECKING:
    from ffncli.run.not_finite import NotFinite
    from ffncli.run.prepare import Prepared
    from ffncli.run.trace import StepRecord, Trace


_MOST_COLUMNS = 80


def answer(traced: Traced, not_finite: Sequence[NotFinite] = ()) -> Answer:
    """A trace as JSON, CSV (one row per step, without values) and as a page to read.

    Its rows are named by the prompt's tokens where there was one.
    """
    block, result = block_of(traced.model, traced.ready, traced.request.device), traced.result
    body = {
        "block": block,
        "ffn_input": result.ffn_input,
        "ffn_output": result.ffn_output,
        "not_finite": [asdict(one) for one in not_finite],
    }
    steps = [asdict(record) for record in result.steps]
    names = [name for name in steps[0] if name not in ("parameters", "values", "values_index", "tokens", "units")]
    rows = Table(tuple(names), [tuple(step[name] for name in names) for step in steps])
    parts: list[Part] = [Heading(block["name"], block["weights"])]
    parts.append(Line(dimensions_text(block)))
    parts += [Line(text, quiet=True) for text in block["evidence"]]
    if block["mask"] is not None:
        why = "every call draws its own, so two differ; with --eval they agree"
        parts.append(Line(f"dropout's mask: {block['mask']}; {why}", quiet=True))
    for record in result.steps:
        parts += _step(record, result, traced.digits, labels(traced.given))
    return Answer("trace", {**body, "steps": steps}, rows, parts, CONVENTIONS)


def dimensions_text(block: Mapping[str, Any]) -> str:
    """`d_model 4, d_ff 8, relu, plain, bias`; a final layer alone has neither d_ff nor activation."""
    kind, bias = "gated" if block["gated"] else "plain", "bias" if block["bias"] else "no bias"
    ffn = "" if block["d_ff"] is None else f", d_ff {block['d_ff']}, {block['activation']}, {kind}"
    return f"d_model {block['d_model']}{ffn}, {bias}"


def _step(record: StepRecord, result: Trace, digits: int, rows: tuple[str, ...]) -> list[Part]:
    """One step: its formula and shape, the values, what they are like, what it costs."""
    marks = {result.ffn_input: "enters the FFN", result.ffn_output: "leaves the FFN"}
    if result.ffn_output == "logits":  # a final layer alone is none
        marks = {}
    head = record.name if record.op == "input" else f"{record.name} = {record.formula}"
    about = [
        f"[{', '.join(map(str, record.shape))}] {record.dtype}",
        *([marks[record.name]] if record.name in marks else []),
    ]
    if record.tokens is not None:
        about.append(f"token{'s' if len(record.tokens) != 1 else ''} {', '.join(map(str, _few(record.tokens)))}")
    parts: list[Part] = [Heading(head, ", ".join(about))]
    at = range(len(rows)) if record.tokens is None else record.tokens
    names = tuple(rows[row] for row in at) if rows else record.tokens
    parts.append(Excerpt(record.shape, record.values_index, record.values, digits, names))
    lines = (*_statistics(record, digits), _counts(record), _weights(record))
    parts += [Line(text, quiet=True) for text in lines if text]
    if record.live is not None and record.dropped is not None:
        share = f" ({100 * record.dropped / record.live:.0f} %)" if record.live else ""
        text = f"dropped {record.dropped} of {record.live} live values{share}, the kept ones scaled"
        parts.append(Line(text, quiet=True))
    elif record.op == "dropout":
        parts.append(Line("eval mode: passes everything on", quiet=True))
    return parts + unit_parts(record)


def _statistics(record: StepRecord, digits: int) -> tuple[str, ...]:
    """Extremes, mean and spread, then the histogram: in the same line, or in the next where 80 columns do not do.

    A line that a terminal folds would break the bars at an empty one.
    """
    numbers = (("min", record.min), ("max", record.max), ("mean", record.mean), ("std", record.std))
    text = "  ".join(f"{name} {number_text(value, digits)}" for name, value in numbers if value is not None)
    bar = bars(record.histogram)
    if bar and record.histogram_stride > 1:
        bar += f"  1 in {record.histogram_stride:,} values"
    whole = f"{text}  {bar}".rstrip()
    return (whole,) if len(whole) <= _MOST_COLUMNS - 2 else (text, bar)


def _counts(record: StepRecord) -> str:
    share = f" ({100 * record.zeros / prod(record.shape):.0f} %)" if record.zeros else ""
    counts = [f"{record.negatives:,} negative", f"{record.zeros:,} zero{share}"]
    near = record.near_zero_share or 0.0
    if record.near_zeros > record.zeros and near >= 0.01:
        counts.append(f"{record.near_zeros:,} within {NEAR_ZERO:g} of zero ({100 * near:.0f} %)")
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


def _seed(ready: Prepared) -> int:
    """What the generator of masks began with."""
    return 0 if ready.mode.generator is None else ready.mode.generator.initial_seed()


def block_of(model: Resolved, ready: Prepared, device: str) -> dict[str, Any]:
    """What was traced, under the keys of docs/json.md."""
    spec = ready.layer.spec
    alone = ready.steps[0].output == "logits"  # a final layer without any block
    dropped = [s.output for _, s in walk(ready.steps) if isinstance(s.op, Dropout)] if ready.mode.train else []
    own = all(name in ready.mode.masks for name in dropped)
    return {
        "name": model.name if model.model.bare else f"{model.name}, {ready.layer.stack} layer {ready.layer.index}",
        "source": model.source,
        "layer": None if model.model.bare else ready.layer.index,
        "stack": None if model.model.bare else ready.layer.stack,
        "d_model": spec.d_model,
        "d_ff": None if alone else spec.d_ff,
        "activation": None if alone else spec.activation,
        "gated": None if alone else spec.gated,
        "bias": spec.bias,
        "vocab": next((s.op.out.size for s in ready.steps if s.output == "logits" and isinstance(s.op, Linear)), None),
        "weights": ready.origin,
        "mode": "train" if ready.mode.train else "eval",
        "mask": None if not dropped else "the notebook's" if own else f"drawn, seed {_seed(ready)}",
        "device": device,
        "evidence": list(model.evidence),
    }
