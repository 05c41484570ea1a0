"""Prints an answer's parts on a terminal, with rich."""

import os
from collections.abc import Sequence
from typing import Literal, TextIO

from ffncli.errors import clean
from ffncli.show.color import curve_style, sign_style
from ffncli.show.parts import Fold, Heading, Line, Part, Table
from ffncli.show.plots.plot import Plot
from ffncli.show.tensors import Excerpt, HeatMap
from ffncli.show.text import aligned, encodable, pad, width


class Terminal:
    """Prints the parts of an answer with rich. Numbers are coloured by sign; a table that would cut off cells is
    printed vertically."""

    def __init__(self, stream: TextIO, color: bool) -> None:
        from rich.console import Console

        # If colour is forced, a terminal without colour support (TERM=dumb) gets the eight standard colours.
        system: Literal["auto", "standard"] = "standard" if os.environ.get("TERM") == "dumb" else "auto"
        self.console = Console(
            file=stream, markup=False, highlight=False, emoji=False, no_color=not color,
            color_system=system if color else None,
        )  # fmt: skip
        self.encoding = stream.encoding or "utf-8"

    def show(self, parts: Sequence[Part]) -> None:
        """Print all parts."""
        from rich.padding import Padding
        from rich.text import Text

        flat = [inner for part in parts for inner in (part.parts if isinstance(part, Fold) else (part,))]
        for at, part in enumerate(flat):
            match part:
                case Heading():
                    line = Text(self._fit(part.text), "bold").append("  " + self._fit(part.remark), "not bold dim")
                    self.console.print(Text("\n" if at else "") + line)
                case Line():
                    self.console.print(Padding(Text(self._fit(part.text), "dim" if part.quiet else ""), (0, 0, 0, 2)))
                case Excerpt():
                    self._excerpt(part)
                case HeatMap():
                    self._heat(part)
                case Table():
                    self._table(part, first=at == 0)
                case Plot():
                    self._plot(part, first=at == 0)

    def _fit(self, text: str) -> str:
        return encodable(clean(text), self.encoding)

    def _excerpt(self, excerpt: Excerpt) -> None:
        """Print one row per line; a row that is too wide continues on the next line, indented like its values."""
        from rich.text import Text

        for cells in excerpt.lines():
            label = width(cells[0][0]) + 2 if excerpt.labelled else 0
            line, used = Text("  "), 2
            for at, (text, value) in enumerate(cells):
                if at > excerpt.labelled and used + 2 + width(text) > self.console.width:
                    self.console.print(line)
                    line, used = Text(" " * label), label
                line.append(("  " if at else "") + self._fit(text), sign_style(value))
                used += (2 if at else 0) + width(text)
            self.console.print(line)

    def _heat(self, heat: HeatMap) -> None:
        """Print half blocks, two rows of cells per line; or characters if the terminal lacks colours."""
        from rich.text import Text

        colored = self.console.color_system in ("256", "truecolor") and self._fit("▀") == "▀"
        for line in heat.colors() if colored else ():
            text = Text("  ")
            for up, down in line:
                below = "" if down is None else f" on rgb({down[0]},{down[1]},{down[2]})"
                text.append("▀", f"rgb({up[0]},{up[1]},{up[2]}){below}")
            self.console.print(text)
        for characters in () if colored else heat.characters():
            self.console.print(Text("  " + characters))
        self.console.print(Text("  " + heat.scale(colored), "dim"))

    def _plot(self, plot: Plot, first: bool) -> None:
        from rich.text import Text

        from ffncli.show.plots.braille import drawn

        if not first:
            self.console.print()
        # The Linux console's font has no Braille.
        encoding = "ascii" if os.environ.get("TERM") == "linux" else self.encoding
        for spans in drawn(plot, self.console.width, encoding):
            self.console.print(Text.assemble(*((text, curve_style(style)) for text, style in spans)))

    def _table(self, table: Table, first: bool) -> None:
        from rich.text import Text

        texts = [[self._fit(cell) for cell in row] for row in table.texts()]
        names = [self._fit(name) for name in table.columns]
        widest = [max([width(c), *(width(row[i]) for row in texts)]) for i, c in enumerate(names)]
        natural = sum(widest) + 2 * (len(widest) - 1)
        wide = natural > self.console.width and len(table.columns) > 2
        if wide and (parts := table.narrowed(widest, self.console.width)):
            for part in parts:  # every part repeats the title
                self._table(part, first)
                first = False
            return
        if not first:
            self.console.print()
        if table.title:
            self.console.print(Text(self._fit(table.title), "bold"))
        if table.caption:
            self.console.print(Text(self._fit(table.caption), "dim"))
        if wide:
            self._vertical(names, texts)
            return
        if natural <= self.console.width:
            self._aligned(names, texts, widest, table)
            return
        # Only tables of two columns (name, text) may wrap: the text is folded, so that nothing is cut off.
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable

        rich = RichTable(
            box=SIMPLE_HEAD, show_header=any(table.columns), pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
        )
        for name, right in zip(names, table.right_aligned(), strict=True):
            rich.add_column(Text(name), justify="right" if right else "left", overflow="fold")
        for at, row in enumerate(texts):
            rich.add_row(*(Text(cell) for cell in row), style="bold" if at in table.emphasis else None)
        self.console.print(rich)

    def _aligned(self, names: list[str], texts: list[list[str]], widths: list[int], table: Table) -> None:
        """Print a table that fits, as one string that looks like rich's table; rich's own takes four times as long."""
        from rich.text import Text

        right, out = table.right_aligned(), Text(no_wrap=True, overflow="ignore")
        if any(names):
            (head,) = aligned([names], widths, right)
            out.append(head, "bold").append(f"\n{self._fit('─') * (sum(widths) + 2 * (len(widths) - 1))}\n")
        for at, line in enumerate(aligned(texts, widths, right)):
            out.append(f"{line}\n", "bold" if at in table.emphasis else "")
        self.console.print(out, end="")

    def _vertical(self, names: list[str], texts: list[list[str]]) -> None:
        """Print one record per row, with `name value` on each line."""
        from rich.text import Text

        wide = max(map(width, names))
        for at, row in enumerate(texts):
            if at:
                self.console.print()
            for name, cell in zip(names, row, strict=True):
                if not cell:
                    continue
                self.console.print(Text(pad(name, wide) + "  ", "dim").append(cell, "not dim"))
