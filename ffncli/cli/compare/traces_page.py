"""The page of `ffn compare` for two saved traces: the first step that differs, and why."""

from __future__ import annotations

from dataclasses import asdict, fields
from typing import TYPE_CHECKING

from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import finite

if TYPE_CHECKING:
    from ffncli.run.saved.compare import TensorRow, TraceComparison
    from ffncli.run.saved.saved import Saved


def answer(base: Saved, new: Saved, comparison: TraceComparison, verdict: bool = True) -> Answer:
    """The comparison as JSON, as CSV (one row per step, then per weight) and as a page.

    Without `verdict` the page leaves it to the error which step differs first, and why.
    """
    from ffncli.run.saved.compare import CONVENTIONS

    body = {"base": base.where, "new": new.where, **asdict(comparison)}
    columns = tuple(f.name for f in fields(comparison.rows[0]))
    every = [*comparison.rows, *comparison.weights]
    rows = Table(columns, [tuple(getattr(row, name) for name in columns) for row in every])
    parts: list[Part] = [Heading(f"{base.where} against {new.where}", "BASE is the reference")]
    parts += [Line(f"{m.field}: {m.base} in BASE, {m.new} in NEW", quiet=True) for m in comparison.mismatches]
    parts.append(_table(comparison.rows, "step", comparison.first))
    if comparison.weights:
        parts.append(_table(comparison.weights, "weight", None))
    if comparison.first is None:
        parts.append(Heading(f"all {len(comparison.rows)} steps agree"))
        if other := [row.step for row in comparison.weights if not row.agrees]:
            parts.append(Line(f"though weights differ: {', '.join(other)}"))
    elif verdict:
        parts.append(Heading(verdict_of(comparison.row(comparison.first))))
        parts += [Line(cause) for cause in comparison.causes]
    return Answer("compare", body, rows, parts, CONVENTIONS)


def _table(rows: tuple[TensorRow, ...], first_column: str, first: str | None) -> Table:
    columns = (first_column, "max error", "relative", "ulps", "worst element", "base", "new", "ok")
    cells = [
        (row.step, row.max_error, finite(row.relative_error), row.ulps, row.worst, row.base, row.new, row.agrees)
        for row in rows
    ]
    return Table(columns, cells, emphasis=frozenset(at for at, row in enumerate(rows) if row.step == first))


def verdict_of(row: TensorRow) -> str:
    """`up differs first: at up[0,3] base has 1.5, new 1.25 ...`."""
    at = f"{row.step} differs first: {row.worst} is {row.base!r} in BASE, {row.new!r} in NEW"
    if row.nonfinite:
        return f"{at} ({row.nonfinite:,} values are finite in only one of them)"
    if finite(row.relative_error) is None:
        return f"{at}; the whole step is 0 in BASE, so there is no relative error"
    near = row.base is not None and row.new is not None and abs(row.new - row.base) <= abs(row.base)
    ulps = (
        f", {row.ulps:.4g} ulps of {row.dtype}" if near and row.ulps is not None else ""
    )  # otherwise the unit is meaningless
    return f"{at}; relative error {row.relative_error:.3g} > {row.tolerance:g}{ulps}"
