"""Plot: curves over one axis, not yet rendered; and axes, which map values to positions and choose round labels."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from itertools import pairwise


@dataclass(frozen=True)
class Series:
    """One curve: its name in the legend and its points (x, y), from left to right; a non-finite point interrupts it.

    `intervals` contains, for each point, the range in which the point's y may lie; it is empty if the ranges are
    unknown. Ranges are drawn only in files. A `level` is a guide, not measured: dashed, without marks.
    """

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()
    level: bool = False


@dataclass(frozen=True)
class Plot:
    """Curves in one frame. `x` and `y` name the axes.

    With `marks`, the points are measurements: each point gets a mark, and the lines between the points only guide the
    eye. A log axis shows only values above 0. `frame` is the range of the y-axis, or None for the range of the points;
    curves outside of this range are cut off.
    """

    title: str
    x: str
    y: str
    lines: Sequence[Series]
    log_x: bool = False
    log_y: bool = False
    marks: bool = False
    frame: tuple[float, float] | None = None


@dataclass(frozen=True)
class IntervalRow:
    """A value with the ends of its interval; an unknown end is None."""

    name: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class IntervalPlot:
    """Rows of intervals over one log axis `x`, with a line at 1; drawn only in files."""

    title: str
    x: str
    rows: Sequence[IntervalRow]


@dataclass(frozen=True)
class MapPlot:
    """A heat map: a row of cells for each of `names`, coloured from `-limit` to `limit`; drawn only in files."""

    title: str
    x: str
    y: str
    names: Sequence[str]
    cells: Sequence[Sequence[float]]
    limit: float


AnyPlot = Plot | IntervalPlot | MapPlot


def letter(curve: int) -> str:
    """Return the letter of a curve in its frame."""
    return "abcdefghijklmnopqrstuvwxyz"[curve % 26]


Tick = tuple[float, str]  # (position as a fraction of the axis, label)
_HIGHEST = 308.25  # log10 of the largest float
_FLAT = 1e-12  # a range this small relative to its values leaves no digits for labels


@dataclass(frozen=True)
class PlotAxis:
    """An axis from `low` to `high`, with `low` < `high`. On a log axis, both are the log10 of the values."""

    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Return a value's position from 0 (low end) to 1, or NaN if the axis cannot show the value, such as -1 on a
        log axis."""
        if self.log:
            value = math.log10(value) if value > 0 else math.nan
        return self._share(value) if math.isfinite(value) else math.nan

    def _share(self, place: float) -> float:
        # In halves, because the difference of two floats may exceed the largest float.
        return (place / 2 - self.low / 2) / (self.high / 2 - self.low / 2)

    def ticks(self, most: int, whole: bool = False) -> list[Tick]:
        """Return at most `most` ticks: multiples of 1, 2 or 5 times a power of ten; on a log axis, powers of ten if
        they fit.

        With `whole`, a linear axis has ticks only at whole numbers, for things that are counted.
        """
        if not self.log:
            values = _steps(self.low, self.high, most)
            if whole:
                values = [rounded for value in values if (rounded := value.to_integral_value()) == value]
            text = _alike(values)
            return [(self._share(float(value)), text(value)) for value in values]
        values = next(some for some in _decades(self.low, self.high) if len(some) <= most)
        if len(values) < 2:  # the axis covers a small part of a decade
            values = [v for v in _steps(10**self.low, 10 ** min(self.high, _HIGHEST), most) if v > 0]
        # log10 of the Decimal: converted to a float first, the smallest power of ten may be 0.
        return [(self._share(float(value.log10())), number(value)) for value in values]


def axis(values: Iterable[float], log: bool = False) -> PlotAxis | None:
    """Return the axis that contains all finite values (on a log axis, all above 0); None if there are no such values.

    If all values are equal, the axis extends to both sides of them.
    """
    placed = [v for v in values if math.isfinite(v) and (v > 0 or not log)]
    if not placed:
        return None
    low, high = min(placed), max(placed)
    if log:
        low, high = math.log10(low), math.log10(high)
    size = max(abs(low), abs(high))
    if high / 2 - low / 2 <= _FLAT * size / 2 or size < 1e-290:
        room = 0.5 if log else size / 2 if size > 1e-290 else 1.0
        limit = math.inf if log else 1.7e308
        low, high = max(low - room, -limit), min(high + room, limit)
    return PlotAxis(low, high, log)


def number(value: Decimal) -> str:
    """Return a number in its shortest form, such as `0.05`, `200` or `1e-7`."""
    value = value.normalize()
    if not value or Decimal("1e-4") <= abs(value) < Decimal("1e6"):
        return f"{value:f}" if value else "0"
    return f"{value:e}".replace("e+", "e")


def _alike(values: list[Decimal]) -> Callable[[Decimal], str]:
    """Return a formatter for round numbers: equal decimals, or shortest forms if very large or small."""
    steps = [b - a for a, b in pairwise(values)]
    if any(abs(value) >= Decimal("1e6") for value in values) or any(step < Decimal("1e-4") for step in steps):
        return number
    return lambda value: f"{value if value else abs(value):f}"


def _steps(low: float, high: float, most: int) -> list[Decimal]:
    """Return the multiples of a step between `low` and `high`. The step is 1, 2 or 5 times a power of ten, the smallest
    with at most `most` such multiples."""
    exponent = math.floor(math.log10(max(high / most - low / most, 5e-324)))
    for power in range(exponent - 1, exponent + 4):
        for factor in (1, 2, 5):
            step = Decimal(factor).scaleb(power)
            first, last = math.ceil(Decimal(low) / step), math.floor(Decimal(high) / step)
            if last - first < most:
                return [Decimal(k * factor).scaleb(power) for k in range(first, last + 1)]
    return []


def _decades(low: float, high: float) -> Iterator[list[Decimal]]:
    """Yield candidate labels of a log axis, densest first: 1, 2 and 5 of each decade, every decade, every second
    decade, ..."""
    first, last = math.floor(low), math.ceil(high)
    if last - first < 10:
        yield _inside((Decimal(m).scaleb(k) for k in range(first, last + 1) for m in (1, 2, 5)), low, high)
    for every in (1, 2, 5, 10, 20, 50, 100, 200, 500):
        yield _inside((Decimal(1).scaleb(k) for k in range(first, last + 1) if k % every == 0), low, high)


def _inside(values: Iterable[Decimal], low: float, high: float) -> list[Decimal]:
    """Return the values between the ends, which are given as log10."""
    return [value for value in values if low - _FLAT <= float(value.log10()) <= high + _FLAT]
