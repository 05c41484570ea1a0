"""Where a function is evaluated: `--at 0.12,-0.08` or `--at -3:3:0.5`."""

from __future__ import annotations

import math
from fractions import Fraction

from ffncli.errors import FFNError, shown

MOST = 10_000
FARTHEST = 1e9


def points(text: str, option: str = "--at") -> tuple[float, ...]:
    """The numbers of a comma-separated list, of a range A:B:STEP with both ends, or of several of these, in order.

    A range is counted in decimal, so that steps of 0.1 hit 0.3. Raises FFNError for anything but finite numbers, for an
    empty range or one without a step, and for more than MOST points.
    """
    out: list[float] = []
    for part in text.split(","):
        out += _range(part, option, MOST - len(out)) if ":" in part else [float(_number(part, option))]
        if len(out) > MOST:
            raise FFNError(f"{option}: more than {MOST:,} points", "choose a larger step")
    return tuple(out)


def point(x: float) -> float | int:
    """x as a cell: a whole number without decimals."""
    return int(x) if x == int(x) and abs(x) < 1e6 else x


def _range(text: str, option: str, most: int) -> list[float]:
    ends = text.split(":")
    if len(ends) not in (2, 3):
        raise FFNError(f"{option}: a range is A:B:STEP, got {shown(text)}", "for example -3:3:0.5")
    first, last = _number(ends[0], option), _number(ends[1], option)
    step = _number(ends[2], option) if len(ends) == 3 else Fraction(1)
    if step <= 0:
        raise FFNError(f"{option}: the step of a range must be above 0, got {shown(ends[2])}")
    if last < first:
        raise FFNError(f"{option}: the range {shown(text)} is empty", "a range goes from its smaller end to its larger")
    count = (last - first) // step + 1
    if count > most:
        raise FFNError(f"{option}: {shown(text)} has more than {MOST:,} points", "choose a larger step")
    return [float(first + i * step) for i in range(int(count))]


def _number(text: str, option: str) -> Fraction:
    """A number of at most FARTHEST, exactly as written."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise FFNError(f"{option}: {shown(text)} is not a finite number", "for example 0.5 or -3:3:0.5")
    if abs(value) > FARTHEST:
        raise FFNError(f"{option}: {shown(text)} is too far out", f"between -{FARTHEST:g} and {FARTHEST:g}")
    return Fraction(text.strip()) if abs(value) > 1e-300 else Fraction(value)
