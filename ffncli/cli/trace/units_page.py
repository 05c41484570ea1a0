"""The hidden units of a trace, as a page to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.block.units import NEAR_ZERO
from ffncli.show.parts import Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.run.engine.trace import StepRecord
    from ffncli.run.measure.units import HiddenUnit


def unit_parts(record: StepRecord) -> list[Part]:
    """How many units are dead, if any and with several tokens; the requested units."""
    units = record.units
    if units is None:
        return []
    parts: list[Part] = []
    if units.near_dead and units.tokens > 1:
        near = f"{units.near_dead:,} within {NEAR_ZERO:g} of it" if units.near_dead > units.dead else ""
        text = f"{units.dead:,} of {units.units:,} units are zero for every token"
        parts.append(Line(", ".join(filter(None, (text, near))), quiet=True))
    if units.largest_norm == units.most_active:
        orders = [("largest-norm and most active units", units.largest_norm)]
    else:
        orders = [("largest-norm units", units.largest_norm), ("most active units", units.most_active)]
    return parts + [_table(f"{title} of {record.name}", order) for title, order in orders if order]


def _table(title: str, order: Sequence[HiddenUnit]) -> Table:
    """A row per unit: its size over the tokens, its largest value and its token, the size of what it writes."""
    writes = order[0].writes is not None
    columns = ("unit", "norm", "mean |x|", "largest", "at token", *(("writes",) if writes else ()))
    rows = [
        (str(u.unit), u.norm, u.mean_abs, u.largest, str(u.token), *((u.writes,) if u.writes is not None else ()))
        for u in order
    ]
    return Table(columns, rows, title + (" (writes: norm × its W2 column's norm)" if writes else ""))
