"""Differences of gated units from one of them, as JSON, as CSV and to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ffncli.block.analysis.gated import UNITS, GatedDifference, Interval
from ffncli.cli.activations.against_page import widened
from ffncli.cli.activations.points import point
from ffncli.show.parts import Answer, Fixed, Line, Part, Table
from ffncli.show.text import percent

CONVENTIONS = {
    "same_gate, same_up": "of a gated unit: y is the reference's for each gate in one together with each up in the"
    " other; [low, high], null for an end that is infinite; null instead of both: nowhere",
    "relative_rms_difference": "of a gated unit: rms_difference over the rms of the reference",
}


def with_gated_differences(page: Answer, compared: Sequence[GatedDifference], std: float) -> Answer:
    """The page with the keys, the columns and the parts of `compared`, which has the rows' names and order."""
    rows = [_row(one, old) for one, old in zip(compared, page.body["rows"], strict=True)]
    columns = [_flat(row) for row in rows]
    parts = [*_table(compared, std), *_values(rows, page.body["rows"])]
    return replace(widened(page, rows, columns, parts), conventions={**page.conventions, **CONVENTIONS})


def differences(row: Mapping[str, Any]) -> list[float]:
    """y minus the reference's y, for each of the row's values."""
    return [value["difference"] for value in row["values"]]


def _row(one: GatedDifference, old: Mapping[str, Any]) -> dict[str, Any]:
    reference = UNITS[one.against]
    values = [{**v, "difference": v["value"] - reference.value(v["x"], v["up"])} for v in old["values"]]
    return {
        "values": values, "against": one.against, "same_gate": _ends(one.same_gate), "same_up": _ends(one.same_up),
        "rms_difference": one.rms, "relative_rms_difference": one.relative_rms,
    }  # fmt: skip


def _ends(interval: Interval | None) -> list[float | None] | None:
    return None if interval is None else [x if math.isfinite(x) else None for x in interval]


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for CSV, with the differences as a list."""
    return {**{k: v for k, v in row.items() if k != "values"}, "difference": differences(row)}


# --- for people -------------------------------------------------------------------------------------------------------


def _table(compared: Sequence[GatedDifference], std: float) -> list[Part]:
    rows = [
        (one.name, _region("gate", one.same_gate), _region("up", one.same_up), Fixed(one.rms),
         percent(one.relative_rms))
        for one in compared
    ]  # fmt: skip
    columns = ("gated unit", "the same for", "and", "rms difference", "of the rms")
    note = f"rms: for gate and up normal, independent, of mean 0 and std {std:g}"
    return [Table(columns, rows, f"Difference from {compared[0].against}"), Line(note, quiet=True)]


def _region(name: str, interval: Interval | None) -> str:
    """`gate ≤ 10`, `-7 ≤ up ≤ 7`, `every up`, `no up`."""
    if interval is None:
        return f"no {name}"
    low, high = (f"{x:.4g}" if math.isfinite(x) else "" for x in interval)
    if not (low or high):
        return f"every {name}"
    return f"{low} ≤ {name} ≤ {high}" if low and high else f"{name} ≤ {high}" if high else f"{name} ≥ {low}"


def _values(rows: Sequence[Mapping[str, Any]], old: Sequence[Mapping[str, Any]]) -> list[Part]:
    """For each up a table: the difference of every unit at every gate."""
    names = [one["name"] for one in old]
    out: list[Part] = []
    for up in dict.fromkeys(value["up"] for value in rows[0]["values"]):
        chosen = [[value for value in row["values"] if value["up"] == up] for row in rows]
        lines = [
            (point(v["x"]), *(Fixed(values[i]["difference"]) for values in chosen)) for i, v in enumerate(chosen[0])
        ]
        out.append(Table(("gate", *names), lines, f"Difference at up = {up:g}", side_by_side=True))
    return out
