"""The rows of `ffn bench --by-step` as a page: where the time goes."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.bench.judge.curves import StepShare, step_shares, together
from ffncli.bench.records import Case
from ffncli.bench.results.row import ResultRow
from ffncli.show.parts import Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.text import time_text

_LEAST = 0.0005  # a share that rounds to 0.1 %
_BAR = 12  # columns of the bar of a step that takes as long as the block
_WHY = "alone, a step finds different data in the cache, and the block has extra work between steps"


def by_step_parts(case: Case, where: str, rows: Sequence[ResultRow]) -> list[Part]:
    """One case, measured `where`: a table with the steps in their order, and what the shares do and do not show.

    `rows` are the block's and the steps' (`step gate`).
    """
    shares = step_shares(case, rows)
    blocks = frozenset(at for at, one in enumerate(shares) if one.whole)
    columns = ("step", "op", "share of the time", "", "time", "FLOPs", "GFLOP/s")
    table = Table(columns, [_line(one) for one in shares], emphasis=blocks)
    parts: list[Part] = [Heading("where the time goes", f"{case.label}, {where}"), table]
    if (total := together(shares)) is not None:
        parts.append(
            Line(f"the steps together take {_share(total)} of the block's time, not 100 %: {_WHY}", quiet=True)
        )
    if any(one.inside for one in shares):
        parts.append(Line("experts[e].gate: all experts that received tokens; part of experts", quiet=True))
    for note in dict.fromkeys(row.note for row in rows if row.note):
        who = [row.kernel for row in rows if row.note == note]
        parts.append(Line((f"{', '.join(who)}: " if len(who) < len(rows) else "") + note, quiet=True))
    return parts


def _line(one: StepShare) -> tuple[str | None, ...]:
    """One step; one that was not timed shows its status in place of its share."""
    label = f"  {one.name}" if one.inside else one.name
    if one.status not in ("ok", ""):
        return (label, one.op, one.status, "", None, None, None)
    share, bar = ("100 %", "") if one.whole else (_interval(one), _bar(one.share))
    rate = None if one.flops_per_s is None else f"{one.flops_per_s / 1e9:.3g}"
    flops = None if one.flops_share is None else _share(one.flops_share)
    return (label, one.op, share, bar, time_text(one.time_s), flops, rate)


def _interval(one: StepShare) -> str | None:
    """`38.2 % [37.9, 38.5]`."""
    if one.share is None:
        return None
    if one.low is None or one.high is None or one.high < _LEAST:
        return _share(one.share)
    return f"{_share(one.share)} [{100 * one.low:.1f}, {100 * one.high:.1f}]"


def _share(share: float) -> str:
    return f"{100 * share:.1f} %" if share >= _LEAST or not share else "< 0.1 %"


def _bar(share: float | None) -> str:
    """A bar as long as the share; a nonzero share has at least one mark."""
    return "" if not share else "█" * min(_BAR, max(1, round(_BAR * share)))
