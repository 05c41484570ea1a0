"""Whether the difference of two activation functions survives rounding their values to a number format."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

from ffncli.block.analysis.curve import curve
from ffncli.block.analysis.difference import Difference, difference
from ffncli.block.analysis.formats import NumberFormat, inputs, shares
from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class Meeting:
    """Two activations at one number x of a format: their rounded values, and how many steps apart they are."""

    x: float
    value: float
    reference: float
    ulps: int


@dataclass(frozen=True)
class Survival:
    """f and g, computed exactly from each of `inputs` numbers of a format and rounded to it once.

    `differ` is the probability, for x ~ N(0, std²) rounded to the format, that the two values are not the same number,
    `beyond_neighbours` that they are more than one step apart. `largest` is where most steps separate them, None if
    they never differ; `at_difference` their values where |f - g| is largest (see `Difference.places`). `noise` is the
    rms of g's rounding error, for the same x; `ratio` the rms of f - g over it, None where rounding leaves g unchanged.
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
        """Does the difference survive? no: nowhere; in part: some numbers differ, but by less than rounding; or yes."""
        if self.largest is None:
            return "no"
        return "yes" if self.ratio is None or self.ratio >= 1 else "in part"


@dataclass(frozen=True)
class RoundedDifference:
    """One activation's difference from another, and how much of it survives in each format."""

    difference: Difference
    rounded: tuple[Survival, ...]


def rounded_differences(
    names: Sequence[str], against: str, forms: Sequence[NumberFormat] = (), std: float = 1.0
) -> tuple[RoundedDifference, ...]:
    """How far each of `names` (canonical) is from `against`, for x ~ N(0, std²), and in each of the formats."""
    differences = [difference(name, against, std) for name in names]
    return tuple(RoundedDifference(d, tuple(survival(d, form, std) for form in forms)) for d in differences)


def survival(d: Difference, form: NumberFormat, std: float = 1.0) -> Survival:
    """How much of a difference survives in a format."""
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
    """f of each input."""
    return list(map(curve(name).f, inputs(form, std)))


@cache
def _ordinals(name: str, form: NumberFormat, std: float) -> list[int]:
    """f of each input, rounded once."""
    return list(map(form.ordinal, _exact(name, form, std)))


@cache
def _noise(name: str, form: NumberFormat, std: float) -> float:
    """The rms of the rounding error of f(x), without overflows."""
    pairs = zip(_exact(name, form, std), shares(form, std), strict=True)
    errors = ((form.nearest(y) - y, p) for y, p in pairs if p)
    return math.sqrt(math.fsum(p * error * error for error, p in errors if math.isfinite(error)))


def _meeting(d: Difference, form: NumberFormat, x: float) -> Meeting:
    x = form.nearest(x)
    a, b = form.ordinal(curve(d.name).f(x)), form.ordinal(curve(d.against).f(x))
    return Meeting(x, form.value(a), form.value(b), abs(a - b))
