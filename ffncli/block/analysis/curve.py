"""A row of the table of activations as a function of one Python float."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ffncli.block.activations import TABLE, ActivationRow
from ffncli.block.scalar import SCALAR, with_learned


@dataclass(frozen=True)
class Curve:
    """f and its slope on floats, what is learned at its initial value, and the kinks in order (see `ActivationRow`)."""

    row: ActivationRow
    f: Callable[[float], float]
    slope: Callable[[float], float]

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.row.name

    @property
    def kinks(self) -> tuple[float, ...]:
        """Where a derivative of any order jumps."""
        return tuple(x for x, _ in self.row.kinks)


def curve(name: str) -> Curve:
    """The curve of a canonical name (a key of `activations.TABLE`)."""
    row = TABLE[name]
    m = with_learned(SCALAR, row.learned) if row.learned else SCALAR
    f = row.accurate
    return Curve(row, lambda x: f(x, m), lambda x: row.slope(x, m))
