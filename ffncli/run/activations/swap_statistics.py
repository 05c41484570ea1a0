"""What each activation makes of what enters, counted piece by piece: nothing as wide as d_ff is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from ffncli.block.steps import Activation, Step, right_hand_side
from ffncli.run.measure.distribution import Distribution, Moments, Sampler
from ffncli.run.measure.statistics import near_zero

_BLOCK = 1 << 15  # values looked at together: small for a cache, and below what torch gives to several threads
_BLOCK_ON_GPU = 1 << 24


@dataclass(frozen=True)
class ActivationOutput:
    """What one activation makes of what enters: the block's own, or another in its place.

    `mean` and `variance` (divisor n) are of the finite values. `zero_share` have |y| ≤ NEAR_ZERO, `exact_zero_share`
    are 0. `dead_units` are 0 for every token, `near_dead_units` within NEAR_ZERO of 0. Against the own y₀, where both
    are finite: `max_difference` = max|y - y₀|, `max_difference_at` the input there, `relative_difference` = ‖y - y₀‖ /
    ‖y₀‖. `output_change` is the same of the FFN's output, with all of the layer's activations replaced at once; None
    where the own is 0 throughout.
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
    """One activation of a layer: of a dense FFN `act`, of all routed experts together `experts.act`, `shared.act`.

    `input` is of what reaches the function, after the step's clip, which changed `clipped` of the values. Of the
    `units` each of `experts` (those that got a token; None outside of them) has its own. `made` has the own first.
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
    """Σ(y - y₀)² and Σy₀², where both are finite."""

    apart: float = 0.0
    own: float = 0.0
    any: bool = False

    def add(self, y: Tensor, own: Tensor) -> Tensor:
        """Count two tensors in float64; returns y - y₀, 0 where one is not finite."""
        apart, own = (y - own).flatten(), own.flatten()
        squares = torch.dot(apart, apart).item(), torch.dot(own, own).item()
        if not isfinite(sum(squares)):
            both = y.isfinite().flatten() & own.isfinite()
            apart, own = torch.where(both, apart, 0.0), torch.where(both, own, 0.0)
            squares = torch.dot(apart, apart).item(), torch.dot(own, own).item()
            self.any |= bool(both.any())
        else:
            self.any = True
        self.apart += squares[0]
        self.own += squares[1]
        return apart

    @property
    def relative(self) -> float | None:
        """‖y - y₀‖ / ‖y₀‖; None where y₀ is 0 throughout and y is not, and where nothing was finite."""
        if not self.own:
            return None if self.apart or not self.any else 0.0
        found = sqrt(self.apart) / sqrt(self.own)
        return found if found < inf else None


@dataclass
class _OutputStatistics:
    """One activation at one place, so far."""

    moments: Moments = field(default_factory=Moments)
    differences: _Differences = field(default_factory=_Differences)
    loudest: dict[int | None, Tensor] = field(default_factory=dict)  # max|y| of every unit, by expert
    largest: float = 0.0
    at: float | None = None

    def add(self, expert: int | None, z: Tensor, y: Tensor, own: Tensor) -> None:
        """Count y = f(z) [rows, d_ff], beside the own activation's in float64."""
        wide = y.double()
        size = wide.abs()
        self.moments.merge(wide, size, near_zero(y.dtype))
        loud = size.amax(0)
        self.loudest[expert] = torch.maximum(self.loudest[expert], loud) if expert in self.loudest else loud
        apart = self.differences.add(wide, own)
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
    """What is known so far of a layer: its activations by name, and what each of `names`, the own first, does to its
    output. `most` rows can get to an activation: of the experts of that name, "" to any other.
    """

    def __init__(self, names: tuple[str, ...], most: Mapping[str, int]) -> None:
        self.names, self.most = names, most
        self.places: dict[str, _SwappedStep] = {}
        self.changes = {name: _Differences() for name in names}

    def add(self, name: str, step: Step, expert: int | None, z: Tensor, made: Sequence[Tensor]) -> None:
        """An activation that runs (`variants.Watch`)."""
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
            own = made[0][block].double()
            for other, y in zip(self.names, made, strict=True):
                place.outputs[other].add(expert, z[block], y[block], own)

    def add_outputs(self, outs: Sequence[Tensor]) -> None:
        """What left the FFN with each activation."""
        own = outs[0].double()
        for name, out in zip(self.names, outs, strict=True):
            self.changes[name].add(out.double(), own)

    def inputs(self) -> tuple[ActivationInput, ...]:
        """The record of every place."""
        found = []
        for place in self.places.values():
            bound = near_zero(place.dtype)
            made = tuple(m.made(name, bound, self.changes[name].relative) for name, m in place.outputs.items())
            experts = [e for e in place.outputs[self.names[0]].loudest if e is not None]
            units = place.sampler.width * (len(experts) or 1)
            formula = right_hand_side(place.step, ())
            values = place.sampler.distribution()
            found.append(ActivationInput(place.name, formula, units, len(experts) or None, place.clipped, values, made))
        return tuple(found)
