"""`ffn trace --layer all` as JSON, as CSV and as a table to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.block.cost import CONVENTIONS
from ffncli.block.value import NEAR_ZERO
from ffncli.cli.common.model_run import listed
from ffncli.cli.trace.routing_page import IN_CSV, layers_table
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import in_percent

if TYPE_CHECKING:
    from ffncli.run.trace.survey import LayerRow, Survey

SURVEY_CONVENTIONS = {
    "near_zero": f"|x| <= {NEAR_ZERO:g} after the activation",
    "dead_units": "units whose activation is exactly zero for every token; near_dead_units: "
    f"within {NEAR_ZERO:g} of zero",
    "norms": "mean L2 norm of a token; gain = output_norm / input_norm",
    "agreement": "max|a-b|; over max|b|; in units in the last place of b there: a ours, b the model's own FFN",
}


def not_finite_texts(survey: Survey) -> list[str]:
    """The first layer with NaN or Inf, and how many more there are: one affects all later layers."""
    layers = survey.not_finite
    texts = [f"{row.stack} layer {row.layer}: {fault}" for row in layers[:1] for fault in row.not_finite]
    return texts + ([f"{len(layers) - 1} more of the layers have NaN or Inf"] if len(layers) > 1 else [])


def survey_answer(survey: Survey, units: int = 1) -> Answer:
    """All layers: `layers` in JSON, one row each in CSV and in the table, which names that many active `units`."""
    resolved, layers = survey.model, [_keys(row) for row in survey.rows]
    body = {
        "model": {"name": resolved.model.name, "source": resolved.source, "prompt": survey.prompt,
                  "input": survey.input,
                  "tokens": {stack: [*map(asdict, tokens)] for stack, tokens in survey.tokens.items()}},
        "layers": layers,
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
    loads = [(_name(survey, row), row.routing) for row in survey.rows if row.routing]
    parts += [layers_table(loads)] if loads else []
    return Answer("trace", body, csv, parts, {**CONVENTIONS, **SURVEY_CONVENTIONS})


def _keys(row: LayerRow) -> dict[str, Any]:
    """A row under the keys of docs/json.md."""
    out = asdict(row)
    agreement = out.pop("agreement")
    names = ("max_error", "relative_error", "ulps")
    return out | {name: agreement[name] if agreement else None for name in names}


def _csv_keys(row: Mapping[str, Any]) -> dict[str, Any]:
    """The same as cells: of the experts' load some figures, in a mixture alone."""
    load = row["routing"] or {}
    return {name: value for name, value in row.items() if name != "routing"} | {n: load[n] for n in IN_CSV if load}


def _flat(value: Any) -> Any:
    """A CSV cell: active units as `3`, `7:3` inside expert 7, `shared:3`; what is not finite as `weight up.weight`."""
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
            _name(survey, row), in_percent(row.zero_share), in_percent(row.near_zero_share),
            row.dead_units, row.near_dead_units, row.input_norm, row.output_norm, row.gain,
            ", ".join(_place(unit.unit, unit.expert, unit.shared) for unit in row.most_active[:units]) or None,
        ]  # fmt: skip
        error = float(f"{row.agreement.relative_error:.2g}") if row.agreement else None
        rows.append(tuple([*cells, error] if ran else cells))
    return Table(tuple([*columns, "error"] if ran else columns), rows)


def _name(survey: Survey, row: LayerRow) -> str:
    """`3`, or `decoder.3` if there are several stacks."""
    return f"{row.stack}.{row.layer}" if len({row.stack for row in survey.rows}) > 1 else str(row.layer)


def _meanings(survey: Survey, units: int) -> dict[str, str]:
    """The meaning of the columns."""
    moe = any(unit.expert is not None for row in survey.rows for unit in row.most_active)
    out = {
        "zero %, ~0 %": f"share of values after the activation that are 0, and within {NEAR_ZERO:g} of 0",
        "dead, ~dead": f"units that are 0, and that are within {NEAR_ZERO:g} of 0, for every token"
        + (", of the experts that have any" if moe else ""),
        "most active": f"the {'unit' if units == 1 else 'units'} with the largest mean |act|"
        + (", as expert:unit" if moe else ""),
    }
    if any(row.agreement for row in survey.rows):
        out["error"] = "max|ours - the model's own| over max|the model's own|"
    return out
