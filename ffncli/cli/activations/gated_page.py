"""Gated units on the page of `ffn activations`: rows for JSON and CSV, and readable tables."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from ffncli.block.analysis.gated import GatedValue, Interval
from ffncli.block.value import NEAR_ZERO
from ffncli.run.activations.comparison import Comparison
from ffncli.show.parts import Fixed, Line, Part, Table
from ffncli.show.text import in_percent, interval, percent

Row = Mapping[str, Any]


_AGAINST = ("against", "same_gate", "same_up", "rms_difference", "relative_rms_difference")
AGAINST_CONVENTIONS = {
    "same_gate, same_up": "gated units: y equals the reference's y if gate is in same_gate and up is in same_up; each"
    " is [low, high], with null for an infinite end; null instead of an interval means nowhere",
    "relative_rms_difference": "gated units: rms_difference divided by the rms of the reference",
}


def rows(comparison: Comparison) -> list[dict[str, Any]]:
    """Build one row per gated unit, with the keys of docs/commands/activations.md."""
    return [_row(comparison, at) for at in range(len(comparison.units))]


def parts(rows: Sequence[Row]) -> list[Part]:
    """Build readable tables from the rows: formulas, facts side by side, values and both slopes for each up, widths."""
    if not rows:
        return []
    out: list[Part] = [Table(("gated unit", "formula"), [(row["name"], row["formula"]) for row in rows])]
    out += _facts(rows)
    ups = tuple(dict.fromkeys(value["up"] for row in rows for value in row["values"]))
    out += [part for up in ups for part in _values(rows, up)]
    if "iso_params" in rows[0]:
        out += _iso(rows)
    out.append(
        Table(("gated unit", "used by", "source"), [(r["name"], r["used_by"] or "-", r["source"] or "-") for r in rows])
    )
    return out


def against_parts(comparison: Comparison) -> list[Part]:
    """Show the region in which the units equal the reference, then the difference at each up and gate."""
    compared = comparison.unit_differences
    if not compared:
        return []
    lines = [
        (one.name, _region("gate", one.same_gate), _region("up", one.same_up), Fixed(one.rms),
         percent(one.relative_rms))
        for one in compared
    ]  # fmt: skip
    columns = ("gated unit", "the same for", "and", "rms difference", "of the rms")
    note = f"rms: for independent normal gate and up, mean 0, std {comparison.question.std:g}"
    out: list[Part] = [Table(columns, lines, f"Difference from {compared[0].against}"), Line(note, quiet=True)]
    names, values = [one.name for one in compared], comparison.units[0].values
    for up in dict.fromkeys(comparison.ups):
        places = [at for at, value in enumerate(values) if value.up == up]
        table = [(point(values[at].x), *(Fixed(apart[at]) for apart in comparison.value_differences)) for at in places]
        out.append(Table(("gate", *names), table, f"Difference at up = {up:g}", side_by_side=True))
    return out


def point(x: float) -> float | int:
    """Return x as a cell; whole numbers have no decimals."""
    return int(x) if x == int(x) and abs(x) < 1e6 else x


def flat(row: Row) -> dict[str, Any]:
    """Flatten a row for CSV: values as one list per key, operations as a total, keys of widths prefixed by `iso_`."""
    out = {k: v for k, v in row.items() if k not in ("values", "operations", "iso_params", *_AGAINST)}
    out |= {field.name: [value[field.name] for value in row["values"]] for field in fields(GatedValue)}
    out["operations"] = row["operations"]["total"]
    out |= {f"iso_{key}": value for key, value in row.get("iso_params", {}).items()}
    if "against" in row:
        out |= {key: row[key] for key in _AGAINST} | {"difference": [value["difference"] for value in row["values"]]}
    return out


def _row(comparison: Comparison, at: int) -> dict[str, Any]:
    report = comparison.units[at]
    unit, facts = report.unit, asdict(report.facts)
    bounds = ("minimum", "minimum_at", "maximum", "maximum_at", "lipschitz")
    row = {
        "name": unit.name, "formula": unit.formula, "gated": True,
        "values": [asdict(value) for value in report.values],
        **{key: facts.pop(key) for key in bounds},
        "std": report.std, **facts,
        "operations": report.operations.record(),
        "used_by": unit.used_by or None, "source": unit.source or None,
    }  # fmt: skip
    if iso := comparison.iso.get(unit.name):
        widths = {key: value for key, value in asdict(iso).items() if key != "widths"}
        row["iso_params"] = {"d_model": widths.pop("d_model"), **asdict(iso.widths), **widths}
    if comparison.unit_differences:
        one, apart = comparison.unit_differences[at], comparison.value_differences[at]
        row["values"] = [{**value, "difference": d} for value, d in zip(row["values"], apart, strict=True)]
        row |= {
            "against": one.against, "same_gate": _ends(one.same_gate), "same_up": _ends(one.same_up),
            "rms_difference": one.rms, "relative_rms_difference": one.relative_rms,
        }  # fmt: skip
    return row


def _ends(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else [x if math.isfinite(x) else None for x in interval]


# --- for people -------------------------------------------------------------------------------------------------------


def _facts(rows: Sequence[Row]) -> list[Part]:
    std = rows[0]["std"]
    lines: list[tuple[Any, ...]] = [
        ("range", *(_range(row) for row in rows)),
        ("lowest at (gate, up)", *(_place(row["minimum_at"]) for row in rows)),
        ("Lipschitz", *("unbounded" if row["lipschitz"] is None else str(Fixed(row["lipschitz"])) for row in rows)),
        ("growth", *(f"{row['growth']:g}" for row in rows)),
        ("operations", *(row["operations"]["total"] for row in rows)),
    ]
    shape = Table(("", *(row["name"] for row in rows)), lines, "Shape", side_by_side=True)
    lines = [
        ("zero %", *(in_percent(row["exact_zero_share"]) for row in rows)),
        ("near zero %", *(in_percent(row["zero_share"]) for row in rows)),
        *((key, *(Fixed(row[key]) for row in rows)) for key in ("mean", "variance", "gain")),
        ("linear %", *(in_percent(row["linear_share"]) for row in rows)),
        ("product %", *(in_percent(row["product_share"]) for row in rows)),
        ("f alone: linear %", *(in_percent(row["linear_share_of_gate_function"]) for row in rows)),
    ]
    title = f"Independent normal gate and up, mean 0, std {std:g}"
    normal = Table(("", *(row["name"] for row in rows)), lines, title, side_by_side=True)
    notes = [
        f"near zero: |y| ≤ {NEAR_ZERO:g} · gain: weights of std gain / √fan_in keep E[y²]",
        "linear: the share of y's variance that a linear function of gate and up explains;",
        "f alone: the same for the gate's function alone; product: the share that gate · up",
        "explains in addition",
    ]
    along = Line("growth: y grows as t^growth along gate = up = t; ungated silu and gelu have growth 1", quiet=True)
    costs = [(row["name"], row["operations"]["text"]) for row in rows]
    costs_table = Table(("gated unit", "operations per element"), costs)
    return [shape, along, costs_table, normal, *(Line(text, quiet=True) for text in notes)]


def _range(row: Row) -> str:
    low, high = (None if row[end] is None else f"{row[end]:.4f}" for end in ("minimum", "maximum"))
    return interval(low, high, (row["minimum_at"] is not None, row["maximum_at"] is not None))


def _place(at: Sequence[float] | None) -> str:
    return "-" if at is None else f"({', '.join(f'{x:g}' for x in at)})"


def _values(rows: Sequence[Row], up: float) -> list[Part]:
    """Show value and both slopes at one up: one table each, or a single table if there is only one unit."""
    kinds = [("Value", "value"), ("∂/∂gate", "slope"), ("∂/∂up", "slope_up")]
    chosen = [[value for value in row["values"] if value["up"] == up] for row in rows]
    if len(rows) == 1:
        lines = [(point(v["x"]), *(Fixed(v[key]) for _, key in kinds)) for v in chosen[0]]
        return [Table(("gate", *(title.lower() for title, _ in kinds)), lines, f"{rows[0]['name']} at up = {up:g}")]
    return [
        Table(
            ("gate", *(row["name"] for row in rows)),
            [(point(v["x"]), *(Fixed(values[i][key]) for values in chosen)) for i, v in enumerate(chosen[0])],
            f"{title} at up = {up:g}",
            side_by_side=True,
        )
        for title, key in kinds
    ]


def _iso(rows: Sequence[Row]) -> list[Part]:
    """Show the sizes of the plain and the gated block, which are the same for every unit, then each unit's elementwise
    costs."""
    first = rows[0]["iso_params"]
    rounded = f", d_ff a multiple of {first['multiple_of']}" if first["multiple_of"] > 1 else ""
    blocks = [
        ("plain", first["plain_d_ff"], first["plain_params"], ""),
        ("gated", first["gated_d_ff"], first["gated_params"], f"{first['difference_percent']:+.2f} %"),
    ]
    title = f"Blocks of equal size, d_model {first['d_model']:,}, no biases{rounded}"
    lines = [
        (row["name"], *(row["iso_params"][f"{kind}_{what}_per_token"]
                        for what in ("elementwise_flops", "operations") for kind in ("plain", "gated")))
        for row in rows
    ]  # fmt: skip
    columns = ("gated unit", "plain FLOPs", "gated FLOPs", "plain operations", "gated operations")
    return [
        Table(("block", "d_ff", "parameters", "difference"), blocks, title),
        Table(columns, lines, "Elementwise, per token"),
        Line("plain: with the gate's function · FLOPs: 1 per element of a step", quiet=True),
    ]


def _region(name: str, interval: Interval | None) -> str:
    """Return text such as `gate ≤ 10`, `-7 ≤ up ≤ 7`, `every up` or `no up`."""
    if interval is None:
        return f"no {name}"
    low, high = (f"{x:.4g}" if math.isfinite(x) else "" for x in interval)
    if not (low or high):
        return f"every {name}"
    return f"{low} ≤ {name} ≤ {high}" if low and high else f"{name} ≤ {high}" if high else f"{name} ≥ {low}"
