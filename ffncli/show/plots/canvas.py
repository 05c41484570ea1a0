"""Curves as dots, two across and four down in each character, and the places of their letters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

Point = tuple[float, float]  # shares of the frame's width and height, from its lower left corner
Place = tuple[int, int]  # column and row of a character in the frame, from the top left
Dots = dict[Place, int]  # Unicode's bits of a Braille character

ACROSS, DOWN = 2, 4
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # by row and column of the dot
_FAR = 1e6  # dots; points further out are moved to here
_APART = 1  # characters between a letter and the next curve, at least
_ENOUGH = 4
_PER_LETTER = 13  # columns


def dots(points: Sequence[Point], columns: int, rows: int) -> Dots:
    """The dots of a curve through the points; a point that is not finite breaks it, and the frame clips it."""
    wide, high = columns * ACROSS - 1, rows * DOWN - 1
    placed = [(_near(x * wide), _near((1 - y) * high)) for x, y in points]
    cells: Dots = {}
    for x, y in _trail(placed, wide, high):
        place = x // ACROSS, y // DOWN
        cells[place] = cells.get(place, 0) | _BITS[y % DOWN][x % ACROSS]
    return cells


def place_of(point: Point, columns: int, rows: int) -> Place | None:
    """The character that a point lies in; None outside the frame."""
    x, y = _near(point[0] * (columns * ACROSS - 1)), _near((1 - point[1]) * (rows * DOWN - 1))
    if not (-0.5 <= x < columns * ACROSS - 0.5 and -0.5 <= y < rows * DOWN - 0.5):
        return None
    return math.floor(x + 0.5) // ACROSS, math.floor(y + 0.5) // DOWN


def letters(curves: Sequence[Dots], columns: int, marks: Sequence[Sequence[Place]] = ()) -> dict[Place, int]:
    """The positions of the curves' letters: a place on a curve → the curve's number.

    One for every `_PER_LETTER` columns, if no other curve is near. With `marks` (per curve), at marks that no other
    curve covers. A curve that never separates from the others still gets one letter, anywhere with room.
    """
    placed: dict[Place, int] = {}
    columns_of = [_by_column(curve) for curve in curves]
    for at, curve in enumerate(curves):
        others = [by for other, by in enumerate(columns_of) if other != at]
        if marks:
            chosen = [
                place for place in marks[at] if not any(place in other for k, other in enumerate(curves) if k != at)
            ]
        else:
            chosen = list(_apart(curve, others, columns))
        placed |= {place: at for place in chosen if place not in placed}
        if at not in placed.values():
            free = [p for p in curve if not any((p[0] + dx, p[1]) in placed for dx in (-1, 0, 1))]
            free = free or [p for p in curve if p not in placed]
            if free:
                placed[max(free, key=lambda place: (_distance(place, others), -abs(place[0] - columns // 2)))] = at
    return placed


def _apart(curve: Dots, others: Sequence[Mapping[int, list[int]]], columns: int) -> Iterator[Place]:
    """In each stretch of the frame the curve's place farthest from the others, if it is far enough."""
    stretches = max(1, columns // _PER_LETTER)
    best: dict[int, tuple[int, int, Place]] = {}
    for place in curve:
        stretch = min(place[0] * stretches // columns, stretches - 1)
        middle = (2 * stretch + 1) * columns // (2 * stretches)
        rank = (_distance(place, others), -abs(place[0] - middle), place)
        if rank[0] >= _APART:
            best[stretch] = max(best.get(stretch, rank), rank)
    for _, _, place in best.values():
        yield place


def _distance(place: Place, others: Sequence[Mapping[int, list[int]]]) -> int:
    """Characters to the nearest other curve, at most `_ENOUGH`."""
    column, row = place
    near = _ENOUGH
    for by_column in others:
        for side in (-1, 0, 1):
            for other in by_column.get(column + side, ()):
                near = min(near, abs(other - row) + abs(side))
    return near


def _by_column(curve: Dots) -> dict[int, list[int]]:
    rows: dict[int, list[int]] = {}
    for column, row in curve:
        rows.setdefault(column, []).append(row)
    return rows


def _near(value: float) -> float:
    return min(max(value, -_FAR), _FAR) if value == value else math.nan


def _trail(placed: Sequence[Point], wide: int, high: int) -> Iterator[tuple[int, int]]:
    """Every dot from point to point, and isolated points."""
    if len(placed) == 1:
        placed = [placed[0], placed[0]]
    for (x0, y0), (x1, y1) in pairwise(placed):
        if math.isnan(x0 + y0):
            x0, y0 = x1, y1
        if math.isnan(x1 + y1):
            x1, y1 = x0, y0
        if math.isnan(x0 + y0):
            continue
        for t in _visible(x0, y0, x1, y1, wide, high):
            x, y = math.floor(x0 + t * (x1 - x0) + 0.5), math.floor(y0 + t * (y1 - y0) + 0.5)
            if 0 <= x <= wide and 0 <= y <= high:
                yield x, y


def _visible(x0: float, y0: float, x1: float, y1: float, wide: int, high: int) -> Iterator[float]:
    """Shares of the way from one point to the next, a dot apart, inside the frame only (Liang and Barsky)."""
    enter, leave = 0.0, 1.0
    for step, low, limit in ((x1 - x0, -0.5 - x0, wide + 0.5 - x0), (y1 - y0, -0.5 - y0, high + 0.5 - y0)):
        if step == 0:
            if low > 0 or limit < 0:
                return
            continue
        ends = sorted((low / step, limit / step))
        enter, leave = max(enter, ends[0]), min(leave, ends[1])
    if enter > leave:
        return
    steps = max(1, math.ceil((leave - enter) * max(abs(x1 - x0), abs(y1 - y0))))
    for i in range(steps + 1):
        yield enter + (leave - enter) * i / steps
