"""The statistics for reliable ratios, in pure Python: Student's t, medians, Holm's correction, autocorrelation."""

import math
import statistics as standard
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import exp, fsum, inf, isinf, lgamma, log, log1p, pi, sqrt
from typing import TypeVar

Unit = TypeVar("Unit")

CONFIDENCE = 0.95  # level of an interval
SCALE = 1.4826  # a MAD times this estimates the standard deviation of normal values: 1 / Φ⁻¹(3/4)
SPIKE = 5.0  # a value this many scaled MADs from the median is a spike
DIFFER = 0.05  # level of the test for deciding that placements differ
CORRELATED = 0.4  # lag-1 autocorrelation above which an interval is widened
_FAR = 4
_MOST_TERMS = 10_000
_TINY = 1e-300


@dataclass(frozen=True)
class Interval:
    """A value and its interval. The ends are infinite if there are too few values to determine them."""

    value: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half of high − low."""
        return (self.high - self.low) / 2

    @property
    def bounded(self) -> bool:
        """Whether both ends are finite."""
        return not (isinf(self.low) or isinf(self.high))

    def map(self, function: Callable[[float], float]) -> "Interval":
        """Return the interval of an increasing function of the value: `function` maps the value and both ends."""
        return Interval(function(self.value), function(self.low), function(self.high))


def t_sf(t: float, df: float) -> float:
    """Return P(T > t) of Student's t: I_x(df/2, 1/2) / 2 with x = df / (df + t²) for t ≥ 0."""
    if isinf(t):
        return 0.0 if t > 0 else 1.0
    square = t * t
    tail = _betainc(df / 2, 0.5, df / (df + square), square / (df + square)) / 2
    return tail if t >= 0 else 1 - tail


@cache
def t_quantile(p: float, df: float) -> float:
    """Return the quantile `p` of Student's t. Raises ValueError unless 0 < p < 1 and df > 0."""
    if not (0 < p < 1 and df > 0):
        raise ValueError(f"t_quantile({p}, {df})")
    if p == 0.5:
        return 0.0
    if p < 0.5:
        return -_upper_quantile(p, df)
    return _upper_quantile(1 - p, df)


def _upper_quantile(tail: float, df: float) -> float:
    """Return the t > 0 with P(T > t) = `tail` < 1/2. Uses Newton's method for log P as a function of log t, with
    bisection when a step leaves the bounds."""
    low, high = -60.0, 1.0
    while t_sf(exp(high), df) > tail:
        low, high = high, high * 2
        if high > 700:
            return inf
    scale = exp(lgamma((df + 1) / 2) - lgamma(df / 2)) / sqrt(df * pi)  # normalising factor of the density
    at = min(max(0.0, low), high)
    while high - low > 1e-15 * max(1.0, abs(high)):
        t = exp(at)
        beyond = t_sf(t, df)
        low, high = (at, high) if beyond > tail else (low, at)
        slope = scale * exp(-(df + 1) / 2 * log1p(t * t / df)) * t / beyond if beyond else 0.0
        step = log(beyond / tail) / slope if slope else inf
        following = at + step if low < at + step < high else (low + high) / 2
        if abs(following - at) <= 1e-15 * max(1.0, abs(at)):
            break
        at = following
    return exp(at)


def _betainc(a: float, b: float, x: float, rest: float) -> float:
    """Return the regularised incomplete beta function I_x(a, b); `rest` is 1 − x, computed without loss of digits."""
    if x <= 0:
        return 0.0
    if rest <= 0:
        return 1.0
    front = exp(lgamma(a + b) - lgamma(a) - lgamma(b) + a * log(x) + b * log(rest))
    # The fraction converges fast below the distribution's mean; above the mean, I_x(a, b) = 1 − I_{1−x}(b, a) is used.
    if x < (a + 1) / (a + b + 2):
        return front * _fraction(a, b, x) / a
    return 1 - front * _fraction(b, a, rest) / b


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of I_x(a, b) (DLMF 8.17.22), evaluated by Lentz's method."""
    c, d = 1.0, 1 / _away(1 - (a + b) * x / (a + 1))
    result = d
    for m in range(1, _MOST_TERMS):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d = 1 / _away(1 + term * d)
            c = _away(1 + term / c)
            result *= c * d
        if abs(c * d - 1) < 1e-16:
            break
    return result


def _away(value: float) -> float:
    """Return `value`, or a tiny number if it is too close to 0."""
    return value if abs(value) > _TINY else _TINY


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean, summed exactly."""
    return fsum(values) / len(values)


def deviation(values: Sequence[float]) -> float:
    """Return the standard deviation (divisor n − 1); 0 for a single value."""
    if len(values) < 2:
        return 0.0
    centre = mean(values)
    return sqrt(fsum((v - centre) ** 2 for v in values) / (len(values) - 1))


def median(values: Sequence[float]) -> float:
    """Return the median; for an even number of values, the mean of the middle two."""
    return float(standard.median(values))


def mad(values: Sequence[float]) -> float:
    """Return the median absolute deviation times SCALE: a standard deviation that is robust to spikes."""
    middle = median(values)
    return SCALE * median([abs(v - middle) for v in values])


def centre(groups: Sequence[Sequence[float]]) -> float:
    """Return the value of a process: the median of all its rounds, if its placements in memory (groups) do not differ.

    If they differ (`differ`), the value is the weighted mean of the placements' medians. Each placement has the weight
    1 / (v + median v), where v is the variance of its rounds divided by their count, so that a placement disturbed
    throughout counts little and quiet placements count equally. Medians are used because a disturbance can make a block
    take a hundred times as long: on a shared machine with two cores, interquartile means within placements scattered
    1.3 to 3 times as much as medians.
    """
    if not differ(groups):
        return median([v for group in groups for v in group])
    errors = [deviation(group) ** 2 / len(group) for group in groups]
    typical = median(errors)
    weights = [1 / (error + typical) if typical > 0 else 1.0 for error in errors]
    return fsum(w * median(g) for w, g in zip(weights, groups, strict=True)) / fsum(weights)


def differ(groups: Sequence[Sequence[float]]) -> bool:
    """Return whether some groups are higher than others, at the level DIFFER (the rank test of Kruskal and Wallis
    1952).

    The statistic is compared with the chi-squared quantile for k − 1 degrees of freedom, approximated after Wilson and
    Hilferty (1931).
    """
    values = sorted(v for group in groups for v in group)
    n, degrees = len(values), len(groups) - 1
    if degrees < 1 or n <= len(groups) or values[0] == values[-1]:
        return False
    rank_sums = [fsum((bisect_left(values, v) + bisect_right(values, v) + 1) / 2 for v in group) for group in groups]
    squares = fsum(total**2 / len(group) for total, group in zip(rank_sums, groups, strict=True))
    return 12 / (n * (n + 1)) * squares - 3 * (n + 1) > chi_squared(1 - DIFFER, degrees)


def chi_squared(p: float, df: int) -> float:
    """Return an approximate quantile `p` of chi-squared with `df` degrees of freedom (within 3 % for p ≥ 0.9)."""
    part = 2 / (9 * df)
    return float(df * (1 - part + standard.NormalDist().inv_cdf(p) * sqrt(part)) ** 3)


def autocorrelation(values: Sequence[float]) -> float | None:
    """Return the lag-1 correlation; None for fewer than 5 values, or if all values are equal."""
    if len(values) < 5:
        return None
    centre = mean(values)
    from_mean = [v - centre for v in values]
    square = fsum(v * v for v in from_mean)
    if square == 0:
        return None
    return fsum(a * b for a, b in pairwise(from_mean)) / square


def widening(correlation: float | None) -> float:
    """Return √((1 + r) / (1 − r)), by which correlated neighbours widen an interval; 1 up to CORRELATED."""
    if correlation is None or correlation <= CORRELATED:
        return 1.0
    return sqrt((1 + correlation) / (1 - correlation))


def standard_error(values: Sequence[float]) -> float:
    """Return the standard error of the mean, widened if neighbours correlate; infinite for one value."""
    if len(values) < 2:
        return inf
    return deviation(values) / sqrt(len(values)) * widening(autocorrelation(values))


def t_interval(values: Sequence[float]) -> Interval:
    """Return the mean and its two-sided 95 % interval (df = n − 1), widened if neighbours correlate."""
    centre, error = mean(values), standard_error(values)
    if isinf(error):
        return Interval(centre, -inf, inf)
    half = t_quantile(0.5 + CONFIDENCE / 2, len(values) - 1) * error
    return Interval(centre, centre - half, centre + half)


def weighted_interval(values: Sequence[float], weights: Sequence[float], least: float) -> Interval:
    """Return the weighted mean of two or more values and its two-sided 95 % interval (df = n − 1), widened if
    neighbours correlate. The standard error of the mean is at least `least`.

    The standard error is that of a ratio of two sums (Cochran 1977, 2.11), the weights being as random as the values.
    """
    n, total = len(values), fsum(weights)
    centre = fsum(w * v for w, v in zip(weights, values, strict=True)) / total
    square = fsum((w / total * (v - centre)) ** 2 for w, v in zip(weights, values, strict=True)) * n / (n - 1)
    error = max(sqrt(square), least) * widening(autocorrelation(values))
    if isinf(error):
        return Interval(centre, -inf, inf)
    half = t_quantile(0.5 + CONFIDENCE / 2, n - 1) * error
    return Interval(centre, centre - half, centre + half)


def jackknife(
    units: Sequence[Unit], function: Callable[[Sequence[Unit]], float], level: float = CONFIDENCE
) -> Interval:
    """Return a function of all units and its two-sided interval (df = n − 1) by Tukey's jackknife (1958): from its
    values where one unit is left out. The interval is unbounded for one unit."""
    value, n = function(units), len(units)
    if n < 2:
        return Interval(value, -inf, inf)
    without = [function([*units[:at], *units[at + 1 :]]) for at in range(n)]
    half = t_quantile(0.5 + level / 2, n - 1) * deviation(without) * (n - 1) / sqrt(n)
    return Interval(value, value - half, value + half)


def median_interval(values: Sequence[float], level: float = 0.95) -> Interval:
    """Return the median with a two-sided interval that is valid for any distribution. Its ends are two of the values
    themselves, chosen by the binomial distribution of the number of values below the median (Conover 1999, 3.2). The
    interval is unbounded if there are too few values."""
    # `ways` is the number of ways to choose `outside` values, `below` the number of ways to choose at most `outside`.
    ordered, outside, ways, below = sorted(values), 0, 1, 1
    every = 2 ** len(ordered)
    while 2 * below / every <= 1 - level:  # both tails: the distribution is symmetric
        outside += 1
        ways = ways * (len(ordered) - outside + 1) // outside
        below += ways
    middle = median(ordered)
    return Interval(middle, ordered[outside - 1], ordered[-outside]) if outside else Interval(middle, -inf, inf)


def holm(ps: Sequence[float]) -> tuple[float, ...]:
    """Return p values adjusted so that any false alarm among several tests stays below the level (Holm 1979)."""
    adjusted = [0.0] * len(ps)
    so_far = 0.0
    for rank, index in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        # Each p is multiplied by the number of remaining tests, but never falls below the corrected value of a smaller
        # p.
        so_far = max(so_far, min(1.0, (len(ps) - rank) * ps[index]))
        adjusted[index] = so_far
    return tuple(adjusted)


def exp_or_inf(value: float) -> float:
    """Return e^value; infinity if that exceeds a float."""
    return exp(value) if value < 700 else inf


def log_or_inf(ratio: float) -> float:
    """Return the log of a ratio; −∞ if the ratio is not above 0."""
    return log(ratio) if ratio > 0 else -inf


def certain(log_ratio: float, half_width: float, margin: float) -> bool:
    """Return whether a log ratio is so far beyond the margin that a more precise value would change nothing: by _FAR
    half-widths, and as far as the margin itself."""
    return abs(log_ratio) - log1p(margin) > max(_FAR * half_width, log1p(margin))


# --- Welch's interval -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shift:
    """The difference of two means of logs, with its standard error and degrees of freedom."""

    mean: float
    error: float
    df: float

    @property
    def log_ratio(self) -> Interval:
        """The log of NEW over BASE with its 95 % interval."""
        half = t_quantile(0.5 + CONFIDENCE / 2, self.df) * self.error if self.error else 0.0
        return Interval(self.mean, self.mean - half, self.mean + half)

    def ratio(self) -> Interval:
        """Return NEW over BASE with its 95 % interval; an end that exceeds the range of a float is infinite or 0."""
        return self.log_ratio.map(exp_or_inf)

    def p_above(self, threshold: float) -> float:
        """Return the one-sided p-value of "the true ratio is at most 1 + threshold"; small if NEW is slower."""
        distance = self.mean - math.log1p(threshold)
        if self.error == 0.0:
            return 0.0 if distance > 0 else 1.0
        return t_sf(distance / self.error, self.df)


def welch(base: Sequence[float], new: Sequence[float]) -> Shift | None:
    """Return how much slower NEW is than BASE: NEW's mean minus BASE's mean, for logs of times with one value per
    process. Returns None if a side has fewer than two values, since its spread is then unknown.

    Source: B. L. Welch, Biometrika 34 (1947) 28-35; degrees of freedom by F. E. Satterthwaite, Biometrics Bulletin 2
    (1946) 110-114. A process is the unit: its measurements share an offset, so more rounds add no evidence. Correlated
    neighbours (a machine that drifts from process to process) widen the standard error, as in `standard_error`.
    """
    if len(base) < 2 or len(new) < 2:
        return None
    parts = [standard_error(values) ** 2 for values in (base, new)]
    square, difference = sum(parts), mean(new) - mean(base)
    if square == 0.0:
        return Shift(difference, 0.0, float(len(base) + len(new) - 2))
    # This squares each part's share of the sum, not the part itself: the square of a tiny variance is 0 in floats.
    weights = sum((part / square) ** 2 / (len(v) - 1) for part, v in zip(parts, (base, new), strict=True))
    return Shift(difference, math.sqrt(square), 1.0 / weights)


def mean_ratio(base: Sequence[float], new: Sequence[float]) -> float | None:
    """Return the ratio of geometric means, NEW over BASE, given the logs of both sides; None if a side is empty."""
    return exp_or_inf(mean(new) - mean(base)) if base and new else None
