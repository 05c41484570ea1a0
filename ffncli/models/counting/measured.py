"""Rates from measurements: which share of a common roofline each measured block reached, for blocks that are like it.

The roofline of a format has the fastest arithmetic and the fastest traffic of its measurements, counted as a plan
counts them, kernel by kernel. The share that a new block is expected to reach: of each measured block, what it reached
between its numbers of tokens (linear in octaves of FLOPs per byte of weights, which decide how a product is computed);
of these, the mean, nearer sizes of the weights weighing more (what a cache holds). A mixture is like mixtures, whose
experts run one after another, and a dense block like dense ones, where the file has any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from math import log2

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.traffic import Traffic, launches, time_floor
from ffncli.dataclass import dataclass
from ffncli.models.counting.cluster import Rates

_CLOSE = 0.5  # octaves: as near as it matters


@dataclass(frozen=True)
class MeasuredBlock:
    """One measurement: a block, forward, by the fastest of its kernels."""

    label: str
    spec: FFNSpec
    weights: DType
    tokens: int
    kernel: str
    time_s: float

    @cached_property
    def kernels(self) -> tuple[Traffic, ...]:
        """Its work, as a plan counts it."""
        kind = self.weights
        return tuple(one.work for one in launches(steps(self.spec), kind, activation_dtype(kind), self.tokens))

    @property
    def work(self) -> Traffic:
        """All of it."""
        return sum(self.kernels, Traffic())


@dataclass(frozen=True)
class ShareAt:
    """A measurement: FLOPs per byte of weights and bytes of weights, in octaves, and the share of the roofline, too."""

    reuse: float
    size: float
    share: float


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The rates of one device, by what was measured on it."""

    blocks: tuple[MeasuredBlock, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """Those that were measured."""
        return tuple(dict.fromkeys(block.weights.name for block in self.blocks))

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """The roofline's rates times the share that the measured blocks most like it reached in this format."""
        fitting = [block for block in self.blocks if block.weights == weights]
        if not fitting:
            return None
        flops, moved = _roofs(fitting)
        alike = [block for block in fitting if (block.spec.moe is not None) == mixture] or fitting
        curves = [
            sorted((_point(one, flops, moved) for one in alike if one.label == label), key=lambda point: point.reuse)
            for label in dict.fromkeys(block.label for block in alike)
        ]
        share = _expected(curves, *_place(work))
        return Rates(weights.name, flops * share, moved * share)

    def without(self, left_out: MeasuredBlock) -> MeasuredSpeeds:
        """The same without one block and its other numbers of tokens, for a prediction of a block not seen."""
        return MeasuredSpeeds(tuple(block for block in self.blocks if block.label != left_out.label))


@dataclass(frozen=True)
class PredictedRow:
    """A measured block, and its time as predicted from the others; None if there are none."""

    device: str
    block: str
    dtype: str
    tokens: int
    kernel: str
    measured_s: float
    predicted_s: float | None
    error: float | None


def predictions(speeds: Mapping[str, MeasuredSpeeds]) -> Iterator[PredictedRow]:
    """Every measured block, predicted from the blocks that have other dimensions."""
    for device, one in speeds.items():
        for block in one.blocks:
            predicted = predicted_s(one.without(block), block)
            error = None if predicted is None else predicted / block.time_s - 1
            yield PredictedRow(
                device, block.label, block.weights.name, block.tokens, block.kernel, block.time_s, predicted, error
            )


def predicted_s(speeds: MeasuredSpeeds, block: MeasuredBlock) -> float | None:
    """The block's time at these rates; None where nothing was measured in its format."""
    rates = speeds.rates(block.weights, block.work, block.spec.moe is not None)
    if rates is None:
        return None
    return _floor_s(block.kernels, rates.flops_per_s, rates.bytes_per_s)


def _floor_s(kernels: Iterable[Traffic], flops_per_s: float, bytes_per_s: float) -> float:
    return sum(time_floor(one.matmul_flops, one.moved(), flops_per_s, bytes_per_s).seconds for one in kernels)


def _roofs(blocks: Sequence[MeasuredBlock]) -> tuple[float, float]:
    """(most FLOP/s, most B/s) that any of these reached."""
    return (
        max(block.work.matmul_flops / block.time_s for block in blocks),
        max(block.work.moved() / block.time_s for block in blocks),
    )


def _point(block: MeasuredBlock, flops_per_s: float, bytes_per_s: float) -> ShareAt:
    share = _floor_s(block.kernels, flops_per_s, bytes_per_s) / block.time_s
    return ShareAt(*_place(block.work), log2(share))


def _place(work: Traffic) -> tuple[float, float]:
    return log2(work.matmul_flops / work.weight_bytes_read), log2(work.weight_bytes_read)


def _expected(curves: Sequence[Sequence[ShareAt]], reuse: float, size: float) -> float:
    """The mean of what each curve has at this reuse; of logarithms, as a share is a ratio."""
    points = [_between(curve, reuse) for curve in curves]
    near = [1 / ((point.size - size) ** 2 + _CLOSE**2) for point in points]
    mean = sum(weight * point.share for weight, point in zip(near, points, strict=True)) / sum(near)
    return float(2**mean)


def _between(curve: Sequence[ShareAt], reuse: float) -> ShareAt:
    """The point of a curve at this reuse; beyond its ends, the end."""
    after = next((n for n, point in enumerate(curve) if point.reuse >= reuse), len(curve))
    low, high = curve[max(after - 1, 0)], curve[min(after, len(curve) - 1)]
    part = (reuse - low.reuse) / (high.reuse - low.reuse) if high.reuse > low.reuse else 0.0
    return ShareAt(reuse, low.size + part * (high.size - low.size), low.share + part * (high.share - low.share))
