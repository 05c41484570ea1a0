"""Two saved traces side by side: where the numbers differ first, by how much, and the likely cause."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffncli.block import dtypes
from ffncli.errors import FFNError, shown
from ffncli.run.measure.gap import gap, narrower, ulps
from ffncli.run.measure.statistics import unravel
from ffncli.run.saved.causes import causes
from ffncli.run.saved.saved import Saved, SavedStep
from ffncli.show.page.document import record_table
from ffncli.show.tensors import written
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

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
    """One step, or one weight, in both traces: BASE is the reference, NEW is compared with it.

    `max_error` is the largest |new - base| over places where both are finite, `relative_error` that over the largest
    finite |base|, `ulps` |new - base| at the worst element in units in the last place of base's value there, in the
    narrower `dtype` of the two; None if that value is 0. `nonfinite` counts places where one is NaN or infinite and
    the other differs: the first of them is then `worst`, and the step differs. NaN in both, or the same
    infinity, agrees. `worst` is None if all values are equal. It `agrees` if relative_error ≤ tolerance.
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
class TraceComparison:
    """`first` is the first step that differs, `causes` why. If the inputs differ it is not `comparable`."""

    comparable: bool
    mismatches: tuple[TraceMismatch, ...]
    first: str | None
    causes: tuple[str, ...]
    rows: tuple[TensorRow, ...]
    weights: tuple[TensorRow, ...]

    def row(self, step: str) -> TensorRow:
        """The row of that step."""
        return next(row for row in self.rows if row.step == step)

    @package_errors()
    def frame(self) -> DataFrame:
        """A row for each step, then for each weight, as a pandas DataFrame. Raises FFNError (exit 3) without pandas."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in (*self.rows, *self.weights)])

    def __repr__(self) -> str:
        state = "all agree" if self.first is None else f"'{self.first}' is the first that differs"
        lines = [f"<TraceComparison of {len(self.rows)} steps: {state}", *(f"  {cause}" for cause in self.causes)]
        return "\n".join(lines) + ">"

    def _repr_html_(self) -> str:
        names = ("step", "formula", "relative_error", "tolerance", "worst", "agrees")
        rows = [[getattr(row, name) for name in names] for row in (*self.rows, *self.weights)]
        return record_table(repr(self)[1:-1].splitlines()[0], names, rows)


def compare(base: Saved, new: Saved, tolerance: float | None = None) -> TraceComparison:
    """Every step that both have, in order; each is read, compared and freed before the next.

    `tolerance` is for the relative error; None takes that of the narrower dtype (TOLERANCE). Raises FFNError if the
    two come from different blocks, or from inputs of different shapes.
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
            rows.append(_step_row(base, new, step, tolerance))
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
        why = why or causes(base, new, first.step, differing, first.tolerance)
    return TraceComparison(
        not inputs, tuple(mismatches), first.step if first else None, tuple(why), tuple(rows), weights
    )


def difference(new: Tensor, base: Tensor, tolerance: float | None = None) -> TensorRow:
    """Two tensors of one shape as a TensorRow without names; whole numbers, such as token ids, as float64."""
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


def _step_row(base: Saved, new: Saved, step: SavedStep, tolerance: float | None) -> TensorRow:
    row = difference(new.tensor(step.name), base.tensor(step.name), tolerance)
    return _named(row, step.name, step.op, step.formula)


def _weight_row(base: Saved, new: Saved, name: str, tolerance: float | None) -> TensorRow:
    """The row of a weight in both traces. Raises FFNError if the shapes differ."""
    a, b = new.weight(name), base.weight(name)
    if a.shape != b.shape:
        raise FFNError(
            f"weight {shown(name)} has shape {list(b.shape)} in {base.where}, {list(a.shape)} in {new.where}"
        )
    return _named(difference(a, b, tolerance), name, "weight", name)


def _named(row: TensorRow, name: str, op: str, formula: str) -> TensorRow:
    worst = None if row.worst is None else name + row.worst
    return replace(row, step=name, op=op, formula=formula, worst=worst)


def _tokens(saved: Saved, step: SavedStep) -> str:
    return ", ".join(map(str, (saved.tokens(step.name) or [])[:8]))


def _check_same_block(base: Saved, new: Saved) -> None:
    """Raises FFNError if the steps outside experts differ, or have different shapes."""
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
            shapes = f"{list(a.shape)} in {base.where}, {list(b.shape)} in {new.where}"
            raise FFNError(f"{inputs if same else where}: {a.name} has shape {shapes}")
    if len(ours) != len(theirs):
        longer, which = (ours, base) if len(ours) > len(theirs) else (theirs, new)
        raise FFNError(f"{where}: only {which.where} has the step {longer[min(len(ours), len(theirs))].name}")


def _assignment(step: SavedStep) -> str:
    return f"the input is {step.name}" if step.op == "input" else f"{step.name} = {step.formula}"


def _kind(step: SavedStep, other: SavedStep) -> str:
    """The step's op with those of its fields that differ from the other's: `linear (into d_model 8, bias False)`."""
    details = ", ".join(f"{key} {value}" for key, value in step.detail.items() if other.detail.get(key) != value)
    return f"{step.op} ({details})" if details else step.op


def _mismatches(base: Saved, new: Saved) -> list[TraceMismatch]:
    """The differences between the records: on the run, then on each step."""
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
