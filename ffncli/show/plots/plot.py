"""Plot: curves over one axis, before any rendering."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class Series:
    """One curve: its name in the legend and its points (x, y), from left to right; one that is not finite breaks it.

    `intervals`: from where to where the y of each point may lie, drawn in a file alone; empty where none is known.
    """

    name: str
    points: Sequence[tuple[float, float]]
    intervals: Sequence[tuple[float, float]] = ()


@dataclass(frozen=True)
class Plot:
    """Curves in one frame. `x` and `y` name the axes.

    `marks` says that the points are measurements, each with a mark, and the lines between them only guide the eye. A
    log axis shows only values above 0. `frame` is the y-axis from its low end to its high one, None for as much as the
    points need; anything outside is cut off.
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
    """A value with the ends of its interval, None where an end is not known."""

    name: str
    value: float
    low: float | None
    high: float | None


@dataclass(frozen=True)
class IntervalPlot:
    """Rows of intervals on one log axis `x`, with a line at 1: a chart for a file."""

    title: str
    x: str
    rows: Sequence[IntervalRow]


def letter(curve: int) -> str:
    """The letter of a curve in its frame."""
    return "abcdefghijklmnopqrstuvwxyz"[curve % 26]
