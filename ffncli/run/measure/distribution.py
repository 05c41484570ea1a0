"""Statistics of values that arrive in pieces and are not kept: central moments, extremes, counts, a sample."""

from __future__ import annotations

from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.run.measure.statistics import Counts, histogram, near_zero, stride_of

PERCENTS = (1, 5, 50, 95, 99)


@dataclass
class Moments(Counts):
    """Counts of all values, extremes and central moments of the finite ones, in float64.

    `sums` are Σ(x - mean)², ³ and ⁴; the last two, and `negatives`, only with `shape`. Pieces are merged after
    Pébay 2008 (SAND2008-6212), so that nothing cancels however far the values are from zero.
    """

    shape: bool = False
    values: int = 0
    mean: float = 0.0
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def merge(self, wide: Tensor, size: Tensor, bound: float) -> None:
        """Add a piece in float64 of any shape; `size` is its absolute value, of which up to `bound` is near zero."""
        self.values += wide.numel()
        self.zeros += int(torch.count_nonzero(size == 0))
        self.near_zeros += int(torch.count_nonzero(size <= bound))
        before = self.finite
        finite, low, _ = self.add(wide.flatten())
        if self.shape and low < 0:
            self.negatives += int(torch.count_nonzero(finite < 0))
        if finite.numel():
            self._merge_sums(before, finite)

    def _merge_sums(self, a: int, x: Tensor) -> None:
        """Merge the next values x into the moments of `a` earlier ones."""
        b = x.numel()
        mean = x.sum().item() / b
        x = x - mean
        m2, m3, m4 = torch.dot(x, x).item(), 0.0, 0.0
        if self.shape:
            square = x * x
            m3, m4 = torch.dot(square, x).item(), torch.dot(square, square).item()
        n, d, (s2, s3, s4) = a + b, mean - self.mean, self.sums
        self.mean += d * b / n
        self.sums = (
            s2 + m2 + d * d * a * b / n,
            s3 + m3 + d * d * d * a * b * (a - b) / n / n + 3 * d * (a * m2 - b * s2) / n,
            s4 + m4 + d * d * d * d * a * b * (a * a - a * b + b * b) / n / n / n
            + 6 * d * d * (a * a * m2 + b * b * s2) / n / n + 4 * d * (a * m3 - b * s3) / n,
        )  # fmt: skip

    @property
    def variance(self) -> float:
        """The standard deviation of the finite values, divisor n; exactly 0 if they are all equal."""
        return self.sums[0] / self.finite if self.low < self.high else 0.0


@dataclass(frozen=True)
class Percentile:
    """The value below which `percent` % of the values are, interpolated linearly between two of them."""

    percent: int
    value: float


@dataclass(frozen=True)
class Distribution:
    """Statistics of values. They cover the finite ones, None if there are none; std has divisor n.

    `rms` is √(mean²+std²), the std of the N(0, std²) that fits best (maximum likelihood). `skewness` and
    `excess_kurtosis` are 0 for a normal distribution; `normal_distance` is the largest difference between the
    cumulative distribution and that of a normal of the same mean and std (Kolmogorov–Smirnov); None for a constant.
    `percentiles`, `histogram` (equal bins from min to max) and `normal_distance` cover every `histogram_stride`-th
    value (1: all).
    """

    values: int
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    rms: float | None
    skewness: float | None
    excess_kurtosis: float | None
    normal_distance: float | None
    negatives: int
    zeros: int
    near_zeros: int
    nan: int
    inf: int
    percentiles: tuple[Percentile, ...]
    histogram: tuple[int, ...]
    histogram_stride: int


class Sampler:
    """Moments, with some of the values kept, evenly spread, for statistics that cannot be merged.

    There are at most `most` rows of `width`.
    """

    def __init__(self, most: int, width: int) -> None:
        self.width, self.stride = width, stride_of(most * width, width)
        self.moments, self.kept = Moments(shape=True), list[Tensor]()

    def add(self, piece: Tensor) -> None:
        """Add a piece [..., width]."""
        wide = piece.double()
        self.kept.append(wide.flatten()[-self.moments.values % self.stride :: self.stride].clone())
        self.moments.merge(wide, wide.abs(), near_zero(piece.dtype))

    def distribution(self) -> Distribution:
        """The statistics of all pieces."""
        t = self.moments
        counts = (t.negatives, t.zeros, t.near_zeros, t.nan, t.inf)
        sample = torch.cat(self.kept) if self.kept else torch.empty(0, dtype=torch.float64)
        sample = sample[sample.isfinite()].sort().values
        if not t.finite or not sample.numel():
            none = (None,) * 8
            return Distribution(t.values, *none, *counts, (), (), self.stride)
        std, several = sqrt(t.variance), t.low < t.high
        skewness = _finite(t.sums[1] / t.finite, std, std, std) if several else None
        kurtosis = _finite(t.sums[2] / t.finite, std, std, std, std) if several else None
        percents = torch.tensor(PERCENTS, dtype=torch.float64, device=sample.device) / 100
        quantiles = torch.quantile(sample, percents).tolist()
        return Distribution(
            t.values, t.low, t.high, t.mean, std, sqrt(t.mean * t.mean + t.variance), skewness,
            None if kurtosis is None else kurtosis - 3, _distance(sample, t.mean, std) if several else None, *counts,
            tuple(Percentile(p, v) for p, v in zip(PERCENTS, quantiles, strict=True)),
            histogram(sample, t.low, t.high) if several else (), self.stride,
        )  # fmt: skip


def _finite(value: float, *divisors: float) -> float | None:
    """`value` divided by all of these, None if float64 overflows."""
    for divisor in divisors:
        value = value / divisor if divisor else inf
    return value if isfinite(value) else None


def _distance(ordered: Tensor, mean: float, std: float) -> float | None:
    """max |F - Φ| of sorted values, F their empirical cumulative distribution, which jumps at each of them."""
    if not std:
        return None
    n = ordered.numel()
    normal = torch.special.ndtr((ordered - mean) / std)
    upper = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device) / n
    return float(torch.maximum(upper - normal, normal - (upper - 1 / n)).max())
