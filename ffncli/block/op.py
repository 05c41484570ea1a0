"""The base of every op, and axes: dimensions with a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError

Shape: TypeAlias = tuple[int, ...]
Symbols: TypeAlias = Callable[[str], str]  # parameter name ("weight") → how a formula prints it ("W1")


@dataclass(frozen=True)
class Axis:
    """A dimension with a name, so that 'split every d_ff' means something: d_model, d_ff, experts, vocab."""

    name: str
    size: int


ONE = Axis("one", 1)


class Op:
    """The base of all nine. By default `parameters` is empty and shapes pass through."""

    @property
    def name(self) -> str:
        """In one word, as records have it: `linear`, `activation`, `allreduce`."""
        return type(self).__name__.lower()

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """Parameter name → its axes, in torch's order (`weight` of a Linear: out, in)."""
        return {}

    def tables(self) -> dict[str, tuple[Axis, ...]]:
        """Table of integers → its axes. A checkpoint stores them, training does not change them: not parameters."""
        return {}

    def shape(self, *inputs: Shape) -> Shape:
        """The output's shape. Leading axes are tokens (or batch, position); the last one is the feature axis."""
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """The right-hand side as it prints."""
        raise AssertionError(f"{type(self).__name__} prints no formula")

    def into_axis(self) -> Axis | None:
        """The feature axis that the op requires of its first input; None if any axis will do."""
        return None


def require_axis(axis: Axis, shape: Shape, op: str) -> None:
    """Raises FFNError unless the last axis of a shape is this one."""
    if not shape or shape[-1] != axis.size:
        raise FFNError(f"{op} expects {axis.name} = {axis.size} values per token, got shape {list(shape)}")
