"""A plot as lines of text: curves of Braille dots in a frame.

Our own, because a page of curves must cost no more than its curves. The maintained terminal plotters import numpy,
which takes longer than all of `ffn activations`, and distinguish curves only by colour: here every curve has a letter,
so that a pipe, a log and NO_COLOR show the same picture. An output that cannot encode Braille gets only the letters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise
from typing import Literal

from ffncli.dataclass import dataclass
from ffncli.errors import clean
from ffncli.show.plots.axes import PlotAxis, Tick, axis
from ffncli.show.plots.canvas import Place, dots, letters, place_of
from ffncli.show.plots.plot import Plot, letter
from ffncli.show.text import encodable, pad, width

Style = int | Literal["", "dim", "bold"]  # a number: the curve that gives the colour
Span = tuple[str, Style]

WIDEST, NARROWEST = 120, 40
_BLANK = 0x2800
_SYMBOLS = "│┤└─┬·⠿"  # of a frame: edge, tick, corner, bottom, tick, zero; and a curve
_PLAIN = "|++-+."


@dataclass(frozen=True)
class _Frame:
    """Curves in `columns` by `rows` characters."""

    plot: Plot
    across: PlotAxis
    up: PlotAxis
    columns: int
    rows: int
    symbols: str

    def lines(self) -> Iterator[list[Span]]:
        """The rows from the top, spans of one style each."""
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
        self, at: Place, inked: Sequence[dict[Place, int]], named: dict[Place, int], zero: tuple[int | None, int | None]
    ) -> Span:
        """A letter, the dots of all curves in the cell, the zero line, or nothing."""
        if at in named:
            return letter(named[at]), named[at]
        passing = [curve for curve, ink in enumerate(inked) if at in ink]
        if passing:
            curve = passing[at[0] % len(passing)]  # curves on top of each other take turns
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
        """The column and the row of zero, if they are inside the frame."""
        column = place_of((self.across.share(0.0), 0.5), self.columns, self.rows)
        row = place_of((0.5, self.up.share(0.0)), self.columns, self.rows)
        return column[0] if column else None, row[1] if row else None


def drawn(plot: Plot, columns: int = 80, encoding: str = "utf-8") -> list[list[Span]]:
    """Lines of spans, at most `columns` wide (from 40 to 120), for an output of that encoding."""
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
    margin = max(map(len, labels.values()), default=0) + 2  # a space and the frame's edge
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
    """Column → label under it: at every point, if these are few and are measurements; else round numbers."""
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
    """Column → label."""
    placed = [(place_of((share, 0.5), columns, 1), text) for share, text in ticks]
    return {place[0]: text for place, text in placed if place}


def _clear(labels: dict[int, str]) -> bool:
    """Whether there is a space between neighbours."""
    ends = [(at - len(text) // 2, at - len(text) // 2 + len(text)) for at, text in sorted(labels.items())]
    return all(end + 2 <= start for (_, end), (start, _) in pairwise(ends))


def _written(labels: dict[int, str], margin: int, columns: int) -> str:
    """Labels under their columns; the last may be shifted to stay inside."""
    line = ""
    for at, text in sorted(labels.items()):
        start = min(margin + at - len(text) // 2, columns - len(text))
        line = (pad(line, start) if len(line) < start else line + " " * (line != "")) + text
    return line


def _cut(text: str, room: int, symbols: str) -> str:
    """`text` in at most `room` columns."""
    if width(text) <= room:
        return text
    more = "..." if symbols == _PLAIN else "…"
    while text and width(text) + len(more) > room:
        text = text[:-1]
    return text + more


def _legend(names: Sequence[str], columns: int) -> Iterator[list[Span]]:
    """`a gelu   b silu`, in as many lines as necessary."""
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
