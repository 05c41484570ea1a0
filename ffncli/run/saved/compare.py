"""Compare two saved traces: the first step that differs, the size of the difference, and the likely cause."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.errors import FFNError, shown
from ffncli.frames import Tabular
from ffncli.run.engine.execute import halves_by_turns, turns_as_halves
from ffncli.run.measure.gap import gap, narrower, size, ulps
from ffncli.run.measure.statistics import unravel
from ffncli.run.saved.saved import Saved, SavedStep
from ffncli.show.tensors import written
from ffncli.system.notebook import record_table

TOLERANCE: Mapping[torch.dtype, float] = {
    torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2,
}  # fmt: skip
CONVENTIONS = {
    "relative_error": "max |new - base| / max |base| over the step's finite values",
    "ulps": "|new - base| at the worst element, in units in the last place of base's value there (narrower dtype);"
    " null where that value is 0",
    "tolerance": "for relative_error: "
    + ", ".join(f"{limit:g} {dtypes.dtype(str(dtype)).name}" for dtype, limit in TOLERANCE.items())
    + ", by the narrower dtype of a step",
}
_RUN_KEYS = ("source", "name", "layer", "stack", "weights", "mode", "device", "dtype", "seed")


@dataclass(frozen=True)
class TensorRow:
    """One step, or one weight, in both traces; BASE is the reference with which NEW is compared.

    `max_error` is the maximum of |new - base| over the elements that are finite in both; `relative_error` is
    `max_error` divided by the maximum finite |base|. `worst` is the element with the maximum error, None if all values
    are equal. `ulps` is |new - base| there, in units in the last place of base's value in the narrower `dtype` of the
    two; None if base's value is 0. `nonfinite` counts the elements that are NaN or infinite in one trace and different
    in the other: the first of them is then `worst`, and the step differs. Two NaNs agree, and so do two equal
    infinities. The row `agrees` if relative_error ≤ tolerance.
    """

    step: str
    op: str
    formula: str
    shape: tuple[int, ...]
    dtype: str
    max_error: float
    relative_error: float
    ulps: float | None
    worst: str | None
    base: float | None
    new: float | None
    nonfinite: int
    tolerance: float
    agrees: bool


@dataclass(frozen=True)
class TraceMismatch:
    """A field in which the records of the two traces differ."""

    field: str
    base: str
    new: str


@dataclass(frozen=True)
class TraceComparison(Tabular):
    """The result of a comparison: `first` is the first step that differs, `causes` are the reasons. Traces of different
    inputs are not `comparable`."""

    comparable: bool
    mismatches: tuple[TraceMismatch, ...]
    first: str | None
    causes: tuple[str, ...]
    rows: tuple[TensorRow, ...]
    weights: tuple[TensorRow, ...]

    def row(self, step: str) -> TensorRow:
        """Return the row of that step."""
        return next(row for row in self.rows if row.step == step)

    def table(self) -> list[dict[str, Any]]:
        """Return a row for each step, then for each weight."""
        return [asdict(row) for row in (*self.rows, *self.weights)]

    def __repr__(self) -> str:
        state = "all agree" if self.first is None else f"'{self.first}' is the first that differs"
        lines = [f"<TraceComparison of {len(self.rows)} steps: {state}", *(f"  {cause}" for cause in self.causes)]
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        names = ("step", "formula", "relative_error", "tolerance", "worst", "agrees")
        rows = [[getattr(row, name) for name in names] for row in (*self.rows, *self.weights)]
        return record_table(repr(self)[1:-1].splitlines()[0], names, rows)


def compare(base: Saved, new: Saved, tolerance: float | None = None) -> TraceComparison:
    """Compare every step that both traces have, in order; each step is read, compared and freed before the next.

    `tolerance` limits the relative error; it defaults to the narrower dtype's TOLERANCE. Raise FFNError if the traces
    have different blocks, or inputs of different shapes.
    """
    _check_same_block(base, new)
    others = {step.name: step for step in new.steps}
    mismatches = _mismatches(base, new)
    rows: list[TensorRow] = []
    for step in base.steps:
        other = others.get(step.name)
        if other is None:
            mismatches.append(TraceMismatch(step.name, "saved", "not saved"))
        elif step.inner and (step.shape != other.shape or base.tokens(step.name) != new.tokens(step.name)):
            mismatches.append(TraceMismatch(f"{step.name}: tokens", _tokens(base, step), _tokens(new, step)))
        else:
            row = difference(new.tensor(step.name), base.tensor(step.name), tolerance)
            rows.append(_named(row, step.name, step.op, step.formula))
    of_gradients, unlike = _gradient_rows(base, new, tolerance)
    rows += of_gradients
    mismatches += unlike
    names = {step.name for step in base.steps}
    mismatches += [TraceMismatch(step.name, "not saved", "saved") for step in new.steps if step.name not in names]
    weights = tuple(_weight_row(base, new, name, tolerance) for name in base.weights if name in new.weights)
    first = next((row for row in rows if not row.agrees), None)
    inputs = first is not None and first.op == "input"
    why: list[str] = []
    if first is not None:
        differing = frozenset(row.step for row in weights if not row.agrees)
        why = [
            f"{m.field} is {m.base} in BASE, {m.new} in NEW" for m in mismatches if m.field.startswith(f"{first.step}:")
        ]
        if first.op == "gradient":
            why = _gradient_causes(base, new, first)
        why = why or causes(base, new, first.step, differing, first.tolerance)
    return TraceComparison(
        not inputs, tuple(mismatches), first.step if first else None, tuple(why), tuple(rows), weights
    )


def _gradient_rows(base: Saved, new: Saved, tolerance: float | None) -> tuple[list[TensorRow], list[TraceMismatch]]:
    """Compare every gradient that both traces have, in the order of BASE's backward pass; return the rows, and the
    gradients that only one trace has or that have other shapes."""
    ours, theirs = ({one.name: one for one in saved.gradients} for saved in (base, new))
    rows, unlike = [], []
    for name, one in ours.items():
        other = theirs.get(name)
        if other is None or one.shape != other.shape:
            what = "not saved" if other is None else f"shape {[*other.shape]}"
            unlike.append(TraceMismatch(one.symbol, "saved" if other is None else f"shape {[*one.shape]}", what))
            continue
        row = difference(new.gradient(name), base.gradient(name), tolerance)
        rows.append(_named(row, f"d {name}", "gradient", one.formula))
    unlike += [TraceMismatch(one.symbol, "not saved", "saved") for name, one in theirs.items() if name not in ours]
    return rows, unlike if ours and theirs else []


def _gradient_causes(base: Saved, new: Saved, row: TensorRow) -> list[str]:
    """Return the likely cause of a wrong gradient, seen in its values."""
    name = row.step.removeprefix("d ")
    b, n = base.gradient(name).double(), new.gradient(name).double()
    if b.dim() > 1 and b.shape[-1] == b.shape[-2] and _same(n, b.transpose(-1, -2), row.tolerance):
        return [f"{row.step} is transposed"]
    b, n = (t.reshape(-1, t.shape[-1]) for t in (b, n))
    wrong = ((n - b).abs().amax(-1) > row.tolerance * size(b)).nonzero().flatten().tolist()
    if 0 < len(wrong) < len(b):
        few = ", ".join(map(str, wrong[:8])) + (", …" if len(wrong) > 8 else "")
        return [f"{len(wrong)} of the {len(b)} rows of {row.step} differ: {few}"]
    if cause := _single(b[:, :_MOST_VALUES], n[:, :_MOST_VALUES], row.step, "rows", row.tolerance):
        return [cause]
    return [f"all rows of {row.step} differ, though the forward pass agrees: the backward pass itself differs"]


def difference(new: Tensor, base: Tensor, tolerance: float | None = None) -> TensorRow:
    """Compare two tensors of the same shape; return a TensorRow without names. Integers (token ids) become float64."""
    new, base = (tensor if tensor.is_floating_point() else tensor.double() for tensor in (new, base))
    dtype = narrower(new.dtype, base.dtype)
    distance = gap(new, base)
    at = distance.first_unlike if distance.unlike else distance.at
    limit = TOLERANCE[dtype] if tolerance is None else tolerance
    values = (base.flatten()[at].double().item(), new.flatten()[at].double().item()) if at >= 0 else None
    return TensorRow(
        step="",
        op="",
        formula="",
        shape=tuple(base.shape),
        dtype=str(dtype).removeprefix("torch."),
        max_error=distance.largest,
        relative_error=distance.relative,
        ulps=0.0 if values is None else ulps(values[1], values[0], dtype) if values[0] else None,
        worst=written("", unravel(at, base.shape)) if values else None,
        base=values[0] if values else None,
        new=values[1] if values else None,
        nonfinite=distance.unlike,
        tolerance=limit,
        agrees=distance.unlike == 0 and distance.relative <= limit,
    )


def _weight_row(base: Saved, new: Saved, name: str, tolerance: float | None) -> TensorRow:
    """Compare a weight in both traces. Raises FFNError if its shapes differ."""
    a, b = new.weight(name), base.weight(name)
    if a.shape != b.shape:
        raise FFNError(
            f"weight {shown(name)} has shape {list(b.shape)} in {base.where} but {list(a.shape)} in {new.where}"
        )
    return _named(difference(a, b, tolerance), name, "weight", name)


def _named(row: TensorRow, name: str, op: str, formula: str) -> TensorRow:
    worst = None if row.worst is None else name + row.worst
    return replace(row, step=name, op=op, formula=formula, worst=worst)


def _tokens(saved: Saved, step: SavedStep) -> str:
    return ", ".join(map(str, (saved.tokens(step.name) or [])[:8]))


def _check_same_block(base: Saved, new: Saved) -> None:
    """Refuse two traces whose steps outside experts differ or have different shapes."""
    ours, theirs = ([s for s in saved.steps if not s.inner] for saved in (base, new))
    where = f"{new.where} was saved from a different block than {base.where}"
    for a, b in zip(ours, theirs, strict=False):
        if (a.name, a.op) != (b.name, b.op):
            mine, other = _assignment(a), _assignment(b)
            if mine == other:  # the formulas are the same
                mine, other = f"{mine} is {_kind(a, b)}", _kind(b, a)
            raise FFNError(f"{where}: {mine} in {base.where}, {other} in {new.where}")
        if a.shape != b.shape:
            inputs = f"{new.where} was traced on a different input than {base.where}"
            same = a.shape[-1] == b.shape[-1]
            shapes = f"{list(a.shape)} in {base.where} but {list(b.shape)} in {new.where}"
            raise FFNError(f"{inputs if same else where}: {a.name} has shape {shapes}")
    if len(ours) != len(theirs):
        longer, which = (ours, base) if len(ours) > len(theirs) else (theirs, new)
        raise FFNError(f"{where}: only {which.where} has the step {longer[min(len(ours), len(theirs))].name}")


def _assignment(step: SavedStep) -> str:
    return f"the input is {step.name}" if step.op == "input" else f"{step.name} = {step.formula}"


def _kind(step: SavedStep, other: SavedStep) -> str:
    """Return the step's op with the fields that differ from the other step: `linear (into d_model 8, bias False)`."""
    details = ", ".join(f"{key} {value}" for key, value in step.detail.items() if other.detail.get(key) != value)
    return f"{step.op} ({details})" if details else step.op


def _mismatches(base: Saved, new: Saved) -> list[TraceMismatch]:
    """Return the differences between the records: first those of the run, then those of each step."""
    out = [
        TraceMismatch(key, str(base.block.get(key)), str(new.block.get(key)))
        for key in _RUN_KEYS
        if base.block.get(key) != new.block.get(key)
    ]
    if base.fingerprint == new.fingerprint:
        return out
    others = {step.name: step for step in new.steps}
    for a in base.steps:
        b = others.get(a.name)
        if b is None:
            continue
        if a.formula != b.formula:
            out.append(TraceMismatch(f"{a.name}: formula", a.formula, b.formula))
            continue  # the formula already shows every difference
        details = [(key, a.detail[key], b.detail.get(key)) for key in a.detail]
        out += [TraceMismatch(f"{a.name}: {key}", mine, str(other)) for key, mine, other in details if mine != other]
    return out


_MOST_VALUES = 64  # values compared per unit: enough to distinguish units


def causes(base: Saved, new: Saved, first: str, differing: frozenset[str], tolerance: float) -> list[str]:
    """Return the causes of the difference in step `first`, the likeliest first; `differing` are weights that differ."""
    step = next(s for s in base.steps if s.name == first)
    if step.op == "input":
        return ["the inputs already differ, so later steps show nothing about the block"]
    search = _CauseSearch(base, new, step, differing, tolerance)
    texts = list(dict.fromkeys([*search.by_weights(), *search.by_values()]))
    return texts or search.nothing()


class _CauseSearch:
    """Searches for the causes of one differing step. Matrices are viewed as [units, values]: a weight's rows, or a
    step's features over some tokens. BASE is the reference for NEW."""

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
        """Yield causes visible in the weights."""
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
                    for n in (f"{_sibling(stem, part)}.{parameter}" for part in ("gate", "up"))
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
        """Yield causes visible in the step's values, if the weights show none."""
        if self.differing:
            return
        name = self.step.name
        b, n = _values(self.base.tensor(name)), _values(self.new.tensor(name))
        partner = _partner(name)
        both = {s.name for s in self.base.steps} & {s.name for s in self.new.steps}
        if partner and partner in both and self.step.op == "linear":
            gate, up = (
                (_values(self.base.tensor(s)), _values(self.new.tensor(s)))
                for s in (_sibling(name, part) for part in ("gate", "up"))
            )
            if cause := _pair(gate, up, name, self.tolerance):
                yield cause
                return
        if self.step.op == "linear" and self._transposed():
            yield f"{name}.weight is transposed"
        elif (cause := self._norm_weight(b, n)) or (cause := _single(b, n, name, "features", self.tolerance)):
            yield cause

    def _transposed(self) -> bool:
        """Return whether the saved weight of one trace, transposed, yields the values of the other trace."""
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
        """Return a cause if one trace applies a norm's weight as w and the other as 1 + w, or not at all."""
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
        """Return the answer for a step without a recognised cause."""
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
    """Return a cause that affects gate and up together: a swap, or another way of splitting one fused matrix."""
    names = f"{_sibling(name, 'gate')} and {_sibling(name, 'up')}"
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
            return None  # gate and up were permuted separately, which is reported elsewhere
        return f"{names} have the same columns in another order: one fused matrix was cut in a different way"
    return None


def _single(base: Tensor, new: Tensor, name: str, units: str, tolerance: float) -> str | None:
    """Return a cause that affects one matrix [units, values]."""
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
    """Return whether NEW has BASE's rows in another order."""
    if base.shape != new.shape or not (base.isfinite().all() and new.isfinite().all()):
        return False
    # Sort the rows by a fixed random projection: different rows tie with probability 0.
    generator = torch.Generator().manual_seed(0)
    line = torch.rand(base.shape[1], dtype=torch.float64, generator=generator) + 0.5
    return _same(new[(new @ line).argsort()], base[(base @ line).argsort()], tolerance)


def _same(a: Tensor, b: Tensor, tolerance: float) -> bool:
    """Return whether two matrices are equal up to rounding; False for NaN or Inf, which would hide differences."""
    if a.shape != b.shape or not (a.isfinite().all() and b.isfinite().all()):
        return False
    return gap(a, b).relative <= max(tolerance, 1e-12)


def _units(weight: Tensor, name: str) -> Tensor:
    """Return a weight [..., out, in], or a vector per unit [..., out], as [out, some values], in float64."""
    weight = weight if weight.dim() else weight.reshape(1)
    matrix = weight.unsqueeze(-1) if weight.dim() == 1 or name.endswith(".bias") else weight
    return matrix.movedim(-2, 0).flatten(1)[:, :_MOST_VALUES].double()


def _values(tensor: Tensor) -> Tensor:
    """Return a step's values [..., features] as [features, some tokens], in float64."""
    return tensor.flatten(0, -2)[:_MOST_VALUES].double().T


def _partner(name: str) -> str | None:
    """Return the name of `gate` for `up`, and of `up` for `gate`, under the same prefix."""
    other = {"gate": "up", "up": "gate"}.get(name.rpartition(".")[2])
    return None if other is None else _sibling(name, other)


def _sibling(name: str, part: str) -> str:
    """Return `part` with the prefix of `name`: `shared.gate` for `shared.up` and `gate`."""
    stem, dot, _ = name.rpartition(".")
    return stem + dot + part
