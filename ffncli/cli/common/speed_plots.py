"""Speed against a swept size as curves, one plot for each sweep."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.show.plots.plot import Plot, Series

if TYPE_CHECKING:
    from ffncli.bench.judge.curves import SpeedCurve, SpeedSweep


def speed_plots(sweeps: Sequence[SpeedSweep]) -> list[Plot]:
    """A plot for each sweep, the sizes on a log axis; intervals are drawn in a file alone."""
    return [
        Plot(
            ", ".join(filter(None, (f"speed against {one.baseline}", one.block, one.where))),
            one.axis,
            f"times as fast as {one.baseline}",
            [_series(curve, one.baseline) for curve in one.curves],
            log_x=True,
            marks=True,
        )
        for one in sweeps
    ]


def _series(curve: SpeedCurve, baseline: str) -> Series:
    points = [(float(point.size), point.speed) for point in curve.points]
    if curve.kernel == baseline:
        return Series(f"{curve.kernel} (baseline)", points)
    ends = [(_or_nan(point.speed_low), _or_nan(point.speed_high)) for point in curve.points]
    return Series(curve.kernel, points, ends)


def _or_nan(value: float | None) -> float:
    return math.nan if value is None else value
