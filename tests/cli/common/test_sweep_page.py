"""The chart of ratios that --plot-file writes: which rows it has."""

import pytest

from ffncli.bench.results.row import ResultRow
from ffncli.cli.common.sweep_page import ratio_plot


def rows(count: int, cases: int = 1) -> list[ResultRow]:
    """The baseline and `count` kernels, spread over cases."""
    fields = {"baseline": "eager", "status": "ok"}
    every = [ResultRow(kernel="eager", case="case 0", ratio=1.0, **fields)]
    return every + [
        ResultRow(kernel=f"k{at}", case=f"case {at % cases}", ratio=1 + at / 10, ratio_low=1.0, **fields)
        for at in range(count)
    ]


def test_a_row_for_each_kernel_but_the_baseline() -> None:
    (plot,) = ratio_plot(rows(2))
    assert (plot.title, [row.name for row in plot.rows]) == ("case 0", ["k0", "k1"])
    assert [(row.value, row.low, row.high) for row in plot.rows] == [(1.0, 1.0, None), (1.1, 1.0, None)]
    (plot,) = ratio_plot(rows(2, cases=2))
    assert (plot.title, [row.name for row in plot.rows]) == ("", ["case 0: k0", "case 1: k1"])
    assert ratio_plot(rows(0)) == []


@pytest.mark.parametrize(("count", "title"), [(300, "case 0"), (1301, "the first 300 of 1,301 rows")])
def test_a_chart_says_that_there_are_more(count: int, title: str) -> None:
    (plot,) = ratio_plot(rows(count))
    assert (plot.title, len(plot.rows)) == (title, 300)
