"""How far apart two activation functions are, in exact arithmetic and after rounding to a number format."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from ffncli.block.activations import ActivationRow
from ffncli.block.analysis.curve import Curve, bisect, curve, expectation, golden, shape
from ffncli.block.analysis.rounding import NumberFormat, inputs, shares

SHOWN = 10.0  # an unbounded difference is evaluated on [-10, 10] only
_SAME = 1e-9  # relative tolerance within which |difference| counts as equal at x and -x
_LAST_BITS = 4e-16
_GRID = tuple(SHOWN * i / 80 for i in range(-80, 81))
_FAR = tuple(SHOWN * 2.0**i for i in range(1, 20))


@dataclass(frozen=True)
class Difference:
    """|f - g|, where f is `name` and g is `against`.

    `maximum` is the least upper bound of |f - g| on the real line, or None if it is unbounded; `at` is the point where
    it is reached, or None if it is 0, unbounded, or only approached (then `towards` is ±inf). `symmetric` is True if it
    is also reached at -at. For an unbounded difference, `within` is the (x, |f - g|) with the largest |f - g| on
    [-SHOWN, SHOWN]. `mean` and `rms` are the mean and the root mean square of |f - g| for x ~ N(0, std²).
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
        """The points where |f - g| is largest; for an unbounded difference, within [-SHOWN, SHOWN]."""
        at = self.within[0] if self.within else self.at
        return () if at is None else (at, -at) if self.symmetric else (at,)

    def exceeds(self, tolerance: float) -> bool:
        """Return True if |f - g| exceeds the tolerance anywhere."""
        return self.maximum is None or self.maximum > tolerance


@cache
def difference(name: str, against: str, std: float = 1.0) -> Difference:
    """Return the difference of two activations, given by their canonical names."""
    if name == against:
        return Difference(name, against, 0.0, None, True, None, None, 0.0, 0.0)
    d = minus(curve(name), curve(against))
    s = shape(d)
    top, at = max((s.maximum, s.maximum_at), (-s.minimum, s.minimum_at), key=lambda bound: bound[0])
    mean = expectation(lambda x: abs(d.f(x)), std, (*d.kinks, *_crossings(d)))
    rms = math.sqrt(expectation(lambda x: d.f(x) ** 2, std, d.kinks))
    if abs(d.f(0.0)) >= top * (1.0 - _LAST_BITS):
        at = 0.0  # exactly 0, although the search returns a value close to 0
    if math.isinf(top):
        x, most = _within(d)
        return Difference(name, against, None, None, _mirrored(d, x), None, (x, most), mean, rms)
    if at is None:
        far = max((-(2.0**20), 2.0**20), key=lambda x: abs(d.f(x)))
        return Difference(name, against, top, None, False, math.copysign(math.inf, far), None, mean, rms)
    symmetric = _mirrored(d, at)
    return Difference(name, against, top, abs(at) if symmetric else at, symmetric, None, None, mean, rms)


def minus(f: Curve, g: Curve) -> Curve:
    """Return f - g as a curve; a kink that both share keeps the lower of the two orders."""
    kinks: dict[float, int] = {}
    for x, order in (*f.row.kinks, *g.row.kinks):
        kinks[x] = min(order, kinks.get(x, order))
    row = ActivationRow(
        f"{f.name} - {g.name}", "", lambda x, m: f.f(x) - g.f(x), lambda x, m: f.slope(x) - g.slope(x),
        kinks=tuple(sorted(kinks.items())),
    )  # fmt: skip
    return Curve(row, lambda x: f.f(x) - g.f(x), lambda x: f.slope(x) - g.slope(x))


def _mirrored(d: Curve, x: float) -> bool:
    """Return True if |f - g| is just as large at -x."""
    return x != 0 and math.isclose(abs(d.f(x)), abs(d.f(-x)), rel_tol=_SAME)


def _crossings(d: Curve) -> tuple[float, ...]:
    """Return the points where f - g changes sign, which are kinks of |f - g|."""
    xs = (*(-x for x in reversed(_FAR)), *_GRID, *_FAR)
    signed = [(x, y) for x in xs if (y := d.f(x)) != 0.0]
    return tuple(bisect(d.f, a, b) for (a, before), (b, after) in pairwise(signed) if before * after < 0)


def _within(d: Curve) -> tuple[float, float]:
    """Return the (x, |f - g|) with the largest |f - g| on [-SHOWN, SHOWN]."""

    def size(x: float) -> float:
        return abs(d.f(x))

    sizes = [size(x) for x in _GRID]
    peaks = (i for i in range(1, len(_GRID) - 1) if sizes[i] >= max(sizes[i - 1], sizes[i + 1]))
    places = [*_GRID, *(k for k in d.kinks if abs(k) < SHOWN)]
    places += [golden(size, _GRID[i - 1], _GRID[i + 1]) for i in peaks]
    x = max(places, key=lambda x: (size(x), x))
    return x, size(x)


@dataclass(frozen=True)
class Meeting:
    """Two activations at one x that the format can represent: their rounded values, and the distance in ulps."""

    x: float
    value: float
    reference: float
    ulps: int


@dataclass(frozen=True)
class Survival:
    """f and g at `inputs` values of a format, computed exactly and rounded once to the format.

    For x ~ N(0, std²) rounded to the format, `differ` is the probability that the two rounded values differ, and
    `beyond_neighbours` the probability that they are more than one step of the format apart. `largest` describes the x
    where they are the most steps apart (None if they never differ), `at_difference` the points where |f - g| is largest
    (see `Difference.places`). `noise` is the rms of g's rounding error for the same x; `ratio` is the rms of f - g
    divided by `noise`, None if rounding leaves g unchanged.
    """

    dtype: str
    inputs: int
    differ: float
    beyond_neighbours: float
    largest: Meeting | None
    at_difference: tuple[Meeting, ...]
    noise: float
    ratio: float | None

    @property
    def verdict(self) -> str:
        """Whether the difference survives rounding: "no" if no value differs; "in part" if values differ, but the
        difference is smaller than the rounding error; else "yes"."""
        if self.largest is None:
            return "no"
        return "yes" if self.ratio is None or self.ratio >= 1 else "in part"


@dataclass(frozen=True)
class RoundedDifference:
    """The difference of one activation from another, and how much of it survives in each format."""

    difference: Difference
    rounded: tuple[Survival, ...]


def rounded_differences(
    names: Sequence[str], against: str, forms: Sequence[NumberFormat] = (), std: float = 1.0
) -> tuple[RoundedDifference, ...]:
    """Return how far `names` are from `against`, for x ~ N(0, std²), exactly and in each format."""
    differences = [difference(name, against, std) for name in names]
    return tuple(RoundedDifference(d, tuple(survival(d, form, std) for form in forms)) for d in differences)


def survival(d: Difference, form: NumberFormat, std: float = 1.0) -> Survival:
    """Compute how much of a difference survives rounding to a format."""
    xs, mass = inputs(form, std), shares(form, std)
    ours, theirs = _ordinals(d.name, form, std), _ordinals(d.against, form, std)
    steps = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    most = max(steps)
    worst = min((x for x, n in zip(xs, steps, strict=True) if n == most), key=abs)
    noise = _noise(d.against, form, std)
    return Survival(
        form.name, len(xs),
        math.fsum(p for n, p in zip(steps, mass, strict=True) if n),
        math.fsum(p for n, p in zip(steps, mass, strict=True) if n > 1),
        _meeting(d, form, worst) if most else None,
        tuple(_meeting(d, form, x) for x in d.places), noise, d.rms / noise if noise else None,
    )  # fmt: skip


@cache
def _exact(name: str, form: NumberFormat, std: float) -> list[float]:
    """Return f(x) for each of the format's inputs."""
    return list(map(curve(name).f, inputs(form, std)))


@cache
def _ordinals(name: str, form: NumberFormat, std: float) -> list[int]:
    """Return the ordinal (see `NumberFormat.ordinal`) of f(x), rounded once, for each input x of the format."""
    return list(map(form.ordinal, _exact(name, form, std)))


@cache
def _noise(name: str, form: NumberFormat, std: float) -> float:
    """Return the rms of the rounding error of f(x), ignoring overflows."""
    pairs = zip(_exact(name, form, std), shares(form, std), strict=True)
    errors = ((form.nearest(y) - y, p) for y, p in pairs if p)
    return math.sqrt(math.fsum(p * error * error for error, p in errors if math.isfinite(error)))


def _meeting(d: Difference, form: NumberFormat, x: float) -> Meeting:
    x = form.nearest(x)
    a, b = form.ordinal(curve(d.name).f(x)), form.ordinal(curve(d.against).f(x))
    return Meeting(x, form.value(a), form.value(b), abs(a - b))
