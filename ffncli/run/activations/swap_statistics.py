"""Statistics of each activation's output for the same input, chunk by chunk: no tensor as wide as d_ff is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from ffncli.block.steps import Activation, Step, right_hand_side
from ffncli.run.measure.statistics import Distribution, Moments, Sampler, near_zero

_BLOCK = 1 << 15  # values per block: fits a cache, and is too small for torch to use several threads
_BLOCK_ON_GPU = 1 << 24


@dataclass(frozen=True)
class ActivationOutput:
    """One activation's output: the block's own, or another in its place.

    `mean` and `variance` (divisor n) are of the finite values. `zero_share` is the share with |y| ≤ NEAR_ZERO,
    `exact_zero_share` with 0. `dead_units` are 0 for every token, `near_dead_units` within NEAR_ZERO of 0. Against the
    block's own y₀, where both are finite: `max_difference` = max|y - y₀|, `max_difference_at` the input there,
    `relative_difference` = ‖y - y₀‖ / ‖y₀‖. `output_change` is the same for the FFN's output, with all of the layer's
    activations replaced at once; None if the block's own is 0 throughout.
    """

    name: str
    mean: float | None
    variance: float | None
    zero_share: float
    exact_zero_share: float
    dead_units: int
    near_dead_units: int
    nan: int
    inf: int
    max_difference: float | None
    max_difference_at: float | None
    relative_difference: float | None
    output_change: float | None


@dataclass(frozen=True)
class ActivationInput:
    """One activation of a layer: `act` in a dense FFN, `experts.act` for all routed experts together, `shared.act`.

    `input` describes the function's input, after the step's clip, which changed `clipped` of the values. `units` are
    over all `experts` (those that received a token; None outside experts). `made` starts with the block's own.
    """

    step: str
    formula: str
    units: int
    experts: int | None
    clipped: int
    input: Distribution
    made: tuple[ActivationOutput, ...]


@dataclass
class _Differences:
    """Σ(y - y₀)² (`apart`) and Σy₀² (`reference`), where both are finite."""

    apart: float = 0.0
    reference: float = 0.0
    any: bool = False

    def add(self, y: Tensor, reference: Tensor) -> Tensor:
        """Add two tensors in float64; returns y - y₀, 0 where one is not finite."""
        apart, reference = (y - reference).flatten(), reference.flatten()
        squares = torch.dot(apart, apart).item(), torch.dot(reference, reference).item()
        if not isfinite(sum(squares)):
            both = y.isfinite().flatten() & reference.isfinite()
            apart, reference = torch.where(both, apart, 0.0), torch.where(both, reference, 0.0)
            squares = torch.dot(apart, apart).item(), torch.dot(reference, reference).item()
            self.any |= bool(both.any())
        else:
            self.any = True
        self.apart += squares[0]
        self.reference += squares[1]
        return apart

    @property
    def relative(self) -> float | None:
        """‖y - y₀‖ / ‖y₀‖; None if y₀ is 0 throughout and y is not, or if nothing was finite."""
        if not self.reference:
            return None if self.apart or not self.any else 0.0
        ratio = sqrt(self.apart) / sqrt(self.reference)
        return ratio if ratio < inf else None


@dataclass
class _OutputStatistics:
    """One activation at one place, so far."""

    moments: Moments = field(default_factory=Moments)
    differences: _Differences = field(default_factory=_Differences)
    loudest: dict[int | None, Tensor] = field(default_factory=dict)  # max|y| of every unit, by expert
    largest: float = 0.0
    at: float | None = None

    def add(self, expert: int | None, z: Tensor, y: Tensor, reference: Tensor) -> None:
        """Add y = f(z) [rows, d_ff] and its difference from the block's own activation, `reference` in float64."""
        wide = y.double()
        size = wide.abs()
        self.moments.merge(wide, size, near_zero(y.dtype))
        loud = size.amax(0)
        self.loudest[expert] = torch.maximum(self.loudest[expert], loud) if expert in self.loudest else loud
        apart = self.differences.add(wide, reference)
        low, high = (end.item() for end in apart.aminmax())
        if max(-low, high) > self.largest:
            self.largest = max(-low, high)
            self.at = z.flatten()[int((apart.abs() == self.largest).nonzero()[0])].item()

    def made(self, name: str, bound: float, change: float | None) -> ActivationOutput:
        """The record."""
        t = self.moments
        dead, near = (sum(int((loud <= b).sum()) for loud in self.loudest.values()) for b in (0.0, bound))
        mean, variance = (t.mean, t.variance) if t.finite else (None, None)
        return ActivationOutput(
            name, mean, variance, t.near_zeros / t.values, t.zeros / t.values, dead, near, t.nan, t.inf,
            self.largest if self.differences.any else None, self.at, self.differences.relative, change,
        )  # fmt: skip


@dataclass
class _SwappedStep:
    """One activation step of a layer, so far."""

    name: str
    step: Step
    sampler: Sampler
    outputs: Mapping[str, _OutputStatistics]
    dtype: torch.dtype
    clipped: int = 0


class SwapStatistics:
    """The statistics of a layer so far: its activations by name, and how each of `names`, the block's own first,
    changes its output. An activation can receive `most` rows: keyed by the experts' name, "" for any other.
    """

    def __init__(self, names: tuple[str, ...], most: Mapping[str, int]) -> None:
        self.names, self.most = names, most
        self.places: dict[str, _SwappedStep] = {}
        self.changes = {name: _Differences() for name in names}

    def add(self, name: str, step: Step, expert: int | None, z: Tensor, made: Sequence[Tensor]) -> None:
        """Add one run of an activation (`variants.Watch`)."""
        if name not in self.places:
            rows = self.most[name.partition(".")[0] if expert is not None else ""]
            outputs = {other: _OutputStatistics() for other in self.names}
            self.places[name] = _SwappedStep(name, step, Sampler(rows, z.shape[-1]), outputs, z.dtype)
        place, op = self.places[name], step.op
        assert isinstance(op, Activation)
        if op.low is not None or op.high is not None:
            clipped = z.clamp(op.low, op.high)
            place.clipped += int(((clipped != z) & ~z.isnan()).sum())
            z = clipped
        size = max(1, (_BLOCK_ON_GPU if z.is_cuda else _BLOCK) // z.shape[-1])
        for at in range(0, z.shape[0], size):
            block = slice(at, at + size)
            place.sampler.add(z[block])
            reference = made[0][block].double()
            for other, y in zip(self.names, made, strict=True):
                place.outputs[other].add(expert, z[block], y[block], reference)

    def add_outputs(self, outs: Sequence[Tensor]) -> None:
        """Add the FFN's output with each activation."""
        reference = outs[0].double()
        for name, out in zip(self.names, outs, strict=True):
            self.changes[name].add(out.double(), reference)

    def inputs(self) -> tuple[ActivationInput, ...]:
        """The record of every place."""
        records = []
        for place in self.places.values():
            bound = near_zero(place.dtype)
            made = tuple(m.made(name, bound, self.changes[name].relative) for name, m in place.outputs.items())
            experts = [e for e in place.outputs[self.names[0]].loudest if e is not None]
            units = place.sampler.width * (len(experts) or 1)
            formula = right_hand_side(place.step, ())
            values = place.sampler.distribution()
            records.append(
                ActivationInput(place.name, formula, units, len(experts) or None, place.clipped, values, made)
            )
        return tuple(records)
