"""The ratios of a run as a plot, for a file or a notebook."""

from collections.abc import Sequence

from ffncli.bench.results.row import ResultRow
from ffncli.show.plots.plot import IntervalPlot, IntervalRow

_MOST_ROWS = 300  # maximum for a chart in a file


def ratio_plot(rows: Sequence[ResultRow]) -> list[IntervalPlot]:
    """Plot the ratios for a file: one chart with a row per case and kernel, whose title says if rows had to be left
    out. Empty if there are no ratios."""
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
    return [IntervalPlot(title, f"time divided by {timed[0].baseline}'s, with its 95 % interval", lines)]
