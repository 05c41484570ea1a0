"""The parts of an answer before they are rendered; one kind is Table, which has named columns of raw values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeAlias

from ffncli.errors import clean
from ffncli.show.plots.plot import Plot
from ffncli.show.tensors import Excerpt, HeatMap

if TYPE_CHECKING:
    from ffncli.show.page.document import PageParts


@dataclass(frozen=True)
class Heading:
    """A line that opens a part: bold text, followed by a quiet remark."""

    text: str
    remark: str = ""


@dataclass(frozen=True)
class Line:
    """A line of text under a heading; `quiet` lines are dim in a terminal."""

    text: str
    quiet: bool = False


@dataclass(frozen=True)
class Fold:
    """Parts that Markdown folds away under `summary`; other formats show them unfolded."""

    summary: str
    parts: "Sequence[Part]"


@dataclass(frozen=True)
class Table:
    """A table: `rows` hold raw values, one per column. `emphasis` lists the rows to set in bold (totals).

    With `side_by_side`, the first column names quantities and the other columns are the things compared; columns that
    do not fit next to each other are split over several tables. Other tables are split as well if they have `labels`,
    the number of first columns that name a row. `caption` is shown below the title.
    """

    columns: tuple[str, ...]
    rows: "Sequence[tuple[Cell, ...]]"
    title: str = ""
    emphasis: frozenset[int] = field(default_factory=frozenset)
    side_by_side: bool = False
    labels: int = 0
    caption: str = ""

    def narrowed(self, widths: Sequence[int], room: int) -> "list[Table]":
        """Split this table into tables that are at most `room` wide, given the widths of its columns; [] if that is
        impossible.

        First, columns with the same value in every row are dropped and named in the caption instead. The other columns
        are split over several tables, each of which repeats the labels; this needs `labels` or `side_by_side`.
        """
        same = [] if self.side_by_side else self._constants()
        kept, left = [*range(len(self.columns))], []
        for i in same:
            if _taken(widths, kept) > room:
                kept.remove(i)
                left += [f"{self.columns[i]} {text}"] if (text := self.texts()[0][i]) else []
        caption = f"in every row: {', '.join(left)}" if left else self.caption
        parts = [kept] if _taken(widths, kept) <= room else self._split(kept, widths, room)
        return [self._with(part, "" if at else caption) for at, part in enumerate(parts)]

    def _constants(self) -> list[int]:
        """Return the columns, but for the first, whose text is the same in all rows, if there are several rows; labels
        come last."""
        texts = self.texts() if len(self.rows) > 1 else []
        same = [i for i in range(1, len(self.columns)) if len({row[i] for row in texts}) == 1]
        return sorted(same, key=lambda i: i < self.labels)

    def _split(self, kept: Sequence[int], widths: Sequence[int], room: int) -> list[list[int]]:
        """Return groups of columns that each fit next to the labels; [] without labels or if a column is too wide."""
        first = 1 if self.side_by_side else len([i for i in kept if i < self.labels])
        parts: list[list[int]] = []
        for i in kept[first:]:
            if parts and _taken(widths, [*parts[-1], i]) <= room:
                parts[-1].append(i)
            else:
                parts.append([*kept[:first], i])
        return parts if first and all(_taken(widths, part) <= room for part in parts) else []

    def _with(self, kept: Sequence[int], caption: str) -> "Table":
        rows = [tuple(row[i] for i in kept) for row in self.rows]
        return Table(tuple(self.columns[i] for i in kept), rows, self.title, self.emphasis, caption=caption)

    def texts(self) -> list[list[str]]:
        """Return every cell as a string."""
        return [[cell_text(cell) for cell in row] for row in self.rows]

    def right_aligned(self) -> list[bool]:
        """Return for each column whether any of its cells is a number."""
        return [any(is_number(row[i]) for row in self.rows) for i in range(len(self.columns))]


Part: TypeAlias = Table | Excerpt | Heading | HeatMap | Line | Plot | Fold


@dataclass(frozen=True)
class Answer:
    """A command's answer before it is rendered: `body` for JSON, `rows` for CSV, `parts` for people, and the sections
    that come before the parts on a page of HTML, made when they are needed."""

    command: str
    body: Mapping[str, Any]
    rows: Table
    parts: Sequence[Part]
    conventions: Mapping[str, str] = field(default_factory=dict)
    pages: "Callable[[], Sequence[PageParts]]" = tuple

    def with_section(self, key: str, value: Any, parts: Sequence[Part] = ()) -> "Answer":
        """Append `key` and these parts to the answer; return the answer unchanged if the value is None."""
        if value is None:
            return self
        return replace(self, body={**self.body, key: value}, parts=[*self.parts, *parts])


Cell = Any  # int, float, bool, str, None, or a sequence of those


class Short(int):
    """A count that tables show with four digits and a unit: `4.329 B`. JSON and CSV have all digits."""

    def __str__(self) -> str:
        for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("K", 10**3)):
            if self >= 0.99995 * size and self >= 1000:  # so that a value that would round up to the unit uses it
                return f"{self / size:#.4g} {unit}"
        return f"{int(self)}"


class Fixed(float):
    """A float that tables show with four decimals, zero as `0.0000`; very large or small values are scientific."""

    def __str__(self) -> str:
        value = float(self)
        if value == 0.0:
            return "0.0000"  # also for -0.0
        return f"{value:.4f}" if 1e-3 <= abs(value) < 1e5 else f"{value:.3e}"


def cell_text(value: Cell) -> str:
    """Format a value for people: thousands separators, booleans as yes and no, a dash for unknown values."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, (Short, Fixed)):
        return str(value)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell_text(v) for v in value) or "-"
    return clean(str(value))


def apart(values: Sequence[Cell], text: Callable[[float, int], Cell] | None = None) -> list[Cell]:
    """Format values shown next to each other; floats get enough digits to tell different values apart.

    `text(value, digits)` formats a float, and is tried with 1 digit first, then with more; without `text`, floats have
    4 or more significant digits.
    """
    floats = {value for value in values if isinstance(value, float)}
    write, fewest = text or (lambda value, digits: f"{value:.{digits}g}"), 1 if text else 4
    enough = (n for n in range(fewest, 17) if len({write(value, n) for value in floats}) == len(floats))
    digits = next(enough, 17)
    return [write(value, digits) if isinstance(value, float) else value for value in values]


def csv_text(value: Cell) -> str:
    """Format a value for machines: full precision, `true|false`, empty for unknown values, lists joined with `;`.

    Text that a spreadsheet would evaluate as a formula gets a leading apostrophe.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ";".join(csv_text(v) for v in value)
    if isinstance(value, (int, float)):
        return repr(value)
    text = clean(str(value))
    return "'" + text if text[:1] in ("=", "+", "-", "@") else text


def _taken(widths: Sequence[int], columns: Sequence[int]) -> int:
    """Return the total width of these columns next to each other."""
    return sum(widths[i] + 2 for i in columns) - 2


def is_number(value: object) -> bool:
    """Return whether a value is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
