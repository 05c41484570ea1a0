"""resolvable_difference: the least difference from the baseline that a row's interval would have decided."""

from __future__ import annotations

from math import expm1, log, log1p

from ffncli.bench.judge.warnings import Code, has
from ffncli.bench.results.row import ResultRow


def resolvable_difference(row: ResultRow, margin: float) -> float | None:
    """As a share of 1 (0.05: a kernel that takes 5 % longer, or so much less); of as wide an interval, placed anywhere.

    A verdict needs the whole interval beyond the margin, so that is the interval's half-width on top of it. None for
    the baseline, for a row without an interval, and where other work disturbed so many blocks that none decides.
    """
    if row.status != "ok" or row.kernel == row.baseline or not row.ratio_low or not row.ratio_high:
        return None
    if has(row.warnings, Code.PREEMPTED) or has(row.warnings, Code.UNRESOLVED):
        return None
    return expm1(log1p(margin) + (log(row.ratio_high) - log(row.ratio_low)) / 2)
