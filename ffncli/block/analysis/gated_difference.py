"""How far two gated units are apart: where they are the same function, and the difference for normal inputs."""

from __future__ import annotations

import math
from collections.abc import Callable

from ffncli.block.analysis.curve import Curve
from ffncli.block.analysis.gated import UNITS, factor
from ffncli.block.analysis.quadrature import expectation
from ffncli.block.analysis.shape import bisect
from ffncli.dataclass import dataclass

_OUTWARD = tuple(i / 8 for i in range(1, 321)) + tuple(40.0 * 2.0**i for i in range(1, 20))
_NARROWEST = 1e-3  # two functions that part before this are nowhere the same
_SAME = 1e-12
Interval = tuple[float, float]


@dataclass(frozen=True)
class GatedDifference:
    """y - z of the units `name` and `against`.

    They are the same for every gate in `same_gate` together with every up in `same_up`; ±inf where they never part,
    None where they part at once. `rms` is √E[(y - z)²] for gate, up ~ N(0, std²), independent; `relative_rms` divides
    it by √E[z²].
    """

    name: str
    against: str
    same_gate: Interval | None
    same_up: Interval | None
    rms: float
    relative_rms: float


def gated_difference(name: str, against: str, std: float = 1.0) -> GatedDifference:
    """The difference of two units by their names."""
    one, other = UNITS[name], UNITS[against]
    a, b, a0, b0 = factor(one.gate), factor(one.up), factor(other.gate), factor(other.up)
    kinks = sorted({k for curve in (a, b, a0, b0) for x in curve.kinks for k in (x, -x)})

    def mean(f: Callable[[float], float]) -> float:
        return expectation(f, std, tuple(kinks))

    # ab - a0·b0 = (a - a0)·b + a0·(b - b0): nothing cancels where the units are nearly the same
    square = (
        mean(lambda x: (a.f(x) - a0.f(x)) ** 2) * mean(lambda x: b.f(x) ** 2)
        + 2 * mean(lambda x: (a.f(x) - a0.f(x)) * a0.f(x)) * mean(lambda x: b.f(x) * (b.f(x) - b0.f(x)))
        + mean(lambda x: a0.f(x) ** 2) * mean(lambda x: (b.f(x) - b0.f(x)) ** 2)
    )
    size = math.sqrt(mean(lambda x: a0.f(x) ** 2) * mean(lambda x: b0.f(x) ** 2))
    gate, up = _same(a, a0), _same(b, b0)
    if gate is None or up is None:
        gate = up = None
    rms = math.sqrt(max(0.0, square))
    return GatedDifference(name, against, gate, up, rms, rms / size)


def _same(f: Curve, g: Curve) -> Interval | None:
    """The interval around 0 in which f and g are the same; None if they part at once."""

    def apart(x: float) -> float:
        return abs(f.f(x) - g.f(x)) - _SAME * abs(g.f(x))

    ends = []
    for sign in (-1.0, 1.0):
        inside, end = 0.0, sign * math.inf
        for x in (sign * x for x in _OUTWARD):
            if apart(x) > 0:
                end = bisect(apart, inside, x)
                break
            inside = x
        ends.append(end)
    low, high = ends
    return None if max(-low, high) < _NARROWEST else (low, high)
