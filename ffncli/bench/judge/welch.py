"""How much slower NEW is than BASE: Welch's two-sample t interval on the logs of times, one value per process.

Source: B. L. Welch, Biometrika 34 (1947) 28-35; degrees of freedom by F. E. Satterthwaite, Biometrics Bulletin 2
(1946) 110-114. A process is the unit: its measurements share an offset, so more rounds add no evidence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ffncli.bench.judge.statistics import Interval, exp_or_inf, mean, standard_error, t_quantile, t_sf
from ffncli.dataclass import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Shift:
    """A difference of two means of logs, its standard error and degrees of freedom."""

    mean: float
    error: float
    df: float

    @property
    def log_ratio(self) -> Interval:
        """The log of NEW over BASE with its 95 % interval."""
        half = t_quantile(0.5 + CONFIDENCE / 2, self.df) * self.error if self.error else 0.0
        return Interval(self.mean, self.mean - half, self.mean + half)

    def ratio(self) -> Interval:
        """NEW over BASE with its 95 % interval; an end without a float is infinite or 0."""
        return self.log_ratio.map(exp_or_inf)

    def p_above(self, threshold: float) -> float:
        """One-sided p of "the true ratio is at most 1 + threshold": small where NEW is slower by more than that."""
        distance = self.mean - math.log1p(threshold)
        if self.error == 0.0:
            return 0.0 if distance > 0 else 1.0
        return t_sf(distance / self.error, self.df)


def welch(base: Sequence[float], new: Sequence[float]) -> Shift | None:
    """NEW's mean less BASE's, for logs; None with fewer than two on a side, where the spread is unknown.

    Correlated neighbours (a machine that drifts over its processes) widen it, as everywhere.
    """
    if len(base) < 2 or len(new) < 2:
        return None
    parts = [standard_error(values) ** 2 for values in (base, new)]
    square, difference = sum(parts), mean(new) - mean(base)
    if square == 0.0:
        return Shift(difference, 0.0, float(len(base) + len(new) - 2))
    # From shares, not from squares: the square of a tiny variance is 0 in floats.
    weights = sum((part / square) ** 2 / (len(v) - 1) for part, v in zip(parts, (base, new), strict=True))
    return Shift(difference, math.sqrt(square), 1.0 / weights)


def mean_ratio(base: Sequence[float], new: Sequence[float]) -> float | None:
    """exp of the difference of the means of logs; None if a side is empty."""
    return exp_or_inf(mean(new) - mean(base)) if base and new else None
