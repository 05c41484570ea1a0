"""Pages with one row per layer: `--layer all`, `--prompts`, and the load of a mixture's experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.block.cost import CONVENTIONS
from ffncli.block.value import NEAR_ZERO
from ffncli.cli.common.summaries import csv_table, in_json, layer_name, listed, loss_lines, named
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import in_percent, percent, plural, rounded

if TYPE_CHECKING:
    from ffncli.run.corpus.likeness import SimilarPair
    from ffncli.run.corpus.results import CorpusLayer, CorpusSurvey, TokenPlace, UnitFigures
    from ffncli.run.trace.routing import Routing
    from ffncli.run.trace.survey import LayerRow, Survey


SURVEY_CONVENTIONS = {
    "near_zero": f"|x| <= {NEAR_ZERO:g} after the activation",
    "dead_units": "units whose activation is exactly zero for every token; near_dead_units: "
    f"within {NEAR_ZERO:g} of zero",
    "norms": "mean L2 norm of a token; gain = output_norm / input_norm",
    "agreement": "max|a-b|; max|a-b| / max|b|; max|a-b| in units in the last place of b; a is ours, b is the model's",
}


def not_finite_texts(survey: Survey) -> list[str]:
    """Return the faults of the first layer with NaN or Inf, and how many other layers have any; NaN and Inf spread to
    all later layers."""
    layers = survey.not_finite
    texts = [f"{row.stack} layer {row.layer}: {fault}" for row in layers[:1] for fault in row.not_finite]
    return texts + ([f"{len(layers) - 1} more of the layers have NaN or Inf"] if len(layers) > 1 else [])


def survey_answer(survey: Survey, units: int = 1) -> Answer:
    """Show all layers: `layers` in JSON, and one row per layer in CSV and in the table. Each layer has its `units` most
    active units."""
    resolved, layers = survey.model, [_keys(row) for row in survey.rows]
    body = {
        "model": {"name": resolved.model.name, "source": resolved.source, "prompt": survey.prompt,
                  "input": survey.input,
                  "tokens": {stack: [*map(asdict, tokens)] for stack, tokens in survey.tokens.items()}},
        "layers": layers,
        **({} if survey.gradients is None else {"loss": survey.loss, "gradients": in_json(survey.gradients)}),
    }  # fmt: skip
    rows = [_csv_keys(row) for row in layers]
    names = tuple(dict.fromkeys(name for row in rows for name in row))
    csv = Table(names, [tuple(_flat(row.get(name)) for name in names) for row in rows])
    parts: list[Part] = [Heading(resolved.model.name, f"{len(rows)} layers with an FFN")]
    if survey.input is not None:
        parts.append(Line(f"input: {survey.input}"))
    for stack, tokens in survey.tokens.items():
        parts.append(Line(f"{stack}: {listed(tokens)}"))
    parts.append(_table(survey, units))
    parts += [Line(f"{name.replace('_', ' ')}: {text}", quiet=True) for name, text in _meanings(survey, units).items()]
    loads = [(layer_name(row, survey.model.model), row.routing) for row in survey.rows if row.routing]
    parts += [layers_table(loads)] if loads else []
    parts += gradient_norms(survey)
    return Answer("trace", body, csv, parts, {**CONVENTIONS, **SURVEY_CONVENTIONS})


def gradient_norms(survey: Survey) -> list[Part]:
    """Show the norms of each layer's gradients, and the loss of the next tokens."""
    if survey.gradients is None or survey.loss is None:
        return []
    names = dict.fromkeys(name for row in survey.gradients for name in row.weight_norms)
    rows = [
        (layer_name(row, survey.model.model), row.output_norm, row.input_norm,
         *(row.weight_norms.get(name) for name in names))
        for row in survey.gradients
    ]  # fmt: skip
    title = f"Norms of the gradients of the next tokens' loss, {survey.loss:.6g} nats"
    return [Table(("layer", "output", "input", *names), rows, title, labels=1)]


def _keys(row: LayerRow) -> dict[str, Any]:
    """Return a row with the keys of docs/commands/trace.md."""
    out = asdict(row)
    agreement = out.pop("agreement")
    names = ("max_error", "relative_error", "ulps")
    return out | {name: agreement[name] if agreement else None for name in names}


def _csv_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row for CSV: without `routing`, but with some figures of the experts' load if there are experts."""
    load = row["routing"] or {}
    return {name: value for name, value in row.items() if name != "routing"} | {n: load[n] for n in IN_CSV if load}


def _flat(value: Any) -> Any:
    """Return a CSV cell: units as `3`, `7:3` inside expert 7, `shared:3`; non-finite tensors by kind and name."""
    if not isinstance(value, tuple) or not all(isinstance(one, dict) for one in value):
        return value
    return tuple(
        f"{one['kind']} {one['name']}" if "kind" in one else _place(one["unit"], one["expert"], one["shared"])
        for one in value
    )


def _place(unit: int, expert: int | None, shared: bool) -> str:
    return f"{expert}:{unit}" if expert is not None else f"shared:{unit}" if shared else f"{unit}"


def _table(survey: Survey, units: int) -> Table:
    columns = ["layer", "zero %", "~0 %", "dead", "~dead", "|in|", "|out|", "gain", "most active"]
    ran = any(row.agreement for row in survey.rows)
    rows = []
    for row in survey.rows:
        cells = [
            layer_name(row, survey.model.model), in_percent(row.zero_share), in_percent(row.near_zero_share),
            row.dead_units, row.near_dead_units, row.input_norm, row.output_norm, row.gain,
            ", ".join(_place(unit.unit, unit.expert, unit.shared) for unit in row.most_active[:units]) or None,
        ]  # fmt: skip
        error = float(f"{row.agreement.relative_error:.2g}") if row.agreement else None
        rows.append(tuple([*cells, error] if ran else cells))
    return Table(tuple([*columns, "error"] if ran else columns), rows)


def _meanings(survey: Survey, units: int) -> dict[str, str]:
    """Return the meaning of the columns."""
    moe = any(unit.expert is not None for row in survey.rows for unit in row.most_active)
    out = {
        "zero %, ~0 %": f"share of values after the activation that are 0, and within {NEAR_ZERO:g} of 0",
        "dead, ~dead": f"units that are 0, and that are within {NEAR_ZERO:g} of 0, for every token"
        + (", in experts with tokens" if moe else ""),
        "most active": f"the {'unit' if units == 1 else 'units'} with the largest mean |act|"
        + (", as expert:unit" if moe else ""),
    }
    if any(row.agreement for row in survey.rows):
        out["error"] = "max|ours - the model's own| / max|the model's own|"
    return out


CORPUS_CONVENTIONS = {
    "active_share": "share of tokens for which the activation's output is above 0: the mean over the units that are "
    "active for any token; a routed expert's units are counted over the tokens routed to it",
    "dead_units": "units that no token activated; unused_units: the dead units of experts that got no token",
    "min, max": "smallest and largest input of the down projection; places are (text, token), both from 0",
    "outliers": "input dimensions with |x| ≥ the limit on at least 6 % of tokens; "
    "outlier_dimensions: in at least a quarter of the layers",
    "massive": "residual values after the layer above 100 and above 1000 × the median of their text",
}


def corpus_answer(survey: CorpusSurvey, digits: int) -> Answer:
    """Show all layers: `corpus.layers` in JSON, one row per layer in CSV and in the table."""
    figures = ("where", "texts", "tokens", "cut", "limit", "seconds", "outlier_dimensions")
    body = {
        "model": {"name": survey.model.model.name, "source": survey.model.source},
        "corpus": {name: getattr(survey, name) for name in figures} | {"layers": [asdict(row) for row in survey.rows]},
    }
    rows = [_cells(row) for row in survey.rows]
    csv = csv_table(rows)
    parts: list[Part] = [
        Heading(survey.model.model.name, f"{len(rows)} {plural('layer', len(rows))} with an FFN"),
        Line(f"{survey.where}: {survey.texts:,} {plural('text', survey.texts)}, {survey.tokens:,} tokens"),
        _corpus_table(survey, digits),
        *(Line(f"{name}: {text}", quiet=True) for name, text in _corpus_meanings(survey).items()),
        *_outliers(survey),
        *_contexts(survey),
        *_similar(survey),
    ]
    return Answer("trace", body, csv, parts, CORPUS_CONVENTIONS)


def not_finite_layers(survey: CorpusSurvey) -> list[str]:
    """Return the first layer with units that are NaN or infinite, and the number of other such layers."""
    rows = [row for row in survey.rows if row.not_finite]
    return [f"{row.stack} layer {row.layer}: {row.not_finite:,} values of units" for row in rows[:1]] + (
        [f"{len(rows) - 1} more of the layers have NaN or Inf"] if len(rows) > 1 else []
    )


def _cells(row: CorpusLayer) -> dict[str, Any]:
    """Return a row as cells of a CSV file."""
    out: dict[str, Any] = {}
    for name, value in vars(row).items():
        if name.endswith("_at"):
            out |= {name.replace("_at", f"_{key}"): value and getattr(value, key) for key in ("text", "token")}
        elif name == "outliers":
            out[name] = tuple(one.dimension for one in row.outliers)
        elif name == "top_units":
            out[name] = tuple(unit.name for unit in row.top_units)
        elif name not in ("largest_massive", "similar_pairs"):
            out[name] = value
    return out


def _corpus_table(survey: CorpusSurvey, digits: int) -> Table:
    columns = (
        "layer",
        "active %",
        "dead",
        "units",
        "std",
        "kurtosis",
        "min",
        "max",
        "at",
        "unit",
        "outliers",
        "massive",
    )
    rows = [
        (
            layer_name(row, survey.model.model), in_percent(row.active_share), row.dead_units, row.units,
            rounded(row.std, digits), rounded(row.kurtosis, digits),
            rounded(row.min, digits),
            rounded(row.max, digits), _token_place(row.max_at), row.max_unit, len(row.outliers), row.massive,
        )
        for row in survey.rows
    ]  # fmt: skip
    return Table(columns, rows)


def _token_place(at: TokenPlace | None) -> str | None:
    """Return a cell such as `12: 3 " Paris"`: the text's index, the token's position in the text, and the token."""
    return (
        None
        if at is None
        else f"{at.text}: {at.token}" + ("" if at.token_text is None else f" {named(0, at.token_text)}")
    )


def _corpus_meanings(survey: CorpusSurvey) -> dict[str, str]:
    """Return the meaning of the columns."""
    return {
        "active %": "share of tokens with an activation above 0, over the units that are not dead",
        "dead": f"units that no token activated (of {survey.tokens:,})",
        "std": "of all inputs to the down projection; kurtosis: 3 for a normal distribution, more if tails are heavy",
        "max": "largest input to the down projection; at: the text and token that have it; unit: the unit",
        "outliers": f"input dimensions with |x| ≥ {survey.limit:g} on at least 6 % of tokens",
        "massive": "residual values above 100 and above 1000 × the median of their text",
    }


def _outliers(survey: CorpusSurvey) -> list[Part]:
    """Show the dimensions that are outliers in many layers, and the largest massive activation of each layer."""
    parts: list[Part] = []
    if survey.outlier_dimensions:
        listed = ", ".join(map(str, survey.outlier_dimensions))
        parts.append(Line(f"outlier dimensions in a quarter of the layers or more: {listed}"))
    rows = [
        (
            layer_name(row, survey.model.model),
            one.value,
            f"{one.text}: {one.token}",
            one.dimension,
            one.median,
            one.ratio,
        )
        for row in survey.rows
        for one in row.largest_massive[:1]
    ]
    if rows:
        parts.append(Table(("layer", "value", "at", "dimension", "median", "× median"), rows, "Massive activations"))
    return parts


def _contexts(survey: CorpusSurvey) -> list[Part]:
    """Show the contexts in which each layer's listed units are most active."""
    return [
        _unit_table(f"layer {layer_name(row, survey.model.model)}, unit {unit.name}", unit)
        for row in survey.rows
        for unit in row.top_units
        if unit.top
    ]


def _similar(survey: CorpusSurvey) -> list[Part]:
    """Show the most similar pairs of each layer, and how many there are."""
    rows = [
        (layer_name(row, survey.model.model), _unit(pair, pair.first), _unit(pair, pair.second), pair.cosine_in,
         pair.cosine_out)
        for row in survey.rows for pair in row.similar_pairs[:_MOST_PAIRS]
    ]  # fmt: skip
    more = sum(max(0, len(row.similar_pairs) - _MOST_PAIRS) for row in survey.rows)
    parts: list[Part] = []
    if rows:
        parts.append(Table(("layer", "unit", "unit", "cosine in", "cosine out"), rows, "Units that read the same"))
        parts += [Line(f"and {more:,} more pairs", quiet=True)] if more else []
    if near := sum(row.near_dead_units for row in survey.rows):
        parts.append(Line(f"{near:,} {plural('unit', near)} within 0.001 of 0 for every token", quiet=True))
    return parts


_MOST_PAIRS = 5


def _unit(pair: SimilarPair, unit: int) -> str:
    where = pair.part if pair.expert is None else pair.expert
    return f"{where}:{unit}" if where != "" else str(unit)


def _unit_table(title: str, unit: UnitFigures) -> Table:
    share = in_percent(unit.active_share)
    rows: Sequence[tuple[Any, ...]] = [(one.value, _token_place(one.at), one.context) for one in unit.top]
    return Table(("value", "at", "context"), rows, f"{title}: active for {share} % of {unit.tokens:,} tokens")


_MOST_EXPERTS = 8  # experts listed on the page; JSON lists all
IN_CSV = ("tokens_per_expert", "idle_experts", "busiest_expert", "busiest_share", "entropy_bits")


def routing_parts(routing: Routing | None) -> list[Part]:
    """Show how many experts are used, which are idle, which are busiest, and how even the load is."""
    if routing is None:
        return []
    load, tokens = routing.tokens_per_expert, f"{routing.tokens:,} {plural('token', routing.tokens)}"
    parts: list[Part] = [
        Heading(
            f"experts: {used(routing)} used", f"{routing.choices:,} {plural('choice', routing.choices)} for {tokens}"
        )
    ]
    if routing.idle_experts:
        parts.append(Line(f"idle: {_some(routing.idle_experts)}"))
    if routing.entropy_bits is not None:
        entropy = f"{routing.entropy_bits:.3g} bits (at most {routing.max_entropy_bits:.3g})"
        parts.append(Line(f"entropy of the load: {entropy}"))
    if routing.identity_choices:
        parts.append(Line(f"{routing.identity_choices:,} more choices are identity experts"))
    parts += loss_lines(routing.losses)
    busiest = sorted((e for e, count in enumerate(load) if count), key=lambda e: -load[e])[:_MOST_EXPERTS]
    rows = [(str(e), load[e], in_percent(load[e] / routing.choices), load[e] / routing.even_load) for e in busiest]
    title = f"The busiest experts; evenly spread, each has {routing.even_load:.3g} ({percent(1 / len(load))})"
    return [*parts, Table(("expert", "tokens", "share %", "× even"), rows, title)] if rows else parts


def used(routing: Routing) -> str:
    """Return text such as `5 of 8`: how many of the experts receive a token."""
    experts = len(routing.tokens_per_expert)
    return f"{experts - len(routing.idle_experts)} of {experts}"


def layers_table(loads: Sequence[tuple[str, Routing]]) -> Table:
    """Show one row per (layer, load) of a mixture."""
    rows = [
        (
            layer, used(load), None if load.busiest_expert is None else str(load.busiest_expert),
            in_percent(load.busiest_share), in_percent(1 / len(load.tokens_per_expert)), load.entropy_bits,
            load.max_entropy_bits,
        )
        for layer, load in loads
    ]  # fmt: skip
    columns = ("layer", "experts used", "busiest", "share %", "even %", "entropy bits", "at most")
    return Table(columns, rows, "The load of the experts")


def _some(experts: Sequence[int]) -> str:
    """List the first of these experts, and how many more there are."""
    few, more = experts[:_MOST_EXPERTS], len(experts) - _MOST_EXPERTS
    return ", ".join(map(str, few)) + (f" and {more:,} more" if more > 0 else "")
