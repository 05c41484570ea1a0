"""The hidden units of a trace, as a page to read."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ffncli.block.value import NEAR_ZERO
from ffncli.show.parts import Line, Part, Table
from ffncli.show.tensors import edges
from ffncli.show.text import plural

if TYPE_CHECKING:
    from ffncli.run.engine.trace import StepRecord


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
    if units.largest_norm:
        parts.append(_sizes_table(record, tokens))
        if any(unit.writes is not None for unit in units.largest_norm):
            parts.append(
                Line("writes: the norm of what the unit adds to the output, norm × that of its W2 column", True)
            )
        if units.tokens > 1:
            parts.append(_token_table(record, tokens))
    return parts


def _sizes_table(record: StepRecord, tokens: Sequence[str]) -> Table:
    """A row per unit: its size over the tokens, its largest value and at which token, what it writes."""
    assert record.units is not None
    order = {unit.unit: unit for unit in (*record.units.largest_norm, *record.units.most_active)}.values()
    writes = any(unit.writes is not None for unit in order)
    columns = ("unit", "norm", "mean |x|", "largest", "at token", *(("writes",) if writes else ()))
    rows = [
        (
            str(u.unit), u.norm, u.mean_abs, u.largest, _label(u.token, tokens),
            *((u.writes,) if u.writes is not None else ()),
        )
        for u in sorted(order, key=lambda unit: -unit.norm)
    ]  # fmt: skip
    count = f"{record.units.tokens:,} {plural('token', record.units.tokens)}"
    title = f"{record.name}: the {plural('unit', len(rows))} with the largest norm or mean |x| over {count}"
    return Table(columns, rows, title)


def _token_table(record: StepRecord, tokens: Sequence[str]) -> Table:
    """A row per token, as many as the step shows: the units with its largest values."""
    assert record.units is not None
    every = record.units.per_token
    shown = edges(len(every), max(1, len(record.values_index[-2])))
    rows: list[tuple[str, ...]] = []
    for before, at in pairwise((-1, *shown)):
        one = every[at]
        if at > before + 1:
            rows.append(("…", *("" for _ in one.units)))
        cells = (f"{unit}: {value:.4g}" for unit, value in zip(one.units, one.values, strict=True))
        rows.append((_label(one.token, tokens), *cells))
    columns = ("token", *map(str, range(1, len(every[0].units) + 1)))
    return Table(columns, rows, f"{record.name}: each token's units with the largest |x|", labels=1)


def _label(token: int, tokens: Sequence[str]) -> str:
    return tokens[token] if tokens else str(token)
