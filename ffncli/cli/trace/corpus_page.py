"""`ffn trace --prompts` as JSON, as CSV and as a table to read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.cli.common.model_run import named
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import in_percent, plural

if TYPE_CHECKING:
    from ffncli.run.corpus.figures import CorpusLayer, CorpusSurvey, TokenPlace, UnitFigures

CORPUS_CONVENTIONS = {
    "active_share": "share of tokens for which the activation's output is above 0: the mean over the units that are "
    "active for any token; a routed expert's units are counted over the tokens routed to it",
    "dead_units": "units that are active for no token; unused_units: those of experts that got no token, among them",
    "min, max": "of the values that the down projection reads; places are (text, token), both from 0",
    "outliers": "dimensions of the FFN's input that reach the limit by size for at least 6 % of the tokens; "
    "outlier_dimensions: in at least a quarter of the layers",
    "massive": "values of the residual stream after the layer above 100 and 1000 times the median of their text",
}


def corpus_answer(survey: CorpusSurvey, digits: int) -> Answer:
    """All layers: `corpus.layers` in JSON, a row each in CSV and in the table."""
    figures = ("where", "texts", "tokens", "cut", "limit", "seconds", "outlier_dimensions")
    body = {
        "model": {"name": survey.model.model.name, "source": survey.model.source},
        "corpus": {name: getattr(survey, name) for name in figures} | {"layers": [asdict(row) for row in survey.rows]},
    }
    rows = [_cells(row) for row in survey.rows]
    csv = Table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    parts: list[Part] = [
        Heading(survey.model.model.name, f"{len(rows)} {plural('layer', len(rows))} with an FFN"),
        Line(f"{survey.where}: {survey.texts:,} {plural('text', survey.texts)}, {survey.tokens:,} tokens"),
        _table(survey, digits),
        *(Line(f"{name}: {text}", quiet=True) for name, text in _meanings(survey).items()),
        *_outliers(survey),
        *_contexts(survey),
    ]
    return Answer("trace", body, csv, parts, CORPUS_CONVENTIONS)


def not_finite_layers(survey: CorpusSurvey) -> list[str]:
    """The layers with units that are NaN or infinite."""
    rows = [row for row in survey.rows if row.not_finite]
    return [f"{row.stack} layer {row.layer}: {row.not_finite:,} values of units" for row in rows[:1]] + (
        [f"{len(rows) - 1} more of the layers have NaN or Inf"] if len(rows) > 1 else []
    )


def _cells(row: CorpusLayer) -> dict[str, Any]:
    """A row as cells of a CSV file."""
    out: dict[str, Any] = {}
    for name, value in vars(row).items():
        if name.endswith("_at"):
            out |= {name.replace("_at", f"_{key}"): value and getattr(value, key) for key in ("text", "token")}
        elif name == "outliers":
            out[name] = tuple(one.dimension for one in row.outliers)
        elif name == "top_units":
            out[name] = tuple(_unit(unit) for unit in row.top_units)
        elif name != "largest_massive":
            out[name] = value
    return out


def _unit(unit: UnitFigures) -> str:
    """`3`, `7:3` inside expert 7, `shared:3`."""
    where = unit.part if unit.expert is None else unit.expert
    return f"{where}:{unit.unit}" if where != "" else str(unit.unit)


def _table(survey: CorpusSurvey, digits: int) -> Table:
    columns = ("layer", "active %", "dead", "units", "min", "max", "at", "unit", "outliers", "massive")
    rows = [
        (
            _name(survey, row), in_percent(row.active_share), row.dead_units, row.units, _rounded(row.min, digits),
            _rounded(row.max, digits), _place(row.max_at), row.max_unit, len(row.outliers), row.massive,
        )
        for row in survey.rows
    ]  # fmt: skip
    return Table(columns, rows)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else float(f"{value:.{digits}g}")


def _place(at: TokenPlace | None) -> str | None:
    """`12: 3 " Paris"`: the text, the token's position in it, the token."""
    return None if at is None else f"{at.text}: {at.token}" + ("" if at.token_text is None else f" {_quoted(at)}")


def _quoted(at: TokenPlace) -> str:
    return named(0, at.token_text)


def _name(survey: CorpusSurvey, row: CorpusLayer) -> str:
    """`3`, or `encoder.3` if the model has several stacks."""
    stacks = {group.stack for group in survey.model.model.groups}
    return f"{row.stack}.{row.layer}" if len(stacks) > 1 else str(row.layer)


def _meanings(survey: CorpusSurvey) -> dict[str, str]:
    """The meaning of the columns."""
    return {
        "active %": "share of tokens with an activation above 0, over the units that are not dead",
        "dead": f"units that were active for none of the {survey.tokens:,} tokens",
        "max": "the largest value that the down projection reads, at text: token, of that unit",
        "outliers": f"dimensions of the FFN's input that reach {survey.limit:g} for 6 % of the tokens",
        "massive": "values after the layer above 100, and 1000 times their text's median",
    }


def _outliers(survey: CorpusSurvey) -> list[Part]:
    """The dimensions that are outliers in many layers, and the largest massive activation of each layer."""
    parts: list[Part] = []
    if survey.outlier_dimensions:
        listed = ", ".join(map(str, survey.outlier_dimensions))
        parts.append(Line(f"outlier dimensions in a quarter of the layers or more: {listed}"))
    rows = [
        (_name(survey, row), one.value, f"{one.text}: {one.token}", one.dimension, one.median, one.ratio)
        for row in survey.rows
        for one in row.largest_massive[:1]
    ]
    if rows:
        parts.append(Table(("layer", "value", "at", "dimension", "median", "× median"), rows, "Massive activations"))
    return parts


def _contexts(survey: CorpusSurvey) -> list[Part]:
    """The top contexts of each layer's first units."""
    return [
        _unit_table(f"layer {_name(survey, row)}, unit {_unit(unit)}", unit)
        for row in survey.rows
        for unit in row.top_units
        if unit.top
    ]


def _unit_table(title: str, unit: UnitFigures) -> Table:
    share = in_percent(unit.active_share)
    rows: Sequence[tuple[Any, ...]] = [(one.value, _place(one.at), one.context) for one in unit.top]
    return Table(("value", "at", "context"), rows, f"{title}: active for {share} % of {unit.tokens:,} tokens")
