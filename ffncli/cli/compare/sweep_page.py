"""The sweeps of one stored result as tables; `ffn compare FILE.csv --plot` draws them below."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from ffncli.bench.judge.curves import SpeedPoint, SpeedSweep
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

_COLUMNS = ("axis", "size", "kernel", "baseline", "speed", "speed_low", "speed_high", "verdict", "block", "where")
_CONVENTIONS = {
    "speed": "time of the baseline over time of the kernel in the same rounds: 1.25 is a quarter faster; speed_low to"
    " speed_high holds it with 95 % confidence"
}


def answer(paths: Sequence[Path], sweeps: Sequence[SpeedSweep]) -> Answer:
    """JSON has the sweeps, CSV a row for each size and kernel."""
    name = ",".join(map(str, paths))
    rows = [
        (one.axis, point.size, curve.kernel, one.baseline, point.speed, point.speed_low, point.speed_high,
         point.verdict, one.block, one.where)
        for one in sweeps for curve in one.curves for point in curve.points
    ]  # fmt: skip
    parts: list[Part] = []
    for one in sweeps:
        remark = ", ".join(filter(None, (one.block, one.where)))
        parts += [Heading(f"speed against {one.baseline}", remark), _table(one)]
    if any(row[7] == "inconclusive" for row in rows):
        parts.append(Line("?: inconclusive", quiet=True))
    body = {"base": name, "sweeps": [asdict(one) for one in sweeps]}
    return Answer("compare", body, Table(_COLUMNS, rows), parts, _CONVENTIONS)


def _table(sweep: SpeedSweep) -> Table:
    """A line for each size, a column for each kernel but the baseline, which is 1."""
    curves = [curve for curve in sweep.curves if curve.kernel != sweep.baseline]
    points = {(curve.kernel, point.size): point for curve in curves for point in curve.points}
    sizes = sorted({point.size for curve in sweep.curves for point in curve.points})
    rows = [(size, *(_cell(points.get((curve.kernel, size))) for curve in curves)) for size in sizes]
    return Table((sweep.axis, *(curve.kernel for curve in curves)), rows, side_by_side=True)


def _cell(point: SpeedPoint | None) -> str | None:
    """`1.25 [1.22, 1.28]`, with `?` where that is inconclusive."""
    if point is None:
        return None
    ends = (point.speed_low, point.speed_high)
    interval = "" if None in ends else f" [{ends[0]:.3f}, {ends[1]:.3f}]"
    return f"{point.speed:.3f}{interval}{' ?' if point.verdict == 'inconclusive' else ''}"
