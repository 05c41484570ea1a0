"""`ffn precision`: the error of a layer in formats with few bits and whose it is, as JSON, CSV and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ffncli.cli.common.options import OutputOptions, lines_note, prompt_text
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import csv_table, layer_name
from ffncli.run.precision.call import precision_for
from ffncli.run.precision.question import PrecisionQuestion
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import in_percent, plural, rounded

if TYPE_CHECKING:
    from ffncli.run.precision.diagnosis import Diagnosis
    from ffncli.run.precision.explain import RoundedValue
    from ffncli.run.precision.results import Budget, ComparedMix, MixedFormat, Precision, PrecisionRow, WholeModel

_MOST_ROWS, _MOST_OUTLIERS, _MOST_HEADROOM = 40, 8, 1e4
CONVENTIONS = {
    "error_rel": "the norm of the output's error divided by the norm of the output, against the same FFN in float64",
    "error_max": "the largest error of the output divided by the output's largest magnitude",
    "by_tensor": "shares of the squared norm of the output's error: the squared norm of its error if this tensor alone "
    "is rounded",
    "by_pair": "shares of the same: twice the inner product of the errors of two tensors, each rounded alone",
    "rest": "the share that is left: what rounded tensors do together",
    "headroom": "the largest magnitude that a block can store divided by the largest that it has: the least of all "
    "blocks",
    "underflow": "share of the values other than 0 that become 0; of a row, the largest share of its tensors",
    "saturated": "number of blocks with a value that is clipped, more than half a step beyond the format's largest",
    "inherited": "the error of the layer's output in the rounded model if the layer itself is exact, as error_rel",
    "added": "the error of the layer's output in the rounded model, as error_rel, minus inherited",
    "kl": "mean Kullback-Leibler divergence, in nats, of the next token's distribution with this layer alone (in "
    "`whole`: all layers) rounded from the distribution without, over the tokens of the prompt or the texts",
    "output_error": "the norm of the error of the model's output with this layer alone (in `whole`: all layers) "
    "rounded, divided by the norm of the output: the logits, or the last hidden state of a model without a head",
    "zero_scales": "number of blocks whose scale is 0 although a value is not",
}


@spread
def command(*, question: PrecisionQuestion, show: OutputOptions) -> None:
    """Show where few bits hurt: a layer's error by format, and whose it is.

    Examples:
      ffn precision 64x128:swiglu --dtype fp8,nvfp4             # whose error it is
      ffn precision 4x8:relu --dtype fp8 --explain 'W1[0,3]'    # one value
      ffn precision ./my-model -l 1 -p "The cat" --dtype fp8    # on real text
      ffn precision ./my-model -l all -p "The cat" --dtype int8 # which layer
    """
    output = show.output()
    if isinstance(question.prompt, str):
        typed, question = question.prompt, replace(question, prompt=prompt_text(question.prompt))
        output.notes(*lines_note(typed, str(question.prompt)))
    output.show(precision_answer(precision_for(question, output.note)))


def precision_answer(result: Precision) -> Answer:
    """Build the answer: `rows` in JSON and CSV, a table of errors and a table of the tensors' figures."""
    body: dict[str, Any] = {
        "model": {"name": result.model.model.name, "source": result.model.source, "weights": result.weights},
        "input": result.input, "prompt": result.prompt, "rows": [asdict(row) for row in result.rows],
        "whole": [asdict(one) for one in result.whole], "explain": [asdict(one) for one in result.explain],
        "budget": None if result.budget is None else asdict(result.budget),
    }  # fmt: skip
    given = result.input or "its real input on the prompt"
    parts: list[Part] = [Heading(result.model.model.name, result.weights), Line(f"input: {given}", quiet=True)]
    if result.budget:
        parts += _chosen(result, result.budget)
        return Answer("precision", body, csv_table(result.table()), parts, CONVENTIONS)
    parts.append(_errors(result))
    parts.append(Line("pairs: what errors of two tensors add or cancel; rest: what they do only together", quiet=True))
    parts += [Line(f"{one.format} in all layers: {_whole(one)}") for one in result.whole]
    if len({(row.stack, row.layer) for row in result.rows}) == 1:
        parts.append(_fits(result.rows))
    parts += [Line(text) for text in _findings(result)]
    if any(row.sums for row in result.rows):
        parts.append(_sums(result))
    for value in result.explain:
        parts += _explained(value)
    if len(result.rows) > _MOST_ROWS:
        parts.append(Line(f"{_MOST_ROWS} of {len(result.rows):,} rows; --json and --csv have all", quiet=True))
    return Answer("precision", body, csv_table(result.table()), parts, CONVENTIONS)


def _chosen(result: Precision, budget: Budget) -> Iterator[Part]:
    """Show the chosen formats layer by layer, and their error next to those of other choices."""
    layers: dict[str, list[MixedFormat]] = {}
    for one in budget.choices:
        layers.setdefault(layer_name(one, result.model.model), []).append(one)
    names = list(dict.fromkeys(one.tensor for one in budget.choices))
    rows = []
    for layer, some in [*layers.items()][:_MOST_ROWS]:
        formats, weights = {one.tensor: one.format for one in some}, sum(one.weights for one in some)
        rows.append((layer, *map(formats.get, names), sum(one.bits * one.weights for one in some) / weights))
    inputs = "; what a matrix reads has its format too" if budget.what == "both" else "; inputs are not rounded"
    yield Table(("layer", *names, "bits a weight"), rows, f"Formats within {budget.limit:g} bits a weight{inputs}")
    if len(layers) > _MOST_ROWS:
        yield Line(f"{_MOST_ROWS} of {len(layers):,} layers; --json and --csv have all", quiet=True)
    unit, scale = ("KL nats", 1.0) if budget.score == "kl" else ("error %", 100.0)
    labels = ["this choice", *(str(one.format) for one in budget.uniform), *["random"] * len(budget.random)]
    every: tuple[Budget | ComparedMix, ...] = (budget, *budget.uniform, *budget.random)
    compared = [
        (label, one.bits, *(rounded(scale * error, 3) for error in (one.predicted, one.measured)))
        for label, one in zip(labels, every, strict=True)
    ]
    yield Table(
        ("choice", "bits a weight", f"predicted {unit}", f"measured {unit}"), compared, "Compared with other choices"
    )


def _whole(one: WholeModel) -> str:
    """Return what rounding all layers does to the model."""
    if one.kl is not None:
        return f"KL divergence of the next token {one.kl:.3g} nats"
    return f"error of the model's output {_share(one.output_error)} %"


def _errors(result: Precision) -> Table:
    """Show the error of each row, and the shares of its tensors."""
    many = len({(row.stack, row.layer) for row in result.rows}) > 1
    inside, head = bool(result.whole), any(one.kl is not None for one in result.whole)
    gated = any(row.by_tensor["W3"] is not None for row in result.rows)
    names = ("x", "W1", *(("W3",) if gated else ()), "hidden", "W2")
    model = ("added %", "inherited %", "KL nats" if head else "output %") if inside else ()
    labels = (*(("layer",) if many else ()), "format", "rounded")
    columns = (*labels, *model, "error %", "max %", *(f"{name} %" for name in names), "pairs %", "rest %")
    rows = []
    for row in result.rows[:_MOST_ROWS]:
        pairs = [share for share in row.by_pair.values() if share is not None]
        rows.append((
            *((layer_name(row, result.model.model),) if many else ()), row.format, row.what,
            *((_share(row.added), _share(row.inherited)) if inside else ()),
            *((rounded(row.kl, 3) if head else _share(row.output_error),) if inside else ()),
            *(rounded(in_percent(value), 3) for value in (row.error_rel, row.error_max)),
            *(_share(row.by_tensor[name]) for name in names), _share(sum(pairs) if pairs else None), _share(row.rest),
        ))  # fmt: skip
    return Table(columns, rows, "Error of the output, and the tensors that cause it", labels=3 if many else 2)


def _share(share: float | None) -> float | None:
    return rounded(in_percent(share), 3)


def _fits(rows: Sequence[PrecisionRow]) -> Table:
    """Show how well each tensor fits each format."""
    lines = [
        (row.format, one.tensor, one.blocks, _headroom(one.headroom), rounded(in_percent(one.underflow), 2),
         one.saturated, one.zero_scales, _outliers(one))
        for row in rows for one in row.tensors
    ]  # fmt: skip
    columns = ("format", "tensor", "blocks", "headroom", "to zero %", "saturated", "scale 0", "outliers")
    return Table(columns, lines, "How well the values fit", labels=2)


def _headroom(value: float | None) -> float | str | None:
    """Return a headroom, cut short where it is so large that its digits mean nothing."""
    return value if value is None or value < _MOST_HEADROOM else f"> {_MOST_HEADROOM:,.0f}"


def _outliers(one: Diagnosis) -> str:
    return ", ".join(f"channel {o.channel}: {o.times:.0f} × the median" for o in one.outliers)


def _sums(result: Precision) -> Table:
    """Show the error of each row with sums in fewer bits."""
    names = [one.dtype for one in result.rows[0].sums]
    rows = [
        (
            layer_name(row, result.model.model),
            row.format,
            *(_share(e) for e in (row.error_rel, *(s.error_rel for s in row.sums))),
        )
        for row in result.rows[:_MOST_ROWS]
    ]
    columns = ("layer", "format", "fp64 sums: error %", *(f"{name} sums %" for name in names))
    return Table(columns, rows, "Products added one by one, from channel 0 upwards", labels=2)


def _explained(one: RoundedValue) -> list[Part]:
    """Show how a value is rounded, and the steps that change if it alone is."""
    scaled = "" if one.scale is None else f" × scale {one.scale:.6g}"
    block = f"block {[*one.block]} of {' × '.join(map(str, one.block_shape))} values, the largest {one.largest:.6g}"
    columns = ("step", "values changed", "largest change", "at", "relative")
    rows = [(s.name, s.changed, rounded(s.difference, 4), str([*(s.at or ())]), s.relative) for s in one.steps]
    return [
        Heading(f"{one.place} in {one.format}", f"{one.tensor}[{','.join(map(str, one.index))}], {block}"),
        Line(f"{one.value:.6g} → code {one.code}, which means {one.unscaled:g}{scaled} = {one.rounded:.6g}"),
        Line(f"error {one.error:+.4g}; if this value alone is rounded:"),
        Table(columns, rows),
    ]


def _findings(result: Precision) -> Iterator[str]:
    """Yield the faults in words, the first rows first."""
    texts = [
        f"{row.format}, layer {layer_name(row, result.model.model)}, {text}"
        for row in result.rows for one in row.tensors for text in one.findings
    ]  # fmt: skip
    yield from texts[:_MOST_OUTLIERS]
    if len(texts) > _MOST_OUTLIERS:
        yield f"{len(texts) - _MOST_OUTLIERS} more {plural('finding', len(texts) - _MOST_OUTLIERS)}: --json has all"
