"""What the times of a device's kernels are computed from: its data sheet with fitted constants, or measured blocks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import exp, log, log2
from typing import TYPE_CHECKING, Protocol

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.traffic import Traffic, launches, time_floor
from ffncli.models.counting.times.fit import quantile
from ffncli.models.counting.times.fitted import Ends, Fitted, fitted, skew_exponent, with_short_rows
from ffncli.models.counting.times.kernels import KernelTime, PlannedKernel, chip_of, class_of, computed_in, kernel_time
from ffncli.system.hardware import Device

if TYPE_CHECKING:
    from ffncli.models.counting.times.published import HeldOutRow


@dataclass(frozen=True)
class Rates:
    """The rates expected for some work: FLOP/s in `format`, and B/s of memory."""

    format: str
    flops_per_s: float
    bytes_per_s: float

    @property
    def ridge(self) -> float:
        """Return the FLOPs per byte at which arithmetic takes as long as memory traffic."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True)
class PredictedTimes:
    """The times of some kernels, the rates behind them, and why their interval is wide ("" if it is not)."""

    rates: Rates
    kernels: tuple[KernelTime, ...]
    unknown: str = ""


class Speeds(Protocol):
    """A source of times: a data sheet with fitted constants, or measurements."""

    @property
    def formats(self) -> tuple[str, ...]:
        """Return the formats whose rates are known."""

    def rate(self, weights: DType) -> str | None:
        """Return the format in which products with these weights are computed; None if no rate is known."""

    def timed(self, weights: DType, kernels: Sequence[PlannedKernel]) -> PredictedTimes | None:
        """Return the times of the kernels of a block with these weights; None if no rate is known."""


@dataclass(frozen=True)
class FittedSpeeds:
    """Times from a data sheet and fitted constants (`times/kernels.py`).

    `gemm_efficiency` and `memory_efficiency` replace the fitted shares of peak and bandwidth, if given; then the
    interval keeps its width. `user` has constants that were fitted to the user's measurements, by class.
    """

    device: Device
    gemm_efficiency: float | None = None
    memory_efficiency: float | None = None
    user: "Fits | None" = None

    @property
    def formats(self) -> tuple[str, ...]:
        """List the formats on the data sheet."""
        return tuple(self.device.tflops)

    @property
    def checks(self) -> "Sequence[HeldOutRow]":
        """Return how well the user's measurements predict those that were held out."""
        return self.user.checks if self.user else ()

    def rate(self, weights: DType) -> str | None:
        """Return the format whose rate on the data sheet applies."""
        return computed_in(self.device, weights)

    def timed(self, weights: DType, kernels: Sequence[PlannedKernel]) -> PredictedTimes | None:
        """Compute the times of the kernels, and their intervals."""
        rate, name = self.rate(weights), class_of(self.device, weights)
        chip = chip_of(self.device, name, rate) if rate else None
        if chip is None or rate is None:
            return None
        by = (self.user.of(name) if self.user else None) or fitted(self.device, name)
        constants = with_short_rows(by.constants, chip, weights.bytes) if weights.bytes > 2 else by.constants
        given = {"peak": self.gemm_efficiency, "bandwidth": self.memory_efficiency}
        constants = replace(constants, **{key: value for key, value in given.items() if value is not None})
        times = []
        for kernel in kernels:
            one = kernel_time(kernel, chip, constants, skew_exponent())
            low, high = by.ends(kernel.routed, one.bound)
            times.append(replace(one, low=low, high=high))
        rates = Rates(rate, chip.flops_per_s * constants.peak, chip.bytes_per_s * constants.bandwidth)
        return PredictedTimes(rates, tuple(times), self._unknown(by, name, weights))

    def _unknown(self, by: Fitted, name: str, weights: DType) -> str:
        """Return what was not measured: the device in this class, or fp32 and fp64 on any device."""
        if weights.computable and weights.bytes > 2:
            return f"no times in {weights.name}: as in bf16"
        if by.of == self.device.name:
            return ""
        return f"no times of {self.device.name} in {name}: as {by.of or 'the median of other devices'}"


class Fits(Protocol):
    """TimeConstants that were fitted to the user's measurements, and how well they predict what was held out."""

    checks: "list[HeldOutRow]"

    def of(self, name: str) -> Fitted | None:
        """Return those of a class; None if it was not measured."""


_LEAST_BLOCKS, _WIDE = 5, (0.5, 2.0)
_CLOSE = 0.5  # in octaves: limits the extra weight of blocks with nearly equal sizes


@dataclass(frozen=True)
class MeasuredBlock:
    """One measurement: a forward pass of a block with its fastest kernel."""

    label: str
    spec: FFNSpec
    weights: DType
    tokens: int
    kernel: str
    time_s: float

    @cached_property
    def kernels(self) -> tuple[Traffic, ...]:
        """Return the work of each of its kernels, counted as in a plan."""
        kind = self.weights
        return tuple(one.work for one in launches(steps(self.spec), kind, activation_dtype(kind), self.tokens))

    @property
    def work(self) -> Traffic:
        """Return the total work of its kernels."""
        return sum(self.kernels, Traffic())


@dataclass(frozen=True)
class ShareAt:
    """A measurement in octaves (base-2 logarithms): FLOPs per weight byte, weight bytes, and share of the roofline."""

    reuse: float
    size: float
    share: float


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The rates of one device, derived from measurements as shares of a roofline; the roofline's peaks are the highest
    measured rates of arithmetic and traffic.

    Mixtures are compared only with measured mixtures, since experts run one after another; dense blocks are compared
    only with dense blocks.
    """

    blocks: tuple[MeasuredBlock, ...]

    @property
    def formats(self) -> tuple[str, ...]:
        """List the measured formats."""
        return tuple(dict.fromkeys(block.weights.name for block in self.blocks))

    def rate(self, weights: DType) -> str | None:
        """Return the weights' format, in which blocks were measured."""
        return weights.name if any(block.weights == weights for block in self.blocks) else None

    def timed(self, weights: DType, kernels: Sequence[PlannedKernel]) -> PredictedTimes | None:
        """Compute every kernel's roofline time. The interval is that of the measured blocks' errors, each predicted
        from the others; it is wide if there are fewer than five."""
        total = (sum(one.weight_bytes for one in kernels), sum(one.moved_bytes for one in kernels))
        work = Traffic(round(total[0]), round(total[1] - total[0]), 0, round(sum(one.flops for one in kernels)))
        rates = self.rates(weights, work, any(one.routed for one in kernels))
        if rates is None:
            return None
        (low, high), number = self._ends[weights, any(one.routed for one in kernels)]
        times = tuple(
            KernelTime(one.flops / rates.flops_per_s, one.moved_bytes / rates.bytes_per_s, low=low, high=high)
            for one in kernels
        )
        why = f"{number} blocks of other dimensions measured in {weights.name}"
        return PredictedTimes(rates, times, why if number < _LEAST_BLOCKS else "")

    @cached_property
    def _ends(self) -> Mapping[tuple[DType, bool], tuple[Ends, int]]:
        """Map each format, of dense blocks and of mixtures, to the 80 % interval of measured ÷ predicted and the number
        of errors that it is from: those of all blocks in this format, if few are alike."""
        errors: dict[tuple[DType, bool], list[float]] = {}
        for block in self.blocks:
            if predicted := predicted_s(self.without(block), block):
                errors.setdefault((block.weights, block.spec.moe is not None), []).append(log(block.time_s / predicted))
        out = {}
        for weights in dict.fromkeys(block.weights for block in self.blocks):
            both = [errors.get((weights, mixture), []) for mixture in (False, True)]
            for mixture, alike in enumerate(both):
                logs = alike if len(alike) >= _LEAST_BLOCKS else [*both[0], *both[1]]
                ends = (exp(quantile(logs, 0.1)), exp(quantile(logs, 0.9))) if len(logs) >= _LEAST_BLOCKS else _WIDE
                out[weights, bool(mixture)] = ends, len(logs)
        return out

    def rates(self, weights: DType, work: Traffic, mixture: bool = False) -> Rates | None:
        """Return the roofline's rates times the share that the most similar blocks reached in this format."""
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

    def without(self, left_out: MeasuredBlock) -> "MeasuredSpeeds":
        """Return the measurements of all other blocks, which predict the time of the block `left_out`."""
        return MeasuredSpeeds(tuple(block for block in self.blocks if block.label != left_out.label))


@dataclass(frozen=True)
class PredictedRow:
    """A measured block, and its time as predicted from the other blocks (None if there are no other blocks)."""

    device: str
    block: str
    dtype: str
    tokens: int
    kernel: str
    measured_s: float
    predicted_s: float | None
    error: float | None


def predictions(speeds: Mapping[str, MeasuredSpeeds]) -> Iterator[PredictedRow]:
    """Predict the time of every measured block from the times of the blocks with other dimensions."""
    for device, one in speeds.items():
        for block in one.blocks:
            predicted = predicted_s(one.without(block), block)
            error = None if predicted is None else predicted / block.time_s - 1
            yield PredictedRow(
                device, block.label, block.weights.name, block.tokens, block.kernel, block.time_s, predicted, error
            )


def predicted_s(speeds: MeasuredSpeeds, block: MeasuredBlock) -> float | None:
    """Predict the block's time at these rates; None if its format was not measured."""
    rates = speeds.rates(block.weights, block.work, block.spec.moe is not None)
    if rates is None:
        return None
    return _floor_s(block.kernels, rates.flops_per_s, rates.bytes_per_s)


def _floor_s(kernels: Iterable[Traffic], flops_per_s: float, bytes_per_s: float) -> float:
    return sum(time_floor(one.matmul_flops, one.moved(), flops_per_s, bytes_per_s).seconds for one in kernels)


def _roofs(blocks: Sequence[MeasuredBlock]) -> tuple[float, float]:
    """Return the maximum FLOP/s and the maximum B/s that the blocks reached."""
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
    """Return the expected share of the roofline at this `reuse` (FLOPs per byte of weights): the mean over curves, in
    which similar weight sizes count more, since a cache's effect depends on size."""
    points = [_between(curve, reuse) for curve in curves]
    near = [1 / ((point.size - size) ** 2 + _CLOSE**2) for point in points]
    mean = sum(weight * point.share for weight, point in zip(near, points, strict=True)) / sum(near)
    return float(2**mean)  # shares are ratios, so their logarithms are averaged


def _between(curve: Sequence[ShareAt], reuse: float) -> ShareAt:
    """Interpolate a curve at this reuse, linearly in octaves; beyond its ends, return the end point."""
    after = next((n for n, point in enumerate(curve) if point.reuse >= reuse), len(curve))
    low, high = curve[max(after - 1, 0)], curve[min(after, len(curve) - 1)]
    part = (reuse - low.reuse) / (high.reuse - low.reuse) if high.reuse > low.reuse else 0.0
    return ShareAt(reuse, low.size + part * (high.size - low.size), low.share + part * (high.share - low.share))
