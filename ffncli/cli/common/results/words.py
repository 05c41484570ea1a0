"""How a row of `ffn bench` reads: its ratio, its verdict, its rate."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.bench.results.row import ResultRow
from ffncli.show.text import percent

STATUS = {"oom": "out of memory", "wrong": "WRONG RESULT"}  # full words for the CSV's short ones


def verdict(row: ResultRow) -> str:
    """`1.6 % faster`, `same within 2 %`, `inconclusive`; for a row without a time, its status."""
    if row.status != "ok":
        return STATUS.get(row.status, row.status)
    if row.kernel == row.baseline:
        return "baseline"
    if row.ratio is None:
        return "no baseline"
    if row.verdict in ("faster", "slower"):
        return f"{percent(abs(row.ratio - 1), 2)} {row.verdict}"
    return "same within 2 %" if row.verdict == "same" else row.verdict


def ratio(row: ResultRow) -> str | None:
    """`0.950 [0.948, 0.952]`; 1 for the baseline, None for a row without one."""
    if row.status != "ok" or row.ratio is None or row.kernel == row.baseline:
        return "1" if row.kernel == row.baseline and row.status == "ok" else None
    return f"{row.ratio:.3f}{interval(row.ratio_low, row.ratio_high)}"


def interval(low: float | None, high: float | None) -> str:
    """` [0.948, 0.952]`; empty if an end is not known."""
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def rates(rows: Sequence[ResultRow]) -> tuple[str, list[str | None]]:
    """(TFLOP/s or GFLOP/s, the rate of each row in it): the unit in which the fastest row is 1 or more."""
    known = [row.tflops for row in rows if row.tflops is not None]
    unit, factor = ("GFLOP/s", 1000.0) if known and max(known) < 1 else ("TFLOP/s", 1.0)
    return unit, [None if row.tflops is None else f"{factor * row.tflops:.3g}" for row in rows]
