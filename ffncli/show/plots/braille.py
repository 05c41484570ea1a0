"""A plot as lines of text: curves of Braille dots, two across and four down in each character, inside a frame.

This is our own code for two reasons: the maintained terminal plotters import numpy, which takes longer than a whole run
of `ffn activations`, and they distinguish curves only by colour. Here every curve has a letter, so that a pipe, a log
and NO_COLOR show the same picture. An output that cannot encode Braille gets only the letters.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Literal

from ffncli.errors import clean
from ffncli.show.plots.plot import Plot, PlotAxis, Tick, axis, letter
from ffncli.show.text import encodable, pad, width

Style = int | Literal["", "dim", "bold"]  # an integer stands for the colour of the curve with that index
Span = tuple[str, Style]
WIDEST, NARROWEST = 120, 40
_BLANK = 0x2800
_SYMBOLS = "│┤└─┬·⠿"  # the frame's edge, tick, corner, bottom, tick and zero line; then a curve
_PLAIN = "|++-+."


@dataclass(frozen=True)
class _Frame:
    """Curves in a frame of `columns` by `rows` characters."""

    plot: Plot
    across: PlotAxis
    up: PlotAxis
    columns: int
    rows: int
    symbols: str

    def lines(self) -> Iterator[list[Span]]:
        """Yield the rows from the top, each as spans of a single style."""
        curves = [[(self.across.share(x), self.up.share(y)) for x, y in line.points] for line in self.plot.lines]
        inked = [dots(points, self.columns, self.rows) for points in curves]
        places = [[place_of(point, self.columns, self.rows) for point in points] for points in curves]
        marks = [[place for place in some if place] for some in places] if self.plot.marks else []
        named = letters(inked, self.columns, marks)
        zero = self._zero()
        for row in range(self.rows):
            cells = [self._cell((column, row), inked, named, zero) for column in range(self.columns)]
            yield [
                ("".join(text for text, _ in some), style) for style, some in groupby(cells, key=lambda cell: cell[1])
            ]

    def _cell(
        self,
        at: "Place",
        inked: "Sequence[dict[Place, int]]",
        named: "dict[Place, int]",
        zero: tuple[int | None, int | None],
    ) -> Span:
        """Return the content of a cell: a letter, the dots of all curves in the cell, the zero line, or a space."""
        if at in named:
            return letter(named[at]), named[at]
        passing = [curve for curve, ink in enumerate(inked) if at in ink]
        if passing:
            curve = passing[at[0] % len(passing)]  # overlapping curves take turns
            if self.symbols == _PLAIN:
                return letter(curve), curve
            bits = 0
            for other in passing:
                bits |= inked[other][at]
            return chr(_BLANK + bits), curve
        column, row = at
        if column == zero[0] or (row == zero[1] and (column - (zero[0] or 0)) % 2 == 0):
            return self.symbols[5], "dim"
        return " ", ""

    def _zero(self) -> tuple[int | None, int | None]:
        """Return the column and the row of zero, if they are inside the frame."""
        column = place_of((self.across.share(0.0), 0.5), self.columns, self.rows)
        row = place_of((0.5, self.up.share(0.0)), self.columns, self.rows)
        return column[0] if column else None, row[1] if row else None


def drawn(plot: Plot, columns: int = 80, encoding: str = "utf-8") -> list[list[Span]]:
    """Draw a plot as lines of spans, at most `columns` wide (from 40 to 120), for an output with this encoding."""
    columns = min(max(columns, NARROWEST), WIDEST)
    symbols = _SYMBOLS if encodable(_SYMBOLS, encoding) == _SYMBOLS else _PLAIN

    def fit(text: str, room: int = columns) -> str:
        return _cut(encodable(clean(text), encoding), room, symbols)

    title: list[list[Span]] = [[(fit(plot.title), "bold")]] if plot.title else []
    points = [p for line in plot.lines for p in line.points if all(map(math.isfinite, p))]
    points = [(x, y) for x, y in points if (x > 0 or not plot.log_x) and (y > 0 or not plot.log_y)]
    across, up = axis((x for x, _ in points), plot.log_x), axis(plot.frame or [y for _, y in points], plot.log_y)
    if across is None or up is None:
        return [*title, [("  no points to draw", "dim")]]
    rows = 16 if columns <= 100 else 20
    labels = {_row(share, rows): text for share, text in up.ticks(max(2, rows // 3))}
    margin = max(map(len, labels.values()), default=0) + 2  # plus a space and the frame's edge
    frame = _Frame(plot, across, up, columns - margin, rows, symbols)
    below = _below(plot, across, frame.columns)
    out: list[list[Span]] = [*title, [(" " * (margin - 1) + fit(plot.y, columns - margin), "")]]
    for row, spans in enumerate(frame.lines()):
        edge = symbols[1] if row in labels else symbols[0]
        out.append([(labels.get(row, "").rjust(margin - 2) + " ", ""), (edge, "dim"), *spans])
    bottom = "".join(symbols[4] if at in below else symbols[3] for at in range(frame.columns))
    out.append([(" " * (margin - 1), ""), (symbols[2] + bottom, "dim")])
    out.append([(_written(below, margin, columns), "")])
    name = fit(plot.x, frame.columns)
    out.append([(" " * (margin + (frame.columns - width(name)) // 2) + name, "")])
    return out + list(_legend([fit(line.name, columns - 4) for line in plot.lines], columns))


def _row(share: float, rows: int) -> int:
    place = place_of((0.5, share), 1, rows)
    return place[1] if place else rows


def _below(plot: Plot, across: PlotAxis, columns: int) -> dict[int, str]:
    """Return a mapping from columns to the labels below them. There is a label at every point if the points are a few
    measurements, otherwise at round numbers."""
    if plot.marks:
        values = sorted({x for line in plot.lines for x, _ in line.points if math.isfinite(across.share(x))})
        labels = _at([(across.share(x), f"{x:g}") for x in values[:columns]], columns)
        if values and _clear(labels) and len(labels) == len(values):
            return labels
    for most in range(max(2, columns // 7), 1, -1):
        labels = _at(across.ticks(most), columns)
        if _clear(labels):
            return labels
    return {}


def _at(ticks: Sequence[Tick], columns: int) -> dict[int, str]:
    """Return a mapping from columns to labels."""
    placed = [(place_of((share, 0.5), columns, 1), text) for share, text in ticks]
    return {place[0]: text for place, text in placed if place}


def _clear(labels: dict[int, str]) -> bool:
    """Return True if there is a space between neighbouring labels."""
    ends = [(at - len(text) // 2, at - len(text) // 2 + len(text)) for at, text in sorted(labels.items())]
    return all(end + 2 <= start for (_, end), (start, _) in pairwise(ends))


def _written(labels: dict[int, str], margin: int, columns: int) -> str:
    """Write labels under their columns; the last label may be shifted to stay inside the frame."""
    line = ""
    for at, text in sorted(labels.items()):
        start = min(margin + at - len(text) // 2, columns - len(text))
        line = (pad(line, start) if len(line) < start else line + " " * (line != "")) + text
    return line


def _cut(text: str, room: int, symbols: str) -> str:
    """Truncate `text` to at most `room` columns."""
    if width(text) <= room:
        return text
    more = "..." if symbols == _PLAIN else "…"
    while text and width(text) + len(more) > room:
        text = text[:-1]
    return text + more


def _legend(names: Sequence[str], columns: int) -> Iterator[list[Span]]:
    """Yield the legend, such as `a gelu b silu`, on as many lines as needed."""
    line: list[Span] = []
    used = 0
    for at, name in enumerate(names):
        text = f"{letter(at)} {name}"
        if line and used + 3 + width(text) > columns:
            yield line
            line, used = [], 0
        line.append(("  " if not line else "   ", ""))
        line.append((text, at))
        used += (2 if used == 0 else 3) + width(text)
    if line:
        yield line


Point = tuple[float, float]  # fractions of the frame's width and height, from its lower left corner
Place = tuple[int, int]  # column and row of a character in the frame, from its top left corner
Dots = dict[Place, int]  # Unicode's bits for the dots of a Braille character
ACROSS, DOWN = 2, 4
_BITS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # indexed by the dot's row and column
_FAR = 1e6  # in dots; points farther out are moved to this distance
_APART = 1  # minimum distance in characters between a letter and the next curve
_ENOUGH = 4
_PER_LETTER = 13  # columns


def dots(points: Sequence[Point], columns: int, rows: int) -> Dots:
    """Return the dots of a curve through the points; a non-finite point interrupts it, and the frame clips it."""
    wide, high = columns * ACROSS - 1, rows * DOWN - 1
    placed = [(_near(x * wide), _near((1 - y) * high)) for x, y in points]
    cells: Dots = {}
    for x, y in _trail(placed, wide, high):
        place = x // ACROSS, y // DOWN
        cells[place] = cells.get(place, 0) | _BITS[y % DOWN][x % ACROSS]
    return cells


def place_of(point: Point, columns: int, rows: int) -> Place | None:
    """Return the column and row of the character that contains a point; None if the point is outside the frame."""
    x, y = _near(point[0] * (columns * ACROSS - 1)), _near((1 - point[1]) * (rows * DOWN - 1))
    if not (-0.5 <= x < columns * ACROSS - 0.5 and -0.5 <= y < rows * DOWN - 0.5):
        return None
    return math.floor(x + 0.5) // ACROSS, math.floor(y + 0.5) // DOWN


def letters(curves: Sequence[Dots], columns: int, marks: Sequence[Sequence[Place]] = ()) -> dict[Place, int]:
    """Return a mapping from the character positions of letters to the indices of their curves.

    There is one letter per `_PER_LETTER` columns, if no other curve is close. With `marks` (one list per curve),
    letters are at the marks that no other curve covers. A curve that is close to other curves everywhere still gets one
    letter, at its greatest distance from them.
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
    """For each stretch of the frame, yield the curve's position that is farthest from the other curves, if it is far
    enough from them."""
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
    """Return the distance in characters to the nearest other curve, at most `_ENOUGH`."""
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
    """Yield every dot on the lines from point to point, and isolated points."""
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
    """Yield the points of a line segment that are inside the frame, one dot apart, as fractions of the segment (Liang
    and Barsky)."""
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
