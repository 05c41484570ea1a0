"""Rates from measurements: which share of a common roofline each measured block reached, for blocks that are like it.

The roofline of a format has the fastest arithmetic and the fastest traffic of its measurements, counted as a plan
counts them, kernel by kernel. A new block is expected to reach what the measured blocks nearest to it reached: those
with similar FLOPs per byte (what binds) and similar bytes (what a cache holds), each distance in octaves, nearer ones
weighing more (inverse squares, Shepard 1968).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import log2

from ffncli.block.dtypes import DType, activation_dtype
from ffncli.block.floor import time_floor
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.traffic import Traffic, launches
from ffncli.models.counting.cluster import Rates

_NEAREST = 4
_CLOSE = 0.05  # octaves: as near as it matters


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
class Point:
    """Where a measurement is among others, and the share of the roofline that it reached."""

    octaves: tuple[float, float]
    share: float


@dataclass(frozen=True)
class MeasuredSpeeds:
    """The rates of one device, by what was measured on it."""

    blocks: tuple[MeasuredBlock, ...]

    def rates(self, weights: DType, work: Traffic) -> Rates | None:
        """The roofline's rates times the share that the nearest measured blocks in this format reached."""
        fitting = [block for block in self.blocks if block.weights == weights]
        if not fitting:
            return None
        flops, moved = _roofs(fitting)
        share = _nearby([_point(block, flops, moved) for block in fitting], _octaves(work))
        return Rates(weights.name, flops * share, moved * share)

    def without(self, left_out: MeasuredBlock) -> MeasuredSpeeds:
        """The same without one block and its other numbers of tokens, for a prediction of a block not seen."""
        return MeasuredSpeeds(tuple(block for block in self.blocks if block.label != left_out.label))


def predicted_s(speeds: MeasuredSpeeds, block: MeasuredBlock) -> float | None:
    """The block's time at these rates; None where nothing was measured in its format."""
    rates = speeds.rates(block.weights, block.work)
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


def _point(block: MeasuredBlock, flops_per_s: float, bytes_per_s: float) -> Point:
    return Point(_octaves(block.work), _floor_s(block.kernels, flops_per_s, bytes_per_s) / block.time_s)


def _octaves(work: Traffic) -> tuple[float, float]:
    return log2(work.flops_per_byte()), log2(work.moved())


def _nearby(points: Sequence[Point], place: tuple[float, float]) -> float:
    """The shares of the nearest points; of logarithms, as a share is a ratio."""

    def distance(point: Point) -> float:
        return sum((a - b) ** 2 for a, b in zip(point.octaves, place, strict=True)) + _CLOSE**2

    nearest = sorted(points, key=distance)[:_NEAREST]
    weights = [1 / distance(point) for point in nearest]
    mean = sum(w * log2(point.share) for w, point in zip(weights, nearest, strict=True)) / sum(weights)
    return float(2**mean)
