"""The facts of `ffn activations`, as JSON, as CSV and as tables to read."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from ffncli.block.analysis.curve import Shape
from ffncli.block.analysis.facts import CONVENTIONS, Facts
from ffncli.block.analysis.operations import CONVENTION, operations
from ffncli.block.value import NEAR_ZERO
from ffncli.cli.activations.points import point
from ffncli.show.parts import Answer, Fixed, Line, Part, Table
from ffncli.show.text import finite, in_percent, interval


def answer(facts: Sequence[Facts], gated: Sequence[Mapping[str, Any]], ratios: bool) -> Answer:
    """A row per activation, then those of gated units (`gated_page.rows`); `ratios`: people see f(x) / x too."""
    rows = [row(one) for one in facts]
    flat = [_flat(row) for row in rows]
    unit_parts: list[Part] = []
    conventions = {**CONVENTIONS, "operations": CONVENTION}
    if gated:
        from ffncli.block.analysis import gated as gated_facts
        from ffncli.cli.activations import gated_page

        flat += [gated_page.flat(row) for row in gated]
        unit_parts = gated_page.parts(gated)
        conventions |= gated_facts.CONVENTIONS
    columns = tuple(dict.fromkeys(key for line in flat for key in line))
    table = Table(columns, [tuple(line.get(key) for key in columns) for line in flat])
    parts: list[Part] = []
    if facts:
        parts += [Table(("name", "formula"), [(one.name, one.formula) for one in facts])]
        parts += [_shapes(facts), *_normal(facts), *_values(facts, ratios), *_about(facts)]
    return Answer("activations", {"rows": [*rows, *gated]}, table, [*parts, *unit_parts], conventions)


def row(one: Facts) -> dict[str, Any]:
    """A row under the keys of docs/json.md."""
    s = one.shape
    return {
        "name": one.name,
        "formula": one.formula,
        "values": [{"x": v.x, "value": v.value, "slope": v.slope, "ratio": v.ratio} for v in one.values],
        "minimum": finite(s.minimum), "minimum_at": s.minimum_at,
        "maximum": finite(s.maximum), "maximum_at": s.maximum_at,
        "lipschitz": finite(s.lipschitz), "steepest_at": s.steepest_at,
        "monotone": s.monotone, "smoothness_at_0": one.smoothness_at_0, "kinks": list(one.kinks),
        "std": one.std, "zero_share": one.zero_share, "exact_zero_share": one.exact_zero_share,
        "mean": one.mean, "variance": one.variance, "gain": one.gain, "gradient_gain": one.gradient_gain,
        "operations": operations(one.name).record(), "slope_operations": operations(one.name, slope=True).record(),
        "used_by": one.used_by or None, "source": one.source or None,
    }  # fmt: skip


def _flat(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row for CSV: values as lists, one per key; for operations, their total."""
    counts = {key: row[key]["total"] for key in ("operations", "slope_operations")}
    return {**{k: v for k, v in row.items() if k != "values"}, **counts, **_columns(row["values"])}


def _columns(values: Sequence[dict[str, float | None]]) -> dict[str, list[float | None]]:
    """Values as lists, one per key: what CSV joins."""
    return {key: [v[key] for v in values] for key in ("x", "value", "slope", "ratio")}


_AT_0 = 1e-3  # a kink this near to 0 is shown in the column "at 0"; xielu has one at -1e-6


# --- for people -------------------------------------------------------------------------------------------------------


def _shapes(facts: Sequence[Facts]) -> Table:
    columns = ["name", "range", "lowest at", "Lipschitz", "steepest at", "monotone", "at 0"]
    rows: list[list[Any]] = [
        [
            one.name, _range(one.shape), _place(one.shape.minimum_at),
            "unbounded" if math.isinf(one.shape.lipschitz) else Fixed(one.shape.lipschitz),
            _place(one.shape.steepest_at), one.shape.monotone, _smoothness(one.smoothness_at_0),
        ]
        for one in facts
    ]  # fmt: skip
    if any(abs(x) > _AT_0 for one in facts for x in one.kinks):
        columns.append("kinks at")
        for line, one in zip(rows, facts, strict=True):
            line.append(", ".join(f"{x:g}" for x in one.kinks) or "-")
    return Table(tuple(columns), [tuple(line) for line in rows], "Shape")


def _range(s: Shape) -> str:
    low, high = (None if math.isinf(bound) else _short(bound) for bound in (s.minimum, s.maximum))
    return interval(low, high, (s.minimum_at is not None, s.maximum_at is not None))


def _short(value: float) -> str:
    return f"{value:g}" if value == int(value) else str(Fixed(value))


def _place(x: float | None) -> Fixed | str:
    return "-" if x is None else Fixed(x)


def _smoothness(order: int | None) -> str:
    return "smooth" if order is None else {-1: "jumps", 0: "kink"}.get(order, f"C{order}")


def _normal(facts: Sequence[Facts]) -> list[Part]:
    columns = ("name", "zero %", "near zero %", "mean", "variance", "gain", "gradient gain")
    rows = [
        (
            one.name, in_percent(one.exact_zero_share), in_percent(one.zero_share),
            *map(Fixed, (_mean(one), one.variance, one.gain, one.gradient_gain)),
        )
        for one in facts
    ]  # fmt: skip
    note = f"near zero: |f(x)| ≤ {NEAR_ZERO:g} · gain: weights of std gain / √fan_in keep the second moment"
    return [Table(columns, rows, f"A normal input of mean 0 and std {facts[0].std:g}"), Line(note, quiet=True)]


def _mean(one: Facts) -> float:
    """The mean, 0 where it is only rounding compared with the spread: 1e-17 for tanh.

    A narrow input also has a small mean.
    """
    return one.mean if abs(one.mean) > 1e-12 * math.sqrt(one.variance) else 0.0


def _values(facts: Sequence[Facts], ratios: bool) -> list[Part]:
    """f, slope and f / x: one table each, or a single table for a single activation."""
    xs = [v.x for v in facts[0].values]
    if not xs:
        return []
    if len(facts) == 1:
        lines = [(point(v.x), *map(_number, (v.value, v.slope, v.ratio))) for v in facts[0].values]
        return [Table(("x", "f(x)", "slope", "f(x)/x"), lines, facts[0].name)]
    kinds = [("f(x)", "value"), ("Slope", "slope"), *([("f(x)/x", "ratio")] if ratios else [])]
    return [
        Table(
            ("x", *(one.name for one in facts)),
            [(point(x), *(_number(getattr(one.values[i], key)) for one in facts)) for i, x in enumerate(xs)],
            title, side_by_side=True,
        )
        for title, key in kinds
    ]  # fmt: skip


def _number(value: float | None) -> Fixed | None:
    return None if value is None else Fixed(value)


def _about(facts: Sequence[Facts]) -> list[Part]:
    """Cost, users and source: a table of two columns each, which fits any terminal."""
    return [
        Table(("name", "operations per element"), [(one.name, operations(one.name).text) for one in facts]),
        Table(("name", "used by"), [(one.name, one.used_by or "-") for one in facts]),
        Table(("name", "source"), [(one.name, one.source or "-") for one in facts]),
    ]
