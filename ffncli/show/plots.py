"""Plot: curves over one axis, before any rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """One curve: its name in the legend and its points (x, y), from left to right; NaN breaks it."""

    name: str
    points: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Plot:
    """Curves in one frame. `x` and `y` name the axes."""

    title: str
    x: str
    y: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
