"""How far two activation functions are apart, in exact arithmetic: the maximum, and the mean for a normal input."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

from ffncli.block.activations import ActivationRow
from ffncli.block.analysis.curve import Curve, curve
from ffncli.block.analysis.quadrature import expectation
from ffncli.block.analysis.shape import bisect, golden, shape
from ffncli.dataclass import dataclass

SHOWN = 10.0  # an unbounded difference is evaluated on [-10, 10]
_SAME = 1e-9  # relative: |difference| at x and at -x
_LAST_BITS = 4e-16
_GRID = tuple(SHOWN * i / 80 for i in range(-80, 81))
_FAR = tuple(SHOWN * 2.0**i for i in range(1, 20))


@dataclass(frozen=True)
class Difference:
    """|f - g| of `name` and `against`.

    `maximum` is its least upper bound on the real line, None if there is none; `at` is where it is reached, None
    where it is only approached (`towards`: ±inf), is 0 or does not exist. `symmetric`: it is reached at -at too.
    `within` is (x, |f - g|) where an unbounded difference is largest on [-SHOWN, SHOWN]. `mean` and `rms` are of |f -
    g| for x ~ N(0, std²).
    """

    name: str
    against: str
    maximum: float | None
    at: float | None
    symmetric: bool
    towards: float | None
    within: tuple[float, float] | None
    mean: float
    rms: float

    @property
    def places(self) -> tuple[float, ...]:
        """Where it is largest; for an unbounded one, in the range that is shown."""
        at = self.within[0] if self.within else self.at
        return () if at is None else (at, -at) if self.symmetric else (at,)

    def exceeds(self, tolerance: float) -> bool:
        """Whether it exceeds the tolerance anywhere."""
        return self.maximum is None or self.maximum > tolerance


@cache
def difference(name: str, against: str, std: float = 1.0) -> Difference:
    """The difference of two activations by their canonical names."""
    if name == against:
        return Difference(name, against, 0.0, None, True, None, None, 0.0, 0.0)
    d = minus(curve(name), curve(against))
    s = shape(d)
    top, at = max((s.maximum, s.maximum_at), (-s.minimum, s.minimum_at), key=lambda bound: bound[0])
    mean = expectation(lambda x: abs(d.f(x)), std, (*d.kinks, *_crossings(d)))
    rms = math.sqrt(expectation(lambda x: d.f(x) ** 2, std, d.kinks))
    if abs(d.f(0.0)) >= top * (1.0 - _LAST_BITS):
        at = 0.0  # the exact location, not one that rounding produced
    if math.isinf(top):
        x, most = _within(d)
        return Difference(name, against, None, None, _mirrored(d, x), None, (x, most), mean, rms)
    if at is None:
        far = max((-(2.0**20), 2.0**20), key=lambda x: abs(d.f(x)))
        return Difference(name, against, top, None, False, math.copysign(math.inf, far), None, mean, rms)
    symmetric = _mirrored(d, at)
    return Difference(name, against, top, abs(at) if symmetric else at, symmetric, None, None, mean, rms)


def minus(f: Curve, g: Curve) -> Curve:
    """f - g as a curve; a kink of both has the lower of the two orders."""
    kinks: dict[float, int] = {}
    for x, order in (*f.row.kinks, *g.row.kinks):
        kinks[x] = min(order, kinks.get(x, order))
    row = ActivationRow(
        f"{f.name} - {g.name}", "", lambda x, m: f.f(x) - g.f(x), lambda x, m: f.slope(x) - g.slope(x),
        kinks=tuple(sorted(kinks.items())),
    )  # fmt: skip
    return Curve(row, lambda x: f.f(x) - g.f(x), lambda x: f.slope(x) - g.slope(x))


def _mirrored(d: Curve, x: float) -> bool:
    """Whether |f - g| is as large at -x."""
    return x != 0 and math.isclose(abs(d.f(x)), abs(d.f(-x)), rel_tol=_SAME)


def _crossings(d: Curve) -> tuple[float, ...]:
    """Where f - g changes its sign: |f - g| has a kink there."""
    xs = (*(-x for x in reversed(_FAR)), *_GRID, *_FAR)
    signed = [(x, y) for x in xs if (y := d.f(x)) != 0.0]
    return tuple(bisect(d.f, a, b) for (a, before), (b, after) in pairwise(signed) if before * after < 0)


def _within(d: Curve) -> tuple[float, float]:
    """(x, |f - g|) where it is largest on [-SHOWN, SHOWN]."""

    def size(x: float) -> float:
        return abs(d.f(x))

    sizes = [size(x) for x in _GRID]
    peaks = (i for i in range(1, len(_GRID) - 1) if sizes[i] >= max(sizes[i - 1], sizes[i + 1]))
    places = [*_GRID, *(k for k in d.kinks if abs(k) < SHOWN)]
    places += [golden(size, _GRID[i - 1], _GRID[i + 1]) for i in peaks]
    x = max(places, key=lambda x: (size(x), x))
    return x, size(x)
