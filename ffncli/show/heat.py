"""A heat map in text: characters 1 to 9 above zero, a to i below; in a terminal with colours, half blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ffncli.dataclass import dataclass
from ffncli.show.tensors import number_text

Color = tuple[int, int, int]
_STEPS = 9
_ZERO: Color = (70, 70, 70)
_ENDS: tuple[Color, Color] = ((245, 150, 80), (90, 160, 255))  # below, above zero
_ODD: Color = (255, 60, 200)


@dataclass(frozen=True)
class HeatMap:
    """The cells of a matrix, each a value (NaN and infinite ones too) that stands for up to `each` of its values."""

    cells: Sequence[Sequence[float]]
    each: int = 1

    @property
    def most(self) -> float:
        """The largest finite value by size."""
        return max((abs(v) for row in self.cells for v in row if math.isfinite(v)), default=0.0)

    def characters(self) -> list[str]:
        """A line for each row of cells."""
        return ["".join(self._character(value) for value in row) for row in self.cells]

    def colors(self) -> list[list[tuple[Color, Color | None]]]:
        """A line for each two rows of cells: the colour of the upper cell, and of the lower one (None: no such row)."""
        out = []
        for at in range(0, len(self.cells), 2):
            lower = self.cells[at + 1] if at + 1 < len(self.cells) else [None] * len(self.cells[at])
            pairs = zip(self.cells[at], lower, strict=True)
            out.append([(self._color(up), None if down is None else self._color(down)) for up, down in pairs])
        return out

    def scale(self, colored: bool, digits: int = 4) -> str:
        """What the picture's ends mean, and what a cell is."""
        most = number_text(self.most, digits)
        what = "one value" if self.each == 1 else f"the largest of up to {self.each:,} values"
        odd = any(not math.isfinite(v) for row in self.cells for v in row)
        ends = f"blue {most}, orange -{most}" if colored else f"9 is {most}, i is -{most}"
        return f"a cell: {what}; {ends}" + ((", pink" if colored else ", !") + " NaN or infinite" if odd else "")

    def _level(self, value: float) -> int:
        return round(_STEPS * abs(value) / self.most) if self.most else 0

    def _character(self, value: float) -> str:
        if not math.isfinite(value):
            return "!"
        level = self._level(value)
        return "." if not level else str(level) if value > 0 else "abcdefghi"[level - 1]

    def _color(self, value: float) -> Color:
        if not math.isfinite(value):
            return _ODD
        share = math.sqrt(abs(value) / self.most) if self.most else 0.0
        r, g, b = (round(z + (e - z) * share) for z, e in zip(_ZERO, _ENDS[value > 0], strict=True))
        return r, g, b
