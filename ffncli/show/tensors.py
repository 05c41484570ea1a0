"""Tensor values as text: an excerpt is an aligned block, with `…` for omitted values; a heat map shows values above
zero as 1 to 9 and below zero as a to i, or as half blocks in a terminal with colours."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ffncli.errors import clean
from ffncli.show.text import pad, width

Values = Any  # nested lists of floats, one level per axis


@dataclass(frozen=True)
class Excerpt:
    """An excerpt of a tensor of `shape`: `values` are nested lists of the values at `index`, the indices per axis."""

    shape: tuple[int, ...]
    index: tuple[tuple[int, ...], ...]
    values: Values
    digits: int = 4
    names: tuple[int | str, ...] | None = None  # names of the rows along the first axis, if they have names

    @property
    def labelled(self) -> bool:
        """Whether lines begin with a row label."""
        return len(self.shape) > 1

    def lines(self) -> list[list[tuple[str, float]]]:
        """Return lines of (text, value) cells, padded to equal width: each row's label, then its values.

        The value is NaN for labels and for `…`. Rows run over all axes but the last, in order.
        """
        rows = list(_rows(self.values, self.index[:-1]))
        style = _style([v for _, row in rows for v in row], self.digits)
        texts = [[style(v) for v in row] for _, row in rows]
        wide = max((len(t) for row in texts for t in row), default=1)
        labels = [clean(",".join(map(str, self._named(label)))) for label, _ in rows]
        label_wide = max(map(width, labels), default=0)
        right = not any(isinstance(name, str) for name in self.names or ())  # numbers as labels are right-aligned
        out: list[list[tuple[str, float]]] = []
        before: tuple[int, ...] | None = None
        for (label, row), cells, name in zip(rows, texts, labels, strict=True):
            if before is not None and not _follows(before, label, self.shape):
                out.append([("…".rjust(label_wide), math.nan)])
            before = label
            line = [(pad(name, label_wide, right), math.nan)] if label_wide else []
            out.append([*line, *self._with_gaps(row, cells, wide)])
        if before is not None and any(i != n - 1 for i, n in zip(before, self.shape, strict=False)):
            out.append([("…".rjust(label_wide), math.nan)])
        return out

    def text(self, value: float) -> str:
        """Format a value as this excerpt does."""
        rows = _rows(self.values, self.index[:-1])
        return _style([v for _, row in rows for v in row], self.digits)(value)

    def _named(self, label: tuple[int, ...]) -> tuple[int | str, ...]:
        return (self.names[label[0]], *label[1:]) if self.names and label else label

    def _with_gaps(self, row: Sequence[float], cells: list[str], wide: int) -> list[tuple[str, float]]:
        """Return a row's cells, with `…` where the last axis skips indices or ends early."""
        shown = self.index[-1] if self.index else (0,)
        out: list[tuple[str, float]] = []
        for at, (position, value, text) in enumerate(zip(shown, row, cells, strict=True)):
            if at and position != shown[at - 1] + 1:
                out.append(("…", math.nan))
            out.append((text.rjust(wide), value))
        if self.shape and shown and shown[-1] != self.shape[-1] - 1:
            out.append(("…", math.nan))
        return out


def number_text(value: float, digits: int) -> str:
    """Format a single value as an excerpt of its own: fixed if that shows enough digits, otherwise scientific."""
    return _style([value], digits)(value)


def edges(size: int, most: int) -> tuple[int, ...]:
    """Return the indices of an axis to show: all indices, or only the first and last ones, at most `most` in total."""
    if size <= most:
        return tuple(range(size))
    first = (most + 1) // 2
    return (*range(first), *range(size - (most - first), size))


def _rows(values: Values, index: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], Sequence[float]]]:
    """Return (label, values along the last axis) for every combination of leading indices."""
    if not index:
        return [((), values if isinstance(values, list) else [values])]
    return [
        ((i, *label), row) for i, inner in zip(index[0], values, strict=True) for label, row in _rows(inner, index[1:])
    ]


def _follows(before: tuple[int, ...], label: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return True if the row `label` directly follows the row `before`."""
    flat = 0
    for b, a, n in zip(before, label, shape, strict=False):
        flat = flat * n + (a - b)
    return flat == 1


def _style(values: Sequence[float], digits: int) -> Callable[[float], str]:
    """Return one format for all of these values: fixed if that is readable, otherwise scientific."""
    sizes = [abs(v) for v in values if math.isfinite(v) and v != 0]
    fixed = not sizes or (max(sizes) < 1e5 and max(sizes) >= min(10.0 ** (1 - digits), 0.1))
    code = f".{digits}f" if fixed else f".{max(digits - 1, 0)}e"

    def text(value: float) -> str:
        if math.isnan(value):
            return "NaN"
        if math.isinf(value):
            return "Inf" if value > 0 else "-Inf"
        return format(value, code)

    return text


def written(name: str, index: Sequence[int]) -> str:
    """Return text such as `up[0,3]`."""
    return f"{name}[{','.join(map(str, index))}]"


Color = tuple[int, int, int]
_STEPS = 9
_ZERO: Color = (70, 70, 70)
_ENDS: tuple[Color, Color] = ((245, 150, 80), (90, 160, 255))  # colours below zero, above zero
_ODD: Color = (255, 60, 200)


@dataclass(frozen=True)
class HeatMap:
    """The cells of a matrix; each is a value (also NaN or infinite) that represents up to `each` matrix entries."""

    cells: Sequence[Sequence[float]]
    each: int = 1

    @property
    def most(self) -> float:
        """The largest finite absolute value."""
        return max((abs(v) for row in self.cells for v in row if math.isfinite(v)), default=0.0)

    def characters(self) -> list[str]:
        """Return one line per row of cells."""
        return ["".join(self._character(value) for value in row) for row in self.cells]

    def colors(self) -> list[list[tuple[Color, Color | None]]]:
        """Return one line per two rows of cells: pairs of colours (upper cell, lower cell or None if missing)."""
        out = []
        for at in range(0, len(self.cells), 2):
            lower = self.cells[at + 1] if at + 1 < len(self.cells) else [None] * len(self.cells[at])
            pairs = zip(self.cells[at], lower, strict=True)
            out.append([(self._color(up), None if down is None else self._color(down)) for up, down in pairs])
        return out

    def scale(self, colored: bool, digits: int = 4) -> str:
        """Return the legend: what a cell stands for, and how the largest values look."""
        most = number_text(self.most, digits)
        what = "one value" if self.each == 1 else f"the largest of up to {self.each:,} values"
        odd = any(not math.isfinite(v) for row in self.cells for v in row)
        ends = f"blue {most}, orange -{most}" if colored else f"9 is {most}, i is -{most}"
        return f"a cell: {what}; {ends}" + ((", pink" if colored else ", !") + " NaN or infinite" if odd else "")

    def _character(self, value: float) -> str:
        if not math.isfinite(value):
            return "!"
        level = round(_STEPS * abs(value) / self.most) if self.most else 0
        return "." if not level else str(level) if value > 0 else "abcdefghi"[level - 1]

    def _color(self, value: float) -> Color:
        if not math.isfinite(value):
            return _ODD
        share = math.sqrt(abs(value) / self.most) if self.most else 0.0
        r, g, b = (round(z + (e - z) * share) for z, e in zip(_ZERO, _ENDS[value > 0], strict=True))
        return r, g, b
