"""A block next to the same block with a change: what differs at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block.steps import Step
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.measure.statistics import unravel
from ffncli.run.what_if.changes import Change, changed


@dataclass(frozen=True)
class StepChange:
    """A step with and without the change: `changed` of its `values` differ, most at `at`, where `old` becomes `new`.

    `difference` = new - old; `relative` is ‖new − old‖ / ‖old‖, None where the old values are all 0.
    """

    name: str
    values: int
    changed: int
    at: tuple[int, ...] | None
    old: float | None
    new: float | None
    difference: float
    relative: float | None


def step_changes(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], changes: Sequence[Change]
) -> tuple[StepChange, ...]:
    """The steps of a block in order, outside its experts, each next to itself after the changes."""
    new_steps, new_weights = changed(steps, weights, changes)
    with torch.no_grad():
        old = (event for event in execute(steps, weights, inputs, EVAL) if event.expert is None)
        new = (event for event in execute(new_steps, new_weights, inputs, EVAL) if event.expert is None)
        return tuple(_compared(a.name, a.tensor, b.tensor) for a, b in zip(old, new, strict=True))


def _compared(name: str, old: Tensor, new: Tensor) -> StepChange:
    differ = ~((old == new) | (old.isnan() & new.isnan()))
    count = int(differ.sum())
    if not count:
        return StepChange(name, old.numel(), 0, None, None, None, 0.0, 0.0)
    gap = (new.double() - old.double()).masked_fill(~differ, 0.0)
    at = unravel(int(gap.abs().nan_to_num(torch.inf, torch.inf).argmax()), old.shape)
    size = float(old.double().norm())
    return StepChange(
        name, old.numel(), count, at, float(old[at]), float(new[at]), float(gap[at]),
        float(gap.norm()) / size if size else None,
    )  # fmt: skip
