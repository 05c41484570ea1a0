"""The inputs of a model's activations, as JSON, CSV and a readable page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.block.activations import TABLE
from ffncli.block.value import NEAR_ZERO
from ffncli.cli.common.summaries import agreement_text, csv_table, layer_name, listed
from ffncli.models.model import is_runnable
from ffncli.show.parts import Answer, Heading, Line, Part, Table, cell_text
from ffncli.show.text import bars, percent, plural

if TYPE_CHECKING:
    from ffncli.run.activations.on_data import ActivationData, ActivationInput, ActivationOutput, LayerData
    from ffncli.run.activations.question import DataQuestion
    from ffncli.run.measure.statistics import Distribution

CONVENTIONS = {
    "input": "the function's input, after clipping; all figures are computed over finite values, std with divisor n",
    "rms": "sqrt(mean^2 + std^2): the --std whose N(0, std^2) fits best (maximum likelihood)",
    "normal_distance": "max |F - Phi|; F: the cumulative distribution, Phi: the normal one with the same mean and std",
    "rows": "each activation on this input, the model's own first",
    "zero_share": f"share of values with |f(x)| <= {NEAR_ZERO:g}; exact_zero_share: with f(x) = 0",
    "dead_units": f"units that are 0 for every token; near_dead_units: within {NEAR_ZERO:g} of 0",
    "relative_difference": "||f(x) - own(x)|| / ||own(x)||",
    "output_change": "the same for the FFN's output, with every activation of the layer replaced",
}
_LONGEST = 40  # characters of an --input that are shown
_FAULTS = 4  # faults listed one by one
_FAR = 0.1  # in units of std: a mean this far from 0 is not well described by a normal distribution around 0


def remarks(data: ActivationData, question: DataQuestion) -> list[str]:
    """Return notes for stderr on the model and its run, the default layer, random weights or inputs, NaN and Inf."""
    resolved = data.model
    out = [*resolved.notes, *map(str, resolved.differences), *data.notes]
    if question.layer is None and (resolved.model.layer_count or 1) > 1:
        one = data.layers[0]
        out.append(
            f"{one.stack} layer {one.layer} of {resolved.model.name}: --layer I shows another, --layer all shows all"
        )
    if not data.tokens:
        drawn = ["weights"] if any(one.weights.startswith("random") for one in data.layers) else []
        way = "--prompt TEXT shows the model's actual input"
        way += "" if is_runnable(resolved) else ", if the source is a directory with safetensors"
        drawn += ["input"] if question.input is None else []
        out += [f"{' and '.join(drawn)} drawn at random: {way}"] if drawn else []
    places = {id(one): "" if resolved.model.bare else f"{one.stack} layer {one.layer}: " for one in data.layers}
    bad = [f"{places[id(one)]}{fault}" for one in data.layers for fault in one.not_finite]
    return out + bad[:_FAULTS] + ([f"{len(bad) - _FAULTS} more have NaN or Inf"] if len(bad) > _FAULTS else [])


def data_answer(data: ActivationData, question: DataQuestion) -> Answer:
    """Build the answer: one layer in full, or one row per layer; CSV has one line per activation and layer."""
    resolved, ran = data.model, bool(data.tokens)
    numbers = None if question.input is None else str(question.input)
    places = [(layer, entered) for layer in data.layers for entered in layer.activations]
    rows = [_row(layer, entered, made) for layer, entered in places for made in entered.made]
    body = {
        "data": {
            "name": resolved.model.name, "source": resolved.source, "prompt": question.prompt,
            "input": None if ran else numbers or "randn",
            "tokens": {stack: [*map(asdict, tokens)] for stack, tokens in data.tokens.items()},
            "layers": [_layer(layer) for layer in data.layers],
        },
        "rows": rows,
    }  # fmt: skip
    one = len(data.layers) == 1
    owns = " and ".join(dict.fromkeys(entered.made[0].name for _, entered in places))
    where = f", {data.layers[0].stack} layer {data.layers[0].layer}" if one and not resolved.model.bare else ""
    origins = list(dict.fromkeys(layer.weights for layer in data.layers))
    origin = origins[0] if len(origins) == 1 else f"{len(data.layers)} layers, each with its own weights"
    parts: list[Part] = [Heading(f"{resolved.model.name}{where}: input of {owns}", origin)]
    if one or not ran:
        tokens = data.layers[0].tokens
        text = numbers or "randn"
        text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
        drawn = f"input: {text}, {tokens:,} {plural('token', tokens)}{'' if one else ', the same for every layer'}"
        parts += [Line(listed(t)) for t in data.tokens.values()] if ran else [Line(drawn)]
    else:
        parts += [Line(f"{stack}: {listed(tokens)}") for stack, tokens in data.tokens.items()]
    parts += _one(data.layers[0]) if one else _all(data)
    return Answer("activations", body, csv_table(rows), parts, CONVENTIONS)


def _row(layer: LayerData, entered: ActivationInput, made: ActivationOutput) -> dict[str, Any]:
    """Return one activation with the keys of docs/commands/activations.md."""
    row = asdict(made)
    first = {"name": row.pop("name"), "formula": TABLE[made.name].formula}
    where = {"stack": layer.stack, "layer": layer.layer, "step": entered.step, "own": made is entered.made[0]}
    return {**first, **where, "units": entered.units, **row}


def _layer(layer: LayerData) -> dict[str, Any]:
    """Return a layer as JSON, without its activations' outputs, which are in `rows`."""
    record = asdict(layer)
    for entered in record["activations"]:
        entered["activation"] = entered.pop("made")[0]["name"]
    agreement = record.pop("agreement")
    names = ("max_error", "relative_error", "ulps")
    return record | {name: agreement[name] if agreement else None for name in names}


# --- one layer --------------------------------------------------------------------------------------------------------


def _one(layer: LayerData) -> list[Part]:
    parts: list[Part] = [Line(agreement_text(layer.agreement))] if layer.agreement else []
    for entered in layer.activations:
        experts = "" if entered.experts is None else f"{entered.experts} experts that received tokens, taken together"
        parts.append(Heading(f"{entered.step} = {entered.formula}", experts))
        parts += _distribution(entered)
        parts += [Line(text) for text in _sparsity(entered, layer.tokens)]
        parts.append(_table(entered))
    parts += [Line(f"{name}: {text}", quiet=True) for name, text in _MEANING.items()]
    return parts


def _distribution(entered: ActivationInput) -> list[Part]:
    """Show range, moments, histogram, percentiles, and the distance from a normal distribution."""
    d = entered.input
    numbers = (("min", d.min), ("max", d.max), ("mean", d.mean), ("std", d.std))
    parts: list[Part] = [*([Line(_numbers(numbers))] if d.mean is not None else []), Line(_counts(entered))]
    if bar := bars(d.histogram):
        sampled = f", 1 in {d.histogram_stride:,} values" if d.histogram_stride > 1 else ""
        parts.append(Line(f"{bar}  from {cell_text(d.min)} to {cell_text(d.max)}{sampled}"))
    if d.percentiles:
        parts.append(Line(_numbers([(f"{p.percent} %", p.value) for p in d.percentiles])))
    if d.excess_kurtosis is not None:
        shape = (("skewness", d.skewness), ("excess kurtosis", d.excess_kurtosis), ("max |F - Φ|", d.normal_distance))
        parts.append(Line(f"{_numbers([(name, _short(value)) for name, value in shape])}  (0 if normal)"))
    return parts + ([Line(text)] if (text := _nearest(d)) else [])


def _numbers(numbers: Sequence[tuple[str, float | None]]) -> str:
    return "  ".join(f"{name} {cell_text(value)}" for name, value in numbers if value is not None)


def _counts(entered: ActivationInput) -> str:
    from ffncli.run.measure.statistics import in_words

    d = entered.input
    out = [f"{d.values:,} values of {entered.units:,} units", f"{percent(d.negatives / d.values)} negative"]
    out += [f"{percent(d.zeros / d.values)} zero"] if d.zeros else []
    out += [f"{entered.clipped:,} clipped ({percent(entered.clipped / d.values)})"] if entered.clipped else []
    return ", ".join([*out, *([words] if (words := in_words(d.nan, d.inf)) else [])])


def _nearest(d: Distribution) -> str:
    """Return a line with the --std for which the normal input is most like this input."""
    if not d.rms or d.mean is None or d.std is None:
        return ""
    off = f" (the mean is {d.mean / d.std:+.2g} std off)" if d.std and abs(d.mean) > _FAR * d.std else ""
    return f"nearest normal input: ffn activations --std {d.rms:.4g}{off}"


def _sparsity(entered: ActivationInput, tokens: int) -> tuple[str, ...]:
    output, near = entered.made[0], f"within {NEAR_ZERO:g} of zero"
    values = f"{output.name} makes {percent(output.exact_zero_share)} of them zero, {percent(output.zero_share)} {near}"
    every = "every token of their expert" if entered.experts is not None else f"all {tokens} tokens"
    every = "the one token" if tokens == 1 else every
    units = f"{output.dead_units:,} of {entered.units:,} units are zero for {every}, {output.near_dead_units:,} {near}"
    return values, units


_MEANING = {
    "zero %, near %": f"values that are 0, and those within {NEAR_ZERO:g} of 0",
    "dead, near dead": f"units that are 0 for every token, and those within {NEAR_ZERO:g} of 0",
    "max |d|": "max |f(x) - own(x)|; d %: ||f(x) - own(x)|| / ||own(x)||",
    "out %": "the same for the FFN's output, with all its activations replaced",
}


def _table(entered: ActivationInput) -> Table:
    columns = ("activation", "mean", "var", "zero %", "near %", "dead", "near dead", "max |d|", "d %", "out %")
    rows = []
    for made in entered.made:
        shares = map(_of_100, (made.exact_zero_share, made.zero_share))
        changes = (_short(made.max_difference), *map(_of_100, (made.relative_difference, made.output_change)))
        cells = (made.name, _short(made.mean), _short(made.variance), *shares, made.dead_units, made.near_dead_units)
        rows.append((*cells, *((None,) * 3 if made is entered.made[0] else changes)))
    title = "Other activations on the same input; the model's own first"
    return Table(columns, rows, title, frozenset({0}), side_by_side=True)


def _short(value: float | None) -> float | None:
    """Round to three digits, so that all columns fit in 80 characters."""
    return None if value is None else float(f"{value:.3g}")


def _of_100(share: float | None) -> float | None:
    return None if share is None else _short(100 * share)


# --- several layers ---------------------------------------------------------------------------------------------------


def _all(data: ActivationData) -> list[Part]:
    """Show two tables with a row per layer: figures of the inputs, and the changes that other activations cause."""
    inputs, changes = [], []
    names = list(dict.fromkeys(m.name for layer in data.layers for e in layer.activations for m in e.made))
    for layer in data.layers:
        name = layer_name(layer, data.model.model)
        several = len(layer.activations) > 1
        inputs += [(f"{name} {e.step.partition('.')[0]}" if several else name, *_cells(e)) for e in layer.activations]
        made = {m.name: m for m in layer.activations[0].made}
        changes.append((name, *(_of_100(made[n].output_change) if n in made else None for n in names)))
    originals = {entered.made[0].name for layer in data.layers for entered in layer.activations}
    if len(originals) == 1:  # its own change is always 0
        changes = [tuple(c for i, c in enumerate(row) if not i or names[i - 1] not in originals) for row in changes]
        names = [name for name in names if name not in originals]
    parts: list[Part] = [Table(("layer", *_COLUMNS), inputs, side_by_side=True)]
    meaning = {**_ALL_MEANING, **({"output": _MEANING_OF_OUTPUT} if names else {})}
    if names:
        title = "Change of the FFN's output, in %, with another activation"
        parts.append(Table(("layer", *names), changes, title, side_by_side=True))
    return parts + [Line(f"{name}: {text}", quiet=True) for name, text in meaning.items()]


_COLUMNS = ("mean", "std", "min", "max", "neg %", "kurt", "zero %", "near %", "dead", "near dead", "from min to max")
_ALL_MEANING: Mapping[str, str] = {
    "mean to kurt": "of the inputs; kurt: excess kurtosis, 0 for a normal distribution",
    "zero %, near %": f"of the outputs: values that are 0, and those within {NEAR_ZERO:g} of 0",
    "dead, near dead": f"units that are 0 for every token, and those within {NEAR_ZERO:g} of 0",
}
_MEANING_OF_OUTPUT = "||output - own output|| / ||own output||"


def _cells(entered: ActivationInput) -> tuple[Any, ...]:
    d, output = entered.input, entered.made[0]
    negatives = _of_100(d.negatives / d.values)
    zeros = map(_of_100, (output.exact_zero_share, output.zero_share))
    moments = map(_short, (d.mean, d.std, d.min, d.max))
    return (
        *moments,
        negatives,
        _short(d.excess_kurtosis),
        *zeros,
        output.dead_units,
        output.near_dead_units,
        bars(d.histogram),
    )
