"""What `ffn activations` says of gated units: rows for JSON and CSV, tables to read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from ffncli.block.analysis.gated_facts import GatedReport, GatedValue
from ffncli.block.units import NEAR_ZERO
from ffncli.cli.activations.points import point
from ffncli.show.parts import Line, Part
from ffncli.show.tables import Fixed, Table
from ffncli.show.text import in_percent, interval

if TYPE_CHECKING:
    from ffncli.models.counting.iso_units import IsoUnit

Row = Mapping[str, Any]


def rows(reports: Sequence[GatedReport], iso: Mapping[str, IsoUnit]) -> list[dict[str, Any]]:
    """A row per gated unit under the keys of docs/json.md; `iso`, by a unit's name, adds `iso_params`."""
    return [_row(report, iso.get(report.unit.name)) for report in reports]


def parts(found: Sequence[Row]) -> list[Part]:
    """The same rows to read: formulas, facts side by side, values and both slopes for each up, widths."""
    if not found:
        return []
    out: list[Part] = [Table(("gated unit", "formula"), [(row["name"], row["formula"]) for row in found])]
    out += _facts(found)
    ups = tuple(dict.fromkeys(value["up"] for row in found for value in row["values"]))
    out += [part for up in ups for part in _values(found, up)]
    if "iso_params" in found[0]:
        out += _iso(found)
    out.append(
        Table(
            ("gated unit", "used by", "source"), [(r["name"], r["used_by"] or "-", r["source"] or "-") for r in found]
        )
    )
    return out


def flat(row: Row) -> dict[str, Any]:
    """A row for CSV: values as lists, one per key; of the operations their total; `iso_` before the keys of widths."""
    out = {key: value for key, value in row.items() if key not in ("values", "operations", "iso_params")}
    out |= {field.name: [value[field.name] for value in row["values"]] for field in fields(GatedValue)}
    out["operations"] = row["operations"]["total"]
    return out | {f"iso_{key}": value for key, value in row.get("iso_params", {}).items()}


def _row(report: GatedReport, iso: IsoUnit | None) -> dict[str, Any]:
    unit, found = report.unit, asdict(report.facts)
    bounds = ("minimum", "minimum_at", "maximum", "maximum_at", "lipschitz")
    row = {
        "name": unit.name, "formula": unit.formula, "gated": True,
        "values": [asdict(value) for value in report.values],
        **{key: found.pop(key) for key in bounds},
        "std": report.std, **found,
        "operations": report.operations.record(),
        "used_by": unit.used_by or None, "source": unit.source or None,
    }  # fmt: skip
    if iso:
        own = {key: value for key, value in asdict(iso).items() if key != "widths"}
        row["iso_params"] = {"d_model": own.pop("d_model"), **asdict(iso.widths), **own}
    return row


# --- for people -------------------------------------------------------------------------------------------------------


def _facts(found: Sequence[Row]) -> list[Part]:
    std = found[0]["std"]
    lines: list[tuple[str, list[Any]]] = [
        ("range", [_range(row) for row in found]),
        ("lowest at (gate, up)", [_place(row["minimum_at"]) for row in found]),
        ("Lipschitz", ["unbounded" if row["lipschitz"] is None else str(Fixed(row["lipschitz"])) for row in found]),
        ("growth", [f"{row['growth']:g}" for row in found]),
        ("operations", [row["operations"]["total"] for row in found]),
    ]
    shape = Table(("", *(row["name"] for row in found)), _lines(lines), "Shape", side_by_side=True)
    lines = [
        ("zero %", [in_percent(row["exact_zero_share"]) for row in found]),
        ("near zero %", [in_percent(row["zero_share"]) for row in found]),
        *((key, [Fixed(row[key]) for row in found]) for key in ("mean", "variance", "gain")),
        ("linear %", [in_percent(row["linear_share"]) for row in found]),
        ("product %", [in_percent(row["product_share"]) for row in found]),
        ("f alone: linear %", [in_percent(row["linear_share_of_gate_function"]) for row in found]),
    ]
    title = f"Gate and up normal, independent, of mean 0 and std {std:g}"
    normal = Table(("", *(row["name"] for row in found)), _lines(lines), title, side_by_side=True)
    said = [
        f"near zero: |y| ≤ {NEAR_ZERO:g} · gain: weights of std gain / √fan_in keep E[y²]",
        "linear: the share of y's variance that a straight function of gate and up has;",
        "f alone: the same of the gate's function of one input; product: what gate · up",
        "has beside it",
    ]
    along = Line("growth: y grows as t^growth along gate = up = t; silu and gelu alone have 1", quiet=True)
    costs = [(row["name"], row["operations"]["text"]) for row in found]
    costs_table = Table(("gated unit", "operations per element"), costs)
    return [shape, along, costs_table, normal, *(Line(text, quiet=True) for text in said)]


def _lines(lines: Sequence[tuple[str, Sequence[Any]]]) -> list[tuple[Any, ...]]:
    return [(name, *cells) for name, cells in lines]


def _range(row: Row) -> str:
    low, high = (None if row[end] is None else f"{row[end]:.4f}" for end in ("minimum", "maximum"))
    return interval(low, high, (row["minimum_at"] is not None, row["maximum_at"] is not None))


def _place(at: Sequence[float] | None) -> str:
    return "-" if at is None else f"({', '.join(f'{x:g}' for x in at)})"


def _values(found: Sequence[Row], up: float) -> list[Part]:
    """At one up: value and both slopes, a table each, or one together where there is one unit."""
    kinds = [("Value", "value"), ("∂/∂gate", "slope"), ("∂/∂up", "slope_up")]
    chosen = [[value for value in row["values"] if value["up"] == up] for row in found]
    if len(found) == 1:
        lines = [(point(v["x"]), *(Fixed(v[key]) for _, key in kinds)) for v in chosen[0]]
        return [Table(("gate", *(title.lower() for title, _ in kinds)), lines, f"{found[0]['name']} at up = {up:g}")]
    return [
        Table(
            ("gate", *(row["name"] for row in found)),
            [(point(v["x"]), *(Fixed(own[i][key]) for own in chosen)) for i, v in enumerate(chosen[0])],
            f"{title} at up = {up:g}", side_by_side=True,
        )
        for title, key in kinds
    ]  # fmt: skip


def _iso(found: Sequence[Row]) -> list[Part]:
    """Both blocks, whose sizes are the same for every unit; then what lies between their projections."""
    first = found[0]["iso_params"]
    rounded = f", d_ff a multiple of {first['multiple_of']}" if first["multiple_of"] > 1 else ""
    blocks = [
        ("plain", first["plain_d_ff"], first["plain_params"], ""),
        ("gated", first["gated_d_ff"], first["gated_params"], f"{first['difference_percent']:+.2f} %"),
    ]
    title = f"Blocks of equal size, d_model {first['d_model']:,}, no biases{rounded}"
    lines = [
        (row["name"], *(row["iso_params"][f"{kind}_{what}_per_token"]
                        for what in ("elementwise_flops", "operations") for kind in ("plain", "gated")))
        for row in found
    ]  # fmt: skip
    columns = ("gated unit", "plain FLOPs", "gated FLOPs", "plain operations", "gated operations")
    return [
        Table(("block", "d_ff", "parameters", "difference"), blocks, title),
        Table(columns, lines, "Elementwise, per token"),
        Line("plain: with the gate's function · FLOPs: 1 per element of a step", quiet=True),
    ]
