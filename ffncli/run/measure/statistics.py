"""Statistics of a tensor's values, of hidden units and of values that arrive in pieces, and the cells of a heat map.

A wide intermediate takes gigabytes, and reading it dominates the cost. So memory is read once: every chunk is copied,
compared and counted while it is in the processor's cache, and nothing as large as the tensor is ever allocated.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import frexp, gcd, inf, isfinite, sqrt

import torch
from torch import Tensor

from ffncli.block.value import NEAR_ZERO

BINS = 24  # a histogram of this width fits in 80 columns next to the statistics
# Values read at once. With its float64 copy a chunk is 12 MB: small for a last-level cache, but large compared with the
# cost of a call. It must not exceed 2²⁴, because float32 counts exactly only up to there.
_CHUNK = 1 << 20
_CHUNK_ON_GPU = 1 << 24
_MOST_IN_HISTOGRAM = 1 << 17  # keeps bars accurate to a hundredth of the highest bar
_SAMPLE = 4096


@dataclass(frozen=True)
class Statistics:
    """Statistics of a tensor: min, max, mean and std (divisor n) of the finite values (None if no value is finite), and
    counts.

    `near_zeros` counts |x| ≤ NEAR_ZERO, zeros included. `histogram` counts the finite values among every
    `histogram_stride`-th value (1: all) in BINS equal bins from min to max; it is empty if all values are equal.
    `min_at` and `max_at` are the indices of the first minimum and the first maximum.
    """

    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zeros: int
    near_zeros: int
    negatives: int
    nan: int
    inf: int
    histogram: tuple[int, ...]
    histogram_stride: int
    min_at: tuple[int, ...] | None = None
    max_at: tuple[int, ...] | None = None


def statistics(tensor: Tensor) -> Statistics:
    """Return the statistics of a tensor of any shape and floating type, in float64; infinities are counted."""
    flat = tensor.detach().reshape(-1)
    sums = _read(flat, _pivot(flat))
    if sums.low < sums.high:
        if not 1e-280 < sums.squares < inf:  # the squares leave float64's range
            largest = max(abs(sums.low), abs(sums.high))
            sums = _read(flat, sums.pivot, 2.0 ** max(min(-frexp(largest)[1], 1000), -1000))
        if sums.spread * 1000 < abs(sums.shifted_mean):  # the pivot's sample did not represent the other values
            sums = _read(flat, sums.mean, sums.scale)
    low, high, mean, std = (sums.low, sums.high, sums.mean, sums.std) if sums.finite else (None,) * 4
    # in large tensors only every stride-th value is binned; binning all would cost more than everything else together
    stride = stride_of(flat.numel(), tensor.shape[-1] if tensor.dim() else 1)
    bins = histogram(flat[::stride], sums.low, sums.high) if sums.low < sums.high else ()
    counts = (sums.zeros, sums.near_zeros, sums.negatives, sums.nan, sums.inf)
    places = [_first_index(tensor, flat, *extreme) for extreme in sums.extremes] if sums.finite else (None, None)
    return Statistics(low, high, mean, std, *counts, bins, stride, *places)


def _first_index(tensor: Tensor, flat: Tensor, value: float, chunk: int) -> tuple[int, ...]:
    """Return the index of the first element equal to `value`, reading only its chunk of the flat tensor."""
    start = chunk * chunk_size(flat)
    piece = flat[start : start + chunk_size(flat)]
    return unravel(start + int((piece == value).byte().argmax()), tensor.shape)


def unravel(flat: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Convert an element's index in the flattened tensor to its index in a tensor of this shape."""
    out: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        out.append(at)
    return tuple(reversed(out))


def not_finite(tensor: Tensor) -> tuple[int, int]:
    """Return (the number of NaNs, the number of infinities)."""
    counts = Counts()
    for piece in _chunks(tensor.detach().reshape(-1)):
        counts.add(piece)
    return counts.nan, counts.inf


def chunk_size(tensor: Tensor) -> int:
    """Return the number of values to process at once on this tensor's device."""
    return _CHUNK_ON_GPU if tensor.is_cuda else _CHUNK


def _chunks(flat: Tensor) -> Iterator[Tensor]:
    size = chunk_size(flat)
    for start in range(0, flat.numel(), size):
        yield flat[start : start + size]


@dataclass
class Counts:
    """Counts of the values read so far, and the minimum and maximum of the finite values.

    `low_chunk` and `high_chunk` are the indices of the first chunks that contain the minimum and the maximum; `chunks`
    is the number of chunks read so far.
    """

    finite: int = 0
    low: float = inf
    high: float = -inf
    chunks: int = 0
    low_chunk: int = 0
    high_chunk: int = 0
    zeros: int = 0
    near_zeros: int = 0
    negatives: int = 0
    nan: int = 0
    inf: int = 0

    def add(self, piece: Tensor) -> tuple[Tensor, float, float]:
        """Count non-finite values (-Inf also as negative); return the finite values, their minimum and maximum.

        The caller counts zeros and finite negatives, because the fastest method depends on the caller's other work.
        """
        chunk, self.chunks = self.chunks, self.chunks + 1
        low, high = (end.item() for end in piece.aminmax())  # NaN if any value is NaN
        if not (isfinite(low) and isfinite(high)):
            self.nan += int(piece.isnan().sum())
            self.inf += int(piece.isinf().sum())
            self.negatives += int((piece == -inf).sum())
            piece = piece[piece.isfinite()]
            if not piece.numel():
                return piece, inf, -inf
            low, high = (end.item() for end in piece.aminmax())
        self.finite += piece.numel()
        if low < self.low:
            self.low, self.low_chunk = low, chunk
        if high > self.high:
            self.high, self.high_chunk = high, chunk
        return piece, low, high

    @property
    def extremes(self) -> tuple[tuple[float, int], tuple[float, int]]:
        """Return (the minimum, its first chunk), (the maximum, its first chunk)."""
        return (self.low, self.low_chunk), (self.high, self.high_chunk)


@dataclass
class _Sums(Counts):
    """Counts and sums: `total` and `squares` add up scale · (x - pivot) and its square, so that nothing cancels.

    With a known pivot two sums suffice; `Moments`, which needs no pivot, takes 1.5 to 4 times as long.
    """

    pivot: float = 0.0
    scale: float = 1.0
    total: float = 0.0
    squares: float = 0.0

    @property
    def shifted_mean(self) -> float:
        return self.total / self.finite

    @property
    def spread(self) -> float:
        return sqrt(max(self.squares / self.finite - self.shifted_mean**2, 0.0))

    @property
    def mean(self) -> float:
        return min(max(self.pivot + self.shifted_mean / self.scale, self.low), self.high)

    @property
    def std(self) -> float:
        return self.spread / self.scale


def _read(flat: Tensor, pivot: float, scale: float = 1.0) -> _Sums:
    """Read all values once and sum them."""
    sums = _Sums(pivot=pivot, scale=scale)
    size = min(chunk_size(flat), flat.numel())
    wide = torch.empty(size, dtype=torch.float64, device=flat.device)
    # float16 and bfloat16 are exact in float32, and float32 sums neither overflow nor stop counting at 256
    work = flat.dtype if flat.dtype == torch.float64 else torch.float32
    scratch = torch.empty(size, dtype=work, device=flat.device)
    for piece in _chunks(flat):
        _add(sums, piece.to(work), wide, scratch)
    return sums


def _add(sums: _Sums, piece: Tensor, wide: Tensor, scratch: Tensor) -> None:
    """Add one chunk with few operations while it is in the cache."""
    piece, low, high = sums.add(piece)
    n = piece.numel()
    if not n:
        return
    wide = wide[:n].copy_(piece)
    if sums.pivot:
        wide.sub_(sums.pivot)
    if sums.scale != 1:
        wide.mul_(sums.scale)
    sums.total += wide.sum().item()
    sums.squares += torch.dot(wide, wide).item()
    _count(sums, piece, low, high, scratch[:n])


def _count(sums: _Sums, piece: Tensor, low: float, high: float, scratch: Tensor) -> None:
    """Count zeros, near zeros and negatives by summing signs as floats.

    This is four times as fast as building and counting a mask. With many zeros it is ten times as fast as
    `count_nonzero` of floats, which branches.
    """
    n = piece.numel()
    if low > 0 or high < 0:
        sums.negatives += n if high < 0 else 0
    else:
        torch.sign(piece, out=scratch)  # Σ sign² counts values that are not zero; Σ sign is positives minus negatives
        rest, difference = int(torch.dot(scratch, scratch)), int(scratch.sum())
        sums.zeros += n - rest
        sums.negatives += (rest - difference) // 2
    bound = near_zero(piece.dtype)
    if low <= bound and high >= -bound:
        torch.ops.aten.hardshrink.out(piece, bound, out=scratch)
        scratch.sign_()
        sums.near_zeros += n - int(torch.dot(scratch, scratch))


def near_zero(dtype: torch.dtype) -> float:
    """Return NEAR_ZERO rounded to this dtype, so that a value printed as 0.001 is near zero."""
    return torch.tensor(NEAR_ZERO, dtype=dtype).item()


def _pivot(flat: Tensor) -> float:
    """Return one of the tensor's values if the values are far from zero compared with their spread, else zero.

    Without a pivot, a sum of squares would lose every digit of so small a spread. A constant tensor gets a std of
    exactly zero.
    """
    sample = flat[:: max(1, flat.numel() // _SAMPLE)].double()
    sample = sample[sample.isfinite()]
    if not sample.numel():
        return 0.0
    far = abs(sample.mean().item()) > 10 * sample.std(correction=0).item()
    return sample.median().item() if far else 0.0


def stride_of(values: int, width: int) -> int:
    """Return the stride for binning `values` values, coprime to the rows' width, so that all columns are sampled."""
    stride = max(1, -(-values // _MOST_IN_HISTOGRAM))
    while stride > 1 and gcd(stride, width) > 1:
        stride += 1
    return stride


def histogram(sample: Tensor, low: float, high: float) -> tuple[int, ...]:
    """Count the finite values of a flat tensor in each of BINS equal bins from `low` to `high` (inclusive)."""
    sample = sample.double()
    sample = sample[sample.isfinite()]
    half = 1.0 if isfinite(high - low) else 0.5
    sample = (sample * half - low * half) / (high * half - low * half)
    return tuple(int(n) for n in torch.histc(sample, BINS, 0.0, 1.0).tolist())


PERCENTS = (1, 5, 50, 95, 99)


@dataclass
class Moments(Counts):
    """Counts of all values, and the minimum, maximum and central moments of the finite values, in float64.

    `sums` are Σ(x - mean)², Σ(x - mean)³ and Σ(x - mean)⁴; the last two, and `negatives`, are computed only if `shape`
    is set. Pieces are merged by Pébay 2008 (SAND2008-6212), which avoids cancellation even for values far from zero.
    """

    shape: bool = False
    values: int = 0
    mean: float = 0.0
    sums: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def merge(self, wide: Tensor, size: Tensor, bound: float) -> None:
        """Add a float64 piece of any shape; `size` contains its absolute values, which are near zero up to `bound`."""
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
        """Merge the next values x into the moments of `a` earlier values."""
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
        """The variance of the finite values, divisor n; exactly 0 if all values are equal."""
        return self.sums[0] / self.finite if self.low < self.high else 0.0


@dataclass(frozen=True)
class Percentile:
    """The value below which `percent` % of the values lie, interpolated linearly between neighbouring values."""

    percent: int
    value: float


@dataclass(frozen=True)
class Distribution:
    """Statistics of the finite values, None if no value is finite; std has divisor n.

    `rms` is √(mean²+std²), the std of the N(0, std²) that fits best (maximum likelihood). `skewness` and
    `excess_kurtosis` are 0 for a normal distribution; `normal_distance` is the maximum difference between the
    cumulative distribution and the normal distribution with the same mean and std (Kolmogorov–Smirnov). All three are
    None if all values are equal. `percentiles`, `histogram` (equal bins from min to max) and `normal_distance` cover
    every `histogram_stride`-th value (1: all).
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
    """Collects moments, and an evenly spread sample of values for statistics that cannot be merged.

    It accepts at most `most` rows of `width` values.
    """

    def __init__(self, most: int, width: int) -> None:
        self.width, self.stride = width, stride_of(most * width, width)
        self.moments, self.kept = Moments(shape=True), list[Tensor]()

    def add(self, piece: Tensor) -> None:
        """Add a piece [..., width]."""
        wide = piece.double()
        # continue the stride where the previous piece ended
        self.kept.append(wide.flatten()[-self.moments.values % self.stride :: self.stride].clone())
        self.moments.merge(wide, wide.abs(), near_zero(piece.dtype))

    def distribution(self) -> Distribution:
        """Return the statistics of all pieces."""
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
    """Return `value` divided by all `divisors`; None if float64 overflows."""
    for divisor in divisors:
        value = value / divisor if divisor else inf
    return value if isfinite(value) else None


def _distance(ordered: Tensor, mean: float, std: float) -> float | None:
    """Return max |F - Φ| of sorted values; F is their empirical cumulative distribution, which jumps at each value."""
    if not std:
        return None
    n = ordered.numel()
    normal = torch.special.ndtr((ordered - mean) / std)
    upper = torch.arange(1, n + 1, dtype=torch.float64, device=ordered.device) / n
    return float(torch.maximum(upper - normal, normal - (upper - 1 / n)).max())


@dataclass(frozen=True)
class NotFinite:
    """A tensor that contains NaN or Inf. `kind` is input, weight or step; only the first such step is listed."""

    kind: str
    name: str
    nan: int
    inf: int

    def __str__(self) -> str:
        """Return a sentence such as `weight up.weight has 3 NaN and 1 Inf`."""
        counts = in_words(self.nan, self.inf)
        if self.kind == "step":
            return f"'{self.name}' is the first step that is not finite, with {counts}"
        return f"{self.kind} {self.name} has {counts}"


def in_words(nan: int, inf: int) -> str:
    """Return counts in words, such as `1 NaN and 2 Inf`; an empty string if both are zero."""
    return " and ".join(f"{n:,} {what}" for n, what in ((nan, "NaN"), (inf, "Inf")) if n)


def where_not_finite(kind: str, tensors: Mapping[str, Tensor]) -> list[NotFinite]:
    """Return the tensors that have NaN or Inf, in order."""
    counts = [(name, *not_finite(tensor)) for name, tensor in tensors.items()]
    return [NotFinite(kind, name, nan, inf) for name, nan, inf in counts if nan + inf]


def span(part: int, size: int, count: int) -> slice:
    """Return the indices that cell `part` of `count` cells covers along an axis of `size`."""
    start = part * size // count
    return slice(start, max(start + 1, (part + 1) * size // count))


def cells_of(x: Tensor, most_rows: int, most_columns: int) -> list[list[Tensor]]:
    """Divide a matrix into at most `most_rows` × `most_columns` cells of neighbouring values."""
    rows, columns = min(x.shape[0], most_rows), min(x.shape[1], most_columns)
    return [[x[span(i, x.shape[0], rows), span(j, x.shape[1], columns)] for j in range(columns)] for i in range(rows)]


def largest(cell: Tensor) -> float:
    """Return the value of largest magnitude, so that no outlier is lost; NaN if the cell contains NaN."""
    return math.nan if bool(cell.isnan().any()) else float(cell.flatten()[cell.abs().argmax()])


def values_of_a_cell(x: Tensor, cells: list[list[Tensor]]) -> int:
    """Return the maximum number of values that a cell covers."""
    return math.ceil(x.shape[0] / len(cells)) * math.ceil(x.shape[1] / len(cells[0]))


@dataclass(frozen=True)
class HiddenUnit:
    """One hidden unit over the tokens: its L2 norm, mean |x|, largest value by magnitude, and that value's (flat)
    token.

    `writes` is the norm of the unit's contribution to the output, if the down projection reads the step: the unit's
    norm times the norm of its column of the down projection. Values that are not finite count as zero.
    """

    unit: int
    norm: float
    mean_abs: float
    largest: float
    token: int
    writes: float | None


@dataclass(frozen=True)
class TokenUnits:
    """The units with the largest values by magnitude for one token (a flat index), the largest first."""

    token: int
    units: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Units:
    """The units of a step: `dead` units are zero for every token, `near_dead` units (including dead) within NEAR_ZERO
    of zero.

    `largest_norm` and `most_active` (by mean |x|) have the requested number of units, the largest first; `per_token`
    has the same number of units for every token.
    """

    units: int
    tokens: int
    dead: int
    near_dead: int
    largest_norm: tuple[HiddenUnit, ...] = ()
    most_active: tuple[HiddenUnit, ...] = ()
    per_token: tuple[TokenUnits, ...] = ()


def unit_statistics(tensor: Tensor, top: int = 0, down: Tensor | None = None) -> Units:
    """Describe the units of a tensor [..., d_ff], `top` of them individually; `down` [d_model, d_ff] adds `writes`."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    every = torch.arange(rows.shape[1], device=rows.device)
    near = _quiet(rows, every, NEAR_ZERO)
    dead = _quiet(rows, near, 0.0)
    counts = Units(rows.shape[1], rows.shape[0], dead.numel(), near.numel())
    if not top:
        return counts
    norms, means = _sizes(rows)
    by_norm, by_mean = (sizes.sort(descending=True, stable=True).indices[:top].tolist() for sizes in (norms, means))
    by_number = {unit: _unit(rows[:, unit], unit, norms, means, down) for unit in {*by_norm, *by_mean}}
    largest, active = (tuple(by_number[unit] for unit in order) for order in (by_norm, by_mean))
    return Units(counts.units, counts.tokens, counts.dead, counts.near_dead, largest, active, _per_token(rows, top))


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Yield a few rows at a time, so that their copies stay in the cache."""
    size = max(1, chunk_size(rows) // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], size):
        yield rows[start : start + size]


def _quiet(rows: Tensor, columns: Tensor, bound: float) -> Tensor:
    """Return the `columns` with all values within `bound` of zero. Most columns are ruled out after a few rows."""
    for block in _blocks(rows):
        if not columns.numel():
            break
        few = 4 * columns.numel() < rows.shape[1]
        block = block.index_select(1, columns) if few else block
        block = block if block.dtype == torch.float64 else block.float()
        quiet = (block.abs() <= bound).all(0)
        columns = columns[quiet if few else quiet[columns]]
    return columns


def _sizes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return (L2 norm, mean |x|) of every column, in float64."""
    squares = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    sums = torch.zeros_like(squares)
    for block in _blocks(rows):
        size = block.double().abs_() if block.dtype != torch.float64 else block.abs()
        if not torch.isfinite(size.sum()):
            size.nan_to_num_(0.0, 0.0, 0.0)
        sums += size.sum(0)
        squares += size.square_().sum(0)
    return squares.sqrt_(), sums / max(1, rows.shape[0])


def _per_token(rows: Tensor, top: int) -> tuple[TokenUnits, ...]:
    out: list[TokenUnits] = []
    for block in _blocks(rows):
        values = block.double().nan_to_num(0.0, 0.0, 0.0)
        units = values.abs().sort(dim=1, descending=True, stable=True).indices[:, :top]
        pairs = zip(units.tolist(), values.gather(1, units).tolist(), strict=True)
        out += [TokenUnits(token, tuple(first), tuple(best)) for token, (first, best) in enumerate(pairs, len(out))]
    return tuple(out)


def _unit(column: Tensor, unit: int, norms: Tensor, means: Tensor, down: Tensor | None) -> HiddenUnit:
    values = column.double().nan_to_num(0.0, 0.0, 0.0)
    token = int(values.abs().argmax())
    norm = norms[unit].item()
    writes = norm * torch.linalg.vector_norm(down[:, unit].double()).item() if down is not None else None
    return HiddenUnit(unit, norm, means[unit].item(), values[token].item(), token, writes)


def percentile(sizes: Tensor) -> float:
    """Return the value that 99 % of the sizes do not exceed; 0 if there are none."""
    return float(sizes.flatten().sort().values[math.ceil(0.99 * sizes.numel()) - 1]) if sizes.numel() else 0.0
