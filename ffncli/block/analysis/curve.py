"""A row of the table of activations as a function of one Python float."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from ffncli.block.activations import TABLE, ActivationRow
from ffncli.block.scalar import SCALAR, with_learned
from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class Curve:
    """f and its slope on floats, learned parameters at their initial values, and the sorted kinks (`ActivationRow`)."""

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


def samples(c: Curve, low: float, high: float, slope: bool = False, steps: int = 240) -> list[tuple[float, float]]:
    """(x, f(x)) or (x, slope) from `low` to `high`, `steps` apart, as points of a line with every kink exactly.

    At a jump it has the points on both sides, and NaN between them.
    """
    f, least = (c.slope, 1) if slope else (c.f, 0)  # a kink of a higher order is not a jump
    kinks = {x: order for x, order in reversed(c.row.kinks) if low < x < high}
    even = (low + (high / steps - low / steps) * i for i in range(steps))
    return [point for x in sorted({*even, high, *kinks}) for point in _around(x, f, kinks.get(x, least + 1) <= least)]


def _around(x: float, f: Callable[[float], float], jump: bool) -> Iterator[tuple[float, float]]:
    if jump:
        before, after = math.nextafter(x, -math.inf), math.nextafter(x, math.inf)
        yield from ((before, f(before)), (x, math.nan), (after, f(after)))
    else:
        yield x, f(x)
