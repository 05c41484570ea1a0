"""Why a step differs, from saved numbers: weights swapped, transposed, cut wrongly, permuted, scaled, negated.

Matrices are viewed as [units, values]: a weight's rows, or a step's features over some tokens. BASE is the reference
for NEW.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ffncli.run.engine.execute import halves_by_turns, turns_as_halves
from ffncli.run.measure.gap import gap
from ffncli.run.saved.saved import Saved, SavedStep

_MOST_VALUES = 64  # values compared per unit: enough to distinguish units


def causes(base: Saved, new: Saved, first: str, differing: frozenset[str], tolerance: float) -> list[str]:
    """The causes of the difference in step `first`, the most likely first; `differing` are the weights that differ."""
    step = next(s for s in base.steps if s.name == first)
    if step.op == "input":
        return ["the inputs already differ, so later steps show nothing about the block"]
    search = _CauseSearch(base, new, step, differing, tolerance)
    texts = list(dict.fromkeys([*search.by_weights(), *search.by_values()]))
    return texts or search.nothing()


class _CauseSearch:
    """The searches on one differing step, each yielding the causes that it recognises."""

    def __init__(self, base: Saved, new: Saved, step: SavedStep, differing: frozenset[str], tolerance: float) -> None:
        self.base, self.new, self.step, self.tolerance = base, new, step, tolerance
        both = [name for name in base.weights if name in new.weights]
        tops = {s.name for s in base.steps if not s.inner}
        prefix = step.name.rpartition(".")[2] if step.inner else step.name
        if step.op == "experts":  # the program's weights belong only to steps inside it
            self.weight_names = [name for name in both if name.rpartition(".")[0] not in tops]
        else:
            self.weight_names = [name for name in both if name.rpartition(".")[0] == prefix]
        self.differing = [name for name in self.weight_names if name in differing]

    def by_weights(self) -> Iterator[str]:
        """Causes visible in the weights."""
        for name in self.differing:
            stem, _, parameter = name.rpartition(".")
            partner = _partner(stem)
            if (
                partner
                and f"{partner}.{parameter}" in self.base.weights
                and f"{partner}.{parameter}" in self.new.weights
            ):
                gate, up = (
                    (_units(self.base.weight(n), n), _units(self.new.weight(n), n))
                    for n in (f"{_named(stem, part)}.{parameter}" for part in ("gate", "up"))
                )
                if cause := _pair(gate, up, stem, self.tolerance):
                    yield cause
                    continue
            b, n = self.base.weight(name).double(), self.new.weight(name).double()
            if b.dim() > 1 and b.shape[-1] == b.shape[-2] and self._same(n, b.transpose(-1, -2)):
                yield f"{name} is transposed"
            elif cause := _single(_units(b, name), _units(n, name), name, "rows", self.tolerance):
                yield cause
            elif b.dim() == 2 and _permuted(b.T[:, :_MOST_VALUES], n.T[:, :_MOST_VALUES], self.tolerance):
                yield f"the columns (inputs) of {name} are in another order"
            else:
                yield f"{name} differs"

    def by_values(self) -> Iterator[str]:
        """Causes visible in the step's values, if the weights show none."""
        if self.differing:
            return
        name = self.step.name
        b, n = _values(self.base.tensor(name)), _values(self.new.tensor(name))
        partner = _partner(name)
        both = {s.name for s in self.base.steps} & {s.name for s in self.new.steps}
        if partner and partner in both and self.step.op == "linear":
            gate, up = (
                (_values(self.base.tensor(s)), _values(self.new.tensor(s)))
                for s in (_named(name, part) for part in ("gate", "up"))
            )
            if cause := _pair(gate, up, name, self.tolerance):
                yield cause
                return
        if self.step.op == "linear" and self._transposed():
            yield f"{name}.weight is transposed"
        elif (cause := self._norm_weight(b, n)) or (cause := _single(b, n, name, "features", self.tolerance)):
            yield cause

    def _transposed(self) -> bool:
        """Whether one side's saved weight, transposed, gives the other side's values."""
        name, inputs = f"{self.step.name}.weight", self.step.inputs
        if self.step.inner or len(inputs) != 1:
            return False
        for kept, other in ((self.base, self.new), (self.new, self.base)):
            if name not in kept.weights or name in other.weights:
                continue
            weight, x = kept.weight(name).double(), kept.tensor(inputs[0]).double()
            if tuple(weight.shape) != (x.shape[-1], x.shape[-1]):
                return False
            bias = f"{self.step.name}.bias"
            shift = kept.weight(bias).double() if bias in kept.weights else torch.zeros(len(weight))
            made = x @ weight + shift if len(shift) == len(weight) else x
            if self._same(other.tensor(self.step.name).double(), made):
                return True
        return False

    def _norm_weight(self, base: Tensor, new: Tensor) -> str | None:
        """A norm's weight that was applied as w on one side and as 1 + w, or not at all, on the other."""
        name = f"{self.step.name}.weight"
        kept = next((saved for saved in (self.base, self.new) if name in saved.weights), None)
        if self.step.op != "norm" or kept is None:
            return None
        weight = kept.weight(name).double().reshape(-1, 1)
        if len(weight) != len(base):
            return None
        ways = {"times 1 + w": 1 + weight, "times w": weight, "without its weight": torch.ones_like(weight)}
        for mine, divided in ways.items():
            for other, factor in ways.items():
                if mine != other and self._same(new * divided, base * factor):
                    return f"{self.step.name} is {mine} in BASE, {other} in NEW"
        return None

    def nothing(self) -> list[str]:
        """The answer if no cause was recognised."""
        if self.weight_names:
            return [f"the weights of {self.step.name} are the same in both: the arithmetic differs"]
        if self.step.op in ("linear", "norm", "experts"):
            return ["no known pattern; save with --save-weights to compare its weights too"]
        return [f"the inputs of {self.step.name} agree: its {self.step.op} itself differs"]

    def _same(self, a: Tensor, b: Tensor) -> bool:
        return _same(a, b, self.tolerance)


# --- patterns ---------------------------------------------------------------------------------------------------------

Pair = tuple[Tensor, Tensor]  # (base, new), both [units, values]


def _pair(gate: Pair, up: Pair, name: str, tolerance: float) -> str | None:
    """What happened to gate and up together: exchanged, or cut out of one fused matrix in a different way."""
    names = f"{_named(name, 'gate')} and {_named(name, 'up')}"
    (base_gate, new_gate), (base_up, new_up) = gate, up
    if not base_gate.shape == base_up.shape == new_gate.shape == new_up.shape:
        return None
    if _same(new_gate, base_up, tolerance) and _same(new_up, base_gate, tolerance):
        return f"{names} are swapped"
    for first, second, order in ((base_gate, base_up, ""), (base_up, base_gate, ", up first")):
        cuts = {
            f"interleaved columns were read as halves{order}": turns_as_halves(first, second),
            f"halves were read as interleaved columns{order}": halves_by_turns(first, second),
        }
        for cut, (as_gate, as_up) in cuts.items():
            if _same(new_gate, as_gate, tolerance) and _same(new_up, as_up, tolerance):
                return f"{names} come from one fused matrix: {cut}"
            if _same(new_gate, as_up, tolerance) and _same(new_up, as_gate, tolerance):
                return f"{names} come from one fused matrix: {cut}, and swapped"
    if _permuted(torch.cat((base_gate, base_up)), torch.cat((new_gate, new_up)), tolerance):
        if _permuted(base_gate, new_gate, tolerance):
            return None  # each changed only within itself: reported separately
        return f"{names} have the same columns in another order: one fused matrix was cut in a different way"
    return None


def _single(base: Tensor, new: Tensor, name: str, units: str, tolerance: float) -> str | None:
    """What happened to one matrix [units, values]."""
    if not new.any():
        return f"{name} is zero everywhere in NEW"
    if _same(new, -base, tolerance):
        return f"all signs of {name} are flipped"
    factor = (new * base).sum() / base.square().sum()
    if factor.isfinite() and factor != 0 and _same(new, factor * base, tolerance):
        return f"{name} in NEW is {factor.item():.6g} times its value in BASE"
    if _permuted(base, new, tolerance):
        return f"the {units} of {name} are in another order"
    if base.shape[1] < 2:
        return None
    factors = (new * base).sum(1, keepdim=True) / base.square().sum(1, keepdim=True)
    if factors.isfinite().all() and _same(new, factors * base, tolerance):
        return f"each of the {units} of {name} is scaled by its own factor, such as {factors[0].item():.6g}"
    shifts = (new - base).mean(1, keepdim=True)
    if _same(new, base + shifts, tolerance):
        return f"each of the {units} of {name} is shifted by its own amount, as by a bias"
    return None


def _permuted(base: Tensor, new: Tensor, tolerance: float) -> bool:
    """Whether NEW has BASE's rows in another order; rows are identified by a fixed random projection."""
    if base.shape != new.shape or not (base.isfinite().all() and new.isfinite().all()):
        return False
    generator = torch.Generator().manual_seed(0)
    line = torch.rand(base.shape[1], dtype=torch.float64, generator=generator) + 0.5
    return _same(new[(new @ line).argsort()], base[(base @ line).argsort()], tolerance)


def _same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Whether two matrices are equal up to rounding; never with NaN or Inf, which would hide any difference."""
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return False
    return gap(a, b).relative <= max(tolerance, 1e-12)


def _units(weight: Tensor, name: str) -> Tensor:
    """A weight [..., out, in], or a vector per unit [..., out], as [out, some values], in float64."""
    weight = weight if weight.dim() else weight.reshape(1)
    matrix = weight.unsqueeze(-1) if weight.dim() == 1 or name.endswith(".bias") else weight
    return matrix.movedim(-2, 0).flatten(1)[:, :_MOST_VALUES].double()


def _values(tensor: Tensor) -> Tensor:
    """A step's values [..., features] as [features, some tokens], in float64."""
    return tensor.flatten(0, -2)[:_MOST_VALUES].double().T


def _partner(name: str) -> str | None:
    """`gate` for `up` and the reverse, under the same prefix."""
    other = {"gate": "up", "up": "gate"}.get(name.rpartition(".")[2])
    return None if other is None else _named(name, other)


def _named(name: str, part: str) -> str:
    """`part` under the prefix of `name`: `shared.up`, `gate` → `shared.gate`."""
    stem, dot, _ = name.rpartition(".")
    return stem + dot + part
