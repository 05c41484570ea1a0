"""The hidden units of a trace, as a page to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.block.units import NEAR_ZERO
from ffncli.show.parts import Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import plural

if TYPE_CHECKING:
    from ffncli.run.engine.trace import StepRecord
    from ffncli.run.measure.units import HiddenUnit


def unit_parts(record: StepRecord, tokens: Sequence[str]) -> list[Part]:
    """How many units are dead, where any is and there are several tokens; the units that were requested.

    `tokens` are the labels of the input's rows, where a prompt gives them texts.
    """
    units = record.units
    if units is None:
        return []
    parts: list[Part] = []
    if units.near_dead and units.tokens > 1:
        near = f"{units.near_dead:,} within {NEAR_ZERO:g} of it" if units.near_dead > units.dead else ""
        text = f"{units.dead:,} of {units.units:,} units are zero for every token"
        parts.append(Line(", ".join(filter(None, (text, near))), quiet=True))
    if units.largest_norm == units.most_active:
        orders = [("norm and the largest mean |x|", units.largest_norm)]
    else:
        orders = [("norm", units.largest_norm), ("mean |x|", units.most_active)]
    count = f"{units.tokens:,} {plural('token', units.tokens)}"
    for size, order in orders:
        if order:
            title = f"{record.name}: the {plural('unit', len(order))} with the largest {size} over {count}"
            parts.append(_table(title, order, tokens))
    if any(unit.writes is not None for unit in units.largest_norm):
        parts.append(Line("writes: the norm of what the unit adds to the output, norm × that of its W2 column", True))
    return parts


def _table(title: str, order: Sequence[HiddenUnit], tokens: Sequence[str]) -> Table:
    """A row per unit: its size over the tokens, its largest value and at which token, what it writes."""
    writes = order[0].writes is not None
    columns = ("unit", "norm", "mean |x|", "largest", "at token", *(("writes",) if writes else ()))
    rows = [
        (
            str(u.unit), u.norm, u.mean_abs, u.largest, tokens[u.token] if tokens else str(u.token),
            *((u.writes,) if u.writes is not None else ()),
        )
        for u in order
    ]  # fmt: skip
    return Table(columns, rows, title)
