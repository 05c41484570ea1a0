"""Ratios with their intervals as bars of text, on one scale for all cases of a run."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.bench.results.row import ResultRow
from ffncli.cli.common.results.words import ratio
from ffncli.show.bars import interval_bar
from ffncli.show.parts import Line, Part
from ffncli.show.plots.axes import axis
from ffncli.show.plots.plot import IntervalPlot, IntervalRow
from ffncli.show.tables import Table

_COLUMNS = 40
_MOST_ROWS = 300  # of a chart in a file


def ratio_bars(rows: Sequence[ResultRow]) -> list[Part]:
    """A table for each case: every kernel's interval around its ratio, with a mark at 1, and the scale in words.
    Nothing without ratios."""
    timed = [row for row in rows if row.ratio is not None and row.kernel != row.baseline]
    ends = [v for row in timed for v in (row.ratio, row.ratio_low, row.ratio_high, 1.0) if v is not None]
    scale = axis(ends, log=True) if timed else None
    if scale is None:
        return []
    parts: list[Part] = []
    for case in dict.fromkeys(row.case for row in timed):
        lines = []
        for row in timed:
            if row.case == case and row.ratio is not None:
                low, high = (None if end is None else scale.share(end) for end in (row.ratio_low, row.ratio_high))
                bar = interval_bar(low, scale.share(row.ratio), high, scale.share(1.0), _COLUMNS)
                lines.append((row.kernel, bar, ratio(row)))
        parts.append(Table(("kernel", "time over the baseline's", "ratio"), lines, title=case))
    text = f"from {min(ends):.3g} to {max(ends):.3g} on a logarithmic scale; │ is 1, ├ and ┤ end the interval"
    return [*parts, Line(text, quiet=True)]


def ratio_plot(rows: Sequence[ResultRow]) -> list[IntervalPlot]:
    """The same for a file: one chart with a row for each case and kernel, which says if there are too many to draw;
    nothing without ratios."""
    every = [row for row in rows if row.ratio is not None and row.kernel != row.baseline]
    if not every:
        return []
    timed = every[:_MOST_ROWS]
    several = len({row.case for row in timed}) > 1
    names = [f"{row.case}: {row.kernel}" if several else row.kernel for row in timed]
    lines = [
        IntervalRow(name, row.ratio or 0.0, row.ratio_low, row.ratio_high)
        for name, row in zip(names, timed, strict=True)
    ]
    title = "" if several else timed[0].case
    if len(every) > len(timed):
        title = f"the first {len(timed):,} of {len(every):,} rows"
    return [IntervalPlot(title, f"time over that of {timed[0].baseline}, with its 95 % interval", lines)]
