"""An activation of one Python float: its curve, extremes and zeros, and integrals over a normally distributed x."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ffncli.block.activations import TABLE, ActivationRow
from ffncli.block.formulas import SCALAR, with_learned
from ffncli.block.value import NEAR_ZERO


@dataclass(frozen=True)
class Curve:
    """f and its slope on floats, with initial learned parameters, and the sorted kinks (`ActivationRow`)."""

    row: ActivationRow
    f: Callable[[float], float]
    slope: Callable[[float], float]

    @property
    def name(self) -> str:
        """The canonical name."""
        return self.row.name

    @property
    def kinks(self) -> tuple[float, ...]:
        """The points where a derivative of any order jumps."""
        return tuple(x for x, _ in self.row.kinks)


def curve(name: str) -> Curve:
    """Return the curve of a canonical name (a key of `activations.TABLE`)."""
    row = TABLE[name]
    m = with_learned(SCALAR, row.learned) if row.learned else SCALAR
    f = row.accurate
    return Curve(row, lambda x: f(x, m), lambda x: row.accurate_slope(x, m))


def samples(c: Curve, low: float, high: float, slope: bool = False, steps: int = 240) -> list[tuple[float, float]]:
    """Return points (x, f(x)), or (x, slope), of a line from `low` to `high` in `steps` equal steps; every kink is an
    additional point.

    At a jump the line has a point on either side, and NaN between them.
    """
    f, least = (c.slope, 1) if slope else (c.f, 0)  # only kinks up to this order are jumps
    kinks = {x: order for x, order in reversed(c.row.kinks) if low < x < high}
    even = (low + (high / steps - low / steps) * i for i in range(steps))
    return [point for x in sorted({*even, high, *kinks}) for point in _around(x, f, kinks.get(x, least + 1) <= least)]


def _around(x: float, f: Callable[[float], float], jump: bool) -> Iterator[tuple[float, float]]:
    if jump:
        before, after = math.nextafter(x, -math.inf), math.nextafter(x, math.inf)
        yield from ((before, f(before)), (x, math.nan), (after, f(after)))
    else:
        yield x, f(x)


_GRID = tuple(i / 8 for i in range(-160, 161))  # -20 ... 20: outside, every activation follows its asymptote
_FAR, _FARTHER = 2.0**20, 2.0**40
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True)
class Shape:
    """The extremes of a curve; a missing bound is ±inf.

    `minimum` is the greatest lower bound. `minimum_at` is the point where it is reached (if there are several, the
    point nearest to zero), or None if the bound is only approached. `maximum` likewise. `lipschitz` is the least L with
    |f(a) - f(b)| ≤ L |a - b|; `steepest_at` is the only point where the slope has that size, or None if there is no
    such point or a whole interval of them.
    """

    minimum: float
    minimum_at: float | None
    maximum: float
    maximum_at: float | None
    lipschitz: float
    steepest_at: float | None
    monotone: bool


def shape(c: Curve) -> Shape:
    """Compute the shape of a curve from a few hundred evaluations of f and of its slope."""
    xs = _grid(c)
    slopes = [c.slope(x) for x in xs]
    stationary = [*c.kinks, *_turns(c, xs, slopes)]
    low, low_at = _bound(c, stationary, -1.0)
    high, high_at = _bound(c, stationary, 1.0)
    monotone = min(slopes) >= 0.0 or max(slopes) <= 0.0
    return Shape(low, low_at, high, high_at, *_steepest(c, xs, [abs(slope) for slope in slopes]), monotone)


def near_zero_share(c: Curve, std: float = 1.0, bound: float = NEAR_ZERO) -> float:
    """Return P(|f(X)| ≤ bound) for X ~ N(0, std²)."""

    def beyond(x: float) -> float:
        return abs(c.f(x)) - bound

    xs = [-_FAR, *_grid(c), _FAR]
    values = [c.f(x) for x in xs]
    marks = []  # (x, whether |f(x)| > bound); every zero of f is among the x
    for (a, at_a), (b, at_b) in pairwise(zip(xs, values, strict=True)):
        marks.append((a, abs(at_a) > bound))
        if at_a * at_b < 0:
            marks.append((bisect(c.f, a, b), False))
    marks.append((xs[-1], abs(values[-1]) > bound))
    edges = [bisect(beyond, a, b) for (a, above), (b, after) in pairwise(marks) if above != after]
    ends = [-math.inf, *edges, math.inf]
    # |f| crosses the bound at every edge, so |f| ≤ bound in every second interval; marks[0] decides which
    quiet = [(a, b) for i, (a, b) in enumerate(pairwise(ends)) if (i % 2 == 1) == marks[0][1]]
    return math.fsum(normal_share(a, b, std) for a, b in quiet)


def exact_zero_share(c: Curve, std: float = 1.0) -> float:
    """Return P(f(X) = 0) for X ~ N(0, std²), exactly: the share of the intervals on which f is zero."""
    ends = [-math.inf, *c.kinks, math.inf]
    flat = ((a, b) for a, b in pairwise(ends) if all(c.f(x) == 0.0 for x in _some(a, b)))
    return math.fsum(normal_share(a, b, std) for a, b in flat)


# --- the search -------------------------------------------------------------------------------------------------------


def _grid(c: Curve) -> list[float]:
    """Return the grid with every kink and its two neighbouring floats added."""
    return sorted({*_GRID, *(side for k in c.kinks for side in _sides(k))})


def _sides(kink: float) -> tuple[float, float, float]:
    return math.nextafter(kink, -math.inf), kink, math.nextafter(kink, math.inf)


def _turns(c: Curve, xs: list[float], slopes: list[float]) -> list[float]:
    """Return the points where the slope changes sign, kinks excluded."""
    out = []
    signed = [(x, slope) for x, slope in zip(xs, slopes, strict=True) if slope != 0.0]
    for (a, before), (b, after) in pairwise(signed):
        if before * after < 0 and not any(a < k < b for k in c.kinks):
            out.append(bisect(c.slope, a, b))
    return out


def _bound(c: Curve, stationary: list[float], sign: float) -> tuple[float, float | None]:
    """Return (the least upper bound of sign · f, times `sign`; the point where it is reached, or None)."""
    limits = [sign * c.f(x) for x in (-_FAR, _FAR)]
    # Bounded functions have reached their asymptote at _FAR; a function that still doubles up to _FARTHER is unbounded.
    if any(sign * c.f(x) > 2.0 * abs(near) + 1.0 for x, near in zip((-_FARTHER, _FARTHER), limits, strict=True)):
        return sign * math.inf, None
    reached = max(((sign * c.f(x), -abs(x), x) for x in stationary), default=(-math.inf, 0.0, 0.0))
    best = max(reached[0], *limits)
    return sign * best, reached[2] if reached[0] == best else None


def _steepest(c: Curve, xs: list[float], sizes: list[float]) -> tuple[float, float | None]:
    """Return (the Lipschitz constant, the only point where the slope is that steep, or None); `sizes` are the absolute
    slopes at `xs`."""
    far = max(abs(c.slope(x)) for x in (-_FAR, _FAR))
    if max(abs(c.slope(x)) for x in (-_FARTHER, _FARTHER)) > 2.0 * far + 1.0:
        return math.inf, None
    best = max(*sizes, far)
    places = [x for x, size in zip(xs, sizes, strict=True) if size == best]
    kinks = [k for k in c.kinks if set(places) <= set(_sides(k))]
    if far == best or (len(places) > 1 and not kinks):
        return best, None  # only approached far out, or reached on an interval
    if kinks:
        return best, kinks[0]
    at = xs.index(places[0])
    x = golden(lambda x: abs(c.slope(x)), xs[at - 1], xs[at + 1])
    return (abs(c.slope(x)), x) if abs(c.slope(x)) > best else (best, places[0])


def bisect(g: Callable[[float], float], low: float, high: float) -> float:
    """Return a zero of g between two points of opposite sign, to the last bit."""
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
    """Return the point of g's only maximum between low and high, to the square root of float64's precision."""
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
    """Return a few points inside an interval."""
    low, high = max(low, -20.0), min(high, 20.0)
    return tuple(low + share * (high - low) for share in (0.05, 0.3, 0.5, 0.7, 0.95))


_NODES = 16
_REACH = 10.0  # standard deviations: 1.5e-23 of the mass lies beyond
_PANELS = (0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)  # ends of panels, in units of 1 and of std


def expectation(g: Callable[[float], float], std: float = 1.0, breaks: tuple[float, ...] = ()) -> float:
    """Return E[g(X)] for X ~ N(0, std²); `breaks` are the points where g or one of its derivatives jumps.

    g may grow as fast as a polynomial. std must be between 1e-6 and 1e6 (see `facts`).
    """
    return math.fsum(weight * g(x) for x, weight in nodes(std, breaks))


@cache
def nodes(std: float = 1.0, breaks: tuple[float, ...] = ()) -> tuple[tuple[float, float], ...]:
    """Return (x, weight) pairs whose weights sum to 1: the weighted sum of g(x) is the expectation of g."""
    reach = _REACH * std
    # Activations bend on the scale 1 and the density on the scale std: the panels must be fine on both.
    ends = {s * scale * end for end in _PANELS for scale in _scales(std) for s in (-1, 1)} | {0.0, *breaks}
    inside = [-reach, *sorted(end for end in ends if -reach < end < reach), reach]
    density = 1.0 / (std * math.sqrt(2.0 * math.pi))
    out = []
    for low, high in pairwise(inside):
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        for node, weight in _legendre():
            x = middle + half * node
            out.append((x, half * weight * density * math.exp(-0.5 * (x / std) ** 2)))
    return tuple(out)


def _scales(std: float) -> tuple[float, ...]:
    """Return 1, std, and intermediate scales close enough that no panel is much wider than its distance from 0."""
    between = int(abs(math.log(std, 8)))
    return (1.0, *(std ** (i / (between + 1)) for i in range(1, between + 1)), std)


def normal_share(low: float, high: float, std: float = 1.0) -> float:
    """Return P(low < X ≤ high) for X ~ N(0, std²), without cancellation in either tail."""
    if low > 0:  # mirrored: above 0 both shares are near 1, and their difference cancels
        low, high = -high, -low
    below_low, below_high = (0.5 * math.erfc(-x / (std * math.sqrt(2.0))) for x in (low, high))
    return below_high - below_low


@cache
def _legendre() -> tuple[tuple[float, float], ...]:
    """Return nodes and weights of the Gauss-Legendre rule on [-1, 1], by Newton's method on the Legendre polynomial.

    Start values and weights: Abramowitz & Stegun 22.16.6, 25.4.29.
    """
    out = []
    for i in range(_NODES):
        x = math.cos(math.pi * (i + 0.75) / (_NODES + 0.5))
        for _ in range(8):
            before, value = 1.0, x
            for n in range(2, _NODES + 1):
                before, value = value, ((2 * n - 1) * x * value - (n - 1) * before) / n
            slope = _NODES * (x * value - before) / (x * x - 1.0)
            x -= value / slope
        out.append((x, 2.0 / ((1.0 - x * x) * slope * slope)))
    return tuple(out)
