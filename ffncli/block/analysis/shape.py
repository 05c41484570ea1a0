"""The shape of a curve: its range, where it is lowest, how steep it is, whether it is monotone, where it is zero.

All computed by search on a grid fine enough for every activation in use, then by bisection or golden section to
float64's limit; kinks are evaluated from both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

from ffncli.block.analysis.curve import Curve
from ffncli.block.analysis.quadrature import normal_share
from ffncli.block.units import NEAR_ZERO
from ffncli.dataclass import dataclass

_GRID = tuple(i / 8 for i in range(-160, 161))  # -20 ... 20: outside, every activation equals its asymptote
_FAR, _FARTHER = 2.0**20, 2.0**40
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class Shape:
    """A missing bound is ±inf.

    `minimum` is the greatest lower bound, `minimum_at` where it is reached, nearest to zero if at several places; None
    where it is only approached; `maximum` likewise. `lipschitz` is the least L with |f(a) - f(b)| ≤ L |a - b|,
    `steepest_at` the only place where the slope has that size, None if there is none or a whole interval.
    """

    minimum: float
    minimum_at: float | None
    maximum: float
    maximum_at: float | None
    lipschitz: float
    steepest_at: float | None
    monotone: bool


def shape(c: Curve) -> Shape:
    """The shape of a curve, from some hundred evaluations of f and of its slope."""
    xs = _grid(c)
    slopes = [c.slope(x) for x in xs]
    stationary = [*c.kinks, *_turns(c, xs, slopes)]
    low, low_at = _bound(c, stationary, -1.0)
    high, high_at = _bound(c, stationary, 1.0)
    monotone = min(slopes) >= 0.0 or max(slopes) <= 0.0
    return Shape(low, low_at, high, high_at, *_steepest(c, xs, [abs(slope) for slope in slopes]), monotone)


def near_zero_share(c: Curve, std: float = 1.0, bound: float = NEAR_ZERO) -> float:
    """P(|f(X)| ≤ bound) for X ~ N(0, std²)."""

    def beyond(x: float) -> float:
        return abs(c.f(x)) - bound

    xs = [-_FAR, *_grid(c), _FAR]
    values = [c.f(x) for x in xs]
    marks = []  # (x, whether |f| is above the bound), including every zero of f
    for (a, at_a), (b, at_b) in pairwise(zip(xs, values, strict=True)):
        marks.append((a, abs(at_a) > bound))
        if at_a * at_b < 0:
            marks.append((bisect(c.f, a, b), False))
    marks.append((xs[-1], abs(values[-1]) > bound))
    edges = [bisect(beyond, a, b) for (a, above), (b, after) in pairwise(marks) if above != after]
    ends = [-math.inf, *edges, math.inf]
    quiet = [(a, b) for i, (a, b) in enumerate(pairwise(ends)) if (i % 2 == 1) == marks[0][1]]
    return math.fsum(normal_share(a, b, std) for a, b in quiet)


def exact_zero_share(c: Curve, std: float = 1.0) -> float:
    """P(f(X) = 0) for X ~ N(0, std²), in exact arithmetic: intervals between kinks on which f is zero."""
    ends = [-math.inf, *c.kinks, math.inf]
    flat = ((a, b) for a, b in pairwise(ends) if all(c.f(x) == 0.0 for x in _some(a, b)))
    return math.fsum(normal_share(a, b, std) for a, b in flat)


# --- the search -------------------------------------------------------------------------------------------------------


def _grid(c: Curve) -> list[float]:
    """The grid, with both sides of every kink and the kink itself."""
    return sorted({*_GRID, *(side for k in c.kinks for side in _sides(k))})


def _sides(kink: float) -> tuple[float, float, float]:
    return math.nextafter(kink, -math.inf), kink, math.nextafter(kink, math.inf)


def _turns(c: Curve, xs: list[float], slopes: list[float]) -> list[float]:
    """Where the slope changes its sign, not at a kink."""
    out = []
    signed = [(x, slope) for x, slope in zip(xs, slopes, strict=True) if slope != 0.0]
    for (a, before), (b, after) in pairwise(signed):
        if before * after < 0 and not any(a < k < b for k in c.kinks):
            out.append(bisect(c.slope, a, b))
    return out


def _bound(c: Curve, stationary: list[float], sign: float) -> tuple[float, float | None]:
    """(the least upper bound of sign · f, with f's own sign; where it is reached)."""
    limits = [sign * c.f(x) for x in (-_FAR, _FAR)]
    if any(sign * c.f(x) > 2.0 * abs(near) + 1.0 for x, near in zip((-_FARTHER, _FARTHER), limits, strict=True)):
        return sign * math.inf, None
    reached = max(((sign * c.f(x), -abs(x), x) for x in stationary), default=(-math.inf, 0.0, 0.0))
    best = max(reached[0], *limits)
    return sign * best, reached[2] if reached[0] == best else None


def _steepest(c: Curve, xs: list[float], sizes: list[float]) -> tuple[float, float | None]:
    """(the Lipschitz constant, the one place where the slope is as steep), from the sizes of the slope at xs."""
    far = max(abs(c.slope(x)) for x in (-_FAR, _FAR))
    if max(abs(c.slope(x)) for x in (-_FARTHER, _FARTHER)) > 2.0 * far + 1.0:
        return math.inf, None
    best = max(*sizes, far)
    places = [x for x, size in zip(xs, sizes, strict=True) if size == best]
    kinks = [k for k in c.kinks if set(places) <= set(_sides(k))]
    if far == best or (len(places) > 1 and not kinks):
        return best, None  # approached far out, or the same on an interval
    if kinks:
        return best, kinks[0]
    at = xs.index(places[0])
    x = golden(lambda x: abs(c.slope(x)), xs[at - 1], xs[at + 1])
    return (abs(c.slope(x)), x) if abs(c.slope(x)) > best else (best, places[0])


def bisect(g: Callable[[float], float], low: float, high: float) -> float:
    """A zero of g between two points of opposite sign, to the last bit."""
    rising = g(high) > 0
    for _ in range(200):
        middle = 0.5 * (low + high)
        if middle in (low, high):
            break
        if (g(middle) > 0) == rising:
            high = middle
        else:
            low = middle
    return min(low, high, key=lambda x: abs(g(x)))


def golden(g: Callable[[float], float], low: float, high: float) -> float:
    """The location of g's only maximum between low and high, to the square root of float64's precision."""
    a, b = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
    at_a, at_b = g(a), g(b)
    for _ in range(80):
        if at_a >= at_b:
            high, b, at_b = b, a, at_a
            a = high - _GOLDEN * (high - low)
            at_a = g(a)
        else:
            low, a, at_a = a, b, at_b
            b = low + _GOLDEN * (high - low)
            at_b = g(b)
    return 0.5 * (low + high)


def _some(low: float, high: float) -> tuple[float, ...]:
    """A few numbers inside an interval."""
    low, high = max(low, -20.0), min(high, 20.0)
    return tuple(low + share * (high - low) for share in (0.05, 0.3, 0.5, 0.7, 0.95))
