"""A training step as parts of a page: the loss, each gradient, the new weights, and the losses of a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ffncli.cli.common.summaries import in_json, labels
from ffncli.show.parts import Heading, Line, Part
from ffncli.show.tensors import Excerpt, number_text

if TYPE_CHECKING:
    from ffncli.run.trace.session import Session
    from ffncli.run.trace.training_step import GradientRecord, NewWeight, TrainingStep


_IN_JSON = ("objective", "formula", "loss", "lr", "loss_after", "change", "predicted_change")


def step_json(step: TrainingStep | None) -> dict[str, Any]:
    """Return the keys of docs/commands/trace.md for a backward pass; an empty mapping without one."""
    if step is None:
        return {}
    numbers = {name: getattr(step, name) for name in _IN_JSON}
    return {
        "objective": numbers.pop("objective"), "loss_formula": numbers.pop("formula"), **numbers,
        "gradients": in_json(step.gradients), "new_weights": in_json(step.new_weights) or None,
    }  # fmt: skip


def step_parts(session: Session, digits: int) -> list[Part]:
    """Show the loss, the gradients from the last step to the first, then the new weights."""
    step = session.training_step
    if step is None:
        return []
    rows = labels(session.tokens)
    parts: list[Part] = [Heading(f"backward, from the loss {step.formula}", f"= {step.loss:.{digits + 3}g}")]
    for one in step.gradients:
        parts += _gradient(one, digits, rows)
    return [*parts, *_update(step, digits)]


def _gradient(one: GradientRecord, digits: int, rows: Sequence[str]) -> list[Part]:
    """Show one gradient as its formula prints it: a matrix of weights is transposed, [in, out]."""
    shape, index, values = printed(one)
    about = f"[{', '.join(map(str, shape))}] {one.dtype}" + (f", {one.name}" if one.weight else "")
    names: tuple[int | str, ...] | None = one.tokens
    if not one.weight and rows:
        names = tuple(rows[row] for row in (range(len(rows)) if one.tokens is None else one.tokens))
    ends = [("min", one.min), ("max", one.max), ("mean", one.mean), ("std", one.std), ("norm", one.norm)]
    text = "  ".join(f"{name} {number_text(value, digits)}" for name, value in ends if value is not None)
    counts = [f"{n:,} {name}" for name, n in (("zero", one.zeros), ("NaN", one.nan), ("Inf", one.inf)) if n]
    return [
        Heading(f"{one.symbol} = {one.formula}", about), Excerpt(shape, index, values, digits, names),
        Line("  ".join([text, *counts]), quiet=True),
    ]  # fmt: skip


def _update(step: TrainingStep, digits: int) -> list[Part]:
    if step.lr is None or step.loss_after is None or step.change is None or step.predicted_change is None:
        return []
    parts: list[Part] = [Heading("one step of gradient descent", f"lr {step.lr:g}")]
    for one in step.new_weights:
        shape, index, values = printed(one)
        parts += [Heading(f"new {one.symbol} = {one.formula}", f"[{', '.join(map(str, shape))}], {one.name}")]
        parts.append(Excerpt(shape, index, values, digits))
    if step.change != step.change:
        return [*parts, Line(f"loss {step.loss:g} → {step.loss_after:g}: not finite, so no change can be predicted")]
    ratio = f", {step.predicted_change / step.change:.4g} of the true change" if step.change else ""
    precise = digits + 3
    parts.append(Line(f"loss {step.loss:.{precise}g} → {step.loss_after:.{precise}g}: {step.change:+.{precise}g}"))
    parts.append(Line(f"first order predicts -lr · Σ gradient² = {step.predicted_change:+.{precise}g}{ratio}"))
    return parts


def printed(one: GradientRecord | NewWeight) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...], Any]:
    """Return (shape, index, values) as formulas print them: the last two axes of a matrix of weights change places."""
    matrix = one.name.endswith(".weight") and len(one.shape) >= 2
    if not matrix:
        return one.shape, one.values_index, one.values
    *first, rows, columns = one.shape
    *leading, row_index, column_index = one.values_index
    return (*first, columns, rows), (*leading, column_index, row_index), _transposed(one.values, len(first))


def _transposed(values: Any, depth: int) -> Any:
    if depth:
        return [_transposed(inner, depth - 1) for inner in values]
    return [list(column) for column in zip(*values, strict=True)]
