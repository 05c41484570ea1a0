"""The one sink: an Answer becomes a table, JSON, CSV or Markdown. Data goes to stdout, notes to stderr.

A terminal gets rich; a pipe or a file gets the same as plain aligned text at its natural width, without an escape code.
"""

from __future__ import annotations

import io
import json
import math
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO, get_args

from ffncli.errors import ExitCode, FFNError, shown
from ffncli.show.tables import Table, csv_text
from ffncli.show.tensors import Excerpt
from ffncli.show.text import clean, encodable, json_safe, pad, width

Format = Literal["table", "json", "csv", "md"]
SCHEMA_VERSION = 1
_NUMBERS = re.compile(r"\[\n\s*((?:[-+\d.eE]+|null)(?:,\s*(?:[-+\d.eE]+|null))*)\n\s*\]")


@dataclass(frozen=True)
class Heading:
    """A line that opens a part: bold text, and a quiet remark at its right."""

    text: str
    remark: str = ""


@dataclass(frozen=True)
class Line:
    """A line of text under a heading; `quiet` lines are dim in a terminal."""

    text: str
    quiet: bool = False


Part = Table | Excerpt | Heading | Line


@dataclass(frozen=True)
class Answer:
    """What a command has to say, before any rendering: `body` for JSON, `rows` for CSV, `parts` for people."""

    command: str
    body: Mapping[str, Any]
    rows: Table
    parts: Sequence[Part]
    conventions: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Output:
    """Where and how answers appear. Raises FFNError at once for a file that may not be written."""

    format: Format = "table"
    path: str | None = None
    force: bool = False
    color: bool = True
    quiet: bool = False

    def __post_init__(self) -> None:
        if self.format not in get_args(Format):
            raise FFNError(f"--format: unknown format {shown(self.format)}", "use table, json, csv or md")
        if self.path is not None and (not self.path or self.path.endswith(os.sep)):
            raise FFNError(f"cannot write {clean(self.path) or '.'}: it is a directory", code=ExitCode.ENVIRONMENT)
        if self.path is not None and "\0" in self.path:
            raise FFNError(f"cannot write {clean(self.path)}: no file has such a name", code=ExitCode.ENVIRONMENT)
        if self.path is not None and not self.force and _would_be_lost(self.path):
            raise FFNError(f"{clean(str(self.path))} exists already", "choose another -o FILE, or give --force")

    def note(self, text: str) -> None:
        """A remark on stderr, unless quiet."""
        if not self.quiet:
            print_error(f"note: {text}")

    def show(self, answer: Answer) -> None:
        """Render and write. A file is written whole or not at all."""
        if self.path not in (None, "-"):
            _write_file(Path(str(self.path)), self._render(answer))
        elif self.format == "table" and sys.stdout.isatty():
            _Terminal(sys.stdout, self.color).show(answer.parts)
        else:
            if self.format in ("json", "csv") and isinstance(sys.stdout, io.TextIOWrapper):
                sys.stdout.reconfigure(encoding="utf-8")  # data does not depend on the locale
            sys.stdout.write(encodable(self._render(answer), sys.stdout.encoding or "utf-8"))
            sys.stdout.flush()

    def _render(self, answer: Answer) -> str:
        if self.format == "json":
            return _json(answer)
        if self.format == "csv":
            return _csv(answer.rows)
        return _markdown(answer.parts) if self.format == "md" else _plain(answer.parts)


def print_error(text: str) -> None:
    """One line on stderr, safe for any terminal; silent where stderr is closed."""
    try:
        sys.stderr.write(encodable(clean(text), getattr(sys.stderr, "encoding", None) or "utf-8") + "\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):
        pass


# --- machines ---------------------------------------------------------------------------------------------------------


def _json(answer: Answer) -> str:
    whole = {
        "schema_version": SCHEMA_VERSION,
        "command": answer.command,
        "conventions": dict(answer.conventions),
        **answer.body,
    }
    text = json.dumps(_finite(whole), indent=2, allow_nan=False, ensure_ascii=False)
    # Lists of numbers on one line: a shape or a row of values is one thing to a reader.
    return json_safe(_NUMBERS.sub(lambda m: "[" + re.sub(r"\s+", " ", m[1]) + "]", text)) + "\n"


def _finite(value: Any) -> Any:
    """JSON has no NaN and no Infinity: null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    return value


def _csv(table: Table) -> str:
    import csv

    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows([csv_text(cell) for cell in row] for row in table.rows)
    return out.getvalue()


# --- people -----------------------------------------------------------------------------------------------------------


def _plain(parts: Sequence[Part]) -> str:
    lines: list[str] = []
    for part in parts:
        match part:
            case Heading():
                lines += ([""] if lines else []) + [clean(f"{part.text}  {part.remark}").rstrip()]
            case Line():
                lines.append("  " + clean(part.text))
            case Excerpt():
                lines += ["  " + "  ".join(text for text, _ in line) for line in part.lines()]
            case Table():
                lines += ([""] if lines else []) + _plain_table(part)
    return "".join(line.rstrip() + "\n" for line in lines)


def _plain_table(table: Table) -> list[str]:
    texts, right = table.texts(), table.right_aligned()
    names = [clean(name) for name in table.columns]
    widths = [max([width(c), *(width(row[i]) for row in texts)]) for i, c in enumerate(names)]
    rows = [names, *texts] if any(names) else texts
    out = [clean(table.title)] if table.title else []
    return out + ["  ".join(pad(c, w, r) for c, w, r in zip(row, widths, right, strict=True)) for row in rows]


def _markdown(parts: Sequence[Part]) -> str:
    out: list[str] = []
    for part in parts:
        match part:
            case Heading():
                out += ["", f"### {_md(part.text)}", "", *([_md(part.remark), ""] if part.remark else [])]
            case Line():
                out += [_md(part.text), ""]
            case Excerpt():
                out += ["```text", *("  ".join(text for text, _ in line).rstrip() for line in part.lines()), "```", ""]
            case Table():
                out += ["", *([f"**{_md(part.title)}**", ""] if part.title else []), *_markdown_table(part), ""]
    text = "\n".join(out).strip("\n") + "\n"
    return re.sub(r"\n{3,}", "\n\n", text)


def _markdown_table(table: Table) -> list[str]:
    rule = ["---:" if r else "---" for r in table.right_aligned()]
    rows = [list(table.columns), rule, *([_md(c) for c in row] for row in table.texts())]
    return ["| " + " | ".join(row) + " |" for row in rows]


def _md(text: str) -> str:
    return re.sub(r"([\\|*_`<>\[\]#])", r"\\\1", clean(text))


class _Terminal:
    """The same parts through rich: colour by sign, tables that turn vertical rather than cut a cell."""

    def __init__(self, stream: TextIO, color: bool) -> None:
        from rich.console import Console

        plain = not color or bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        self.console = Console(
            file=stream, markup=False, highlight=False, emoji=False, color_system=None if plain else "auto"
        )
        self.encoding = stream.encoding or "utf-8"

    def show(self, parts: Sequence[Part]) -> None:
        """Print all parts."""
        from rich.padding import Padding
        from rich.text import Text

        for at, part in enumerate(parts):
            match part:
                case Heading():
                    line = Text(self._fit(part.text), "bold").append("  " + self._fit(part.remark), "not bold dim")
                    self.console.print(Text("\n" if at else "") + line)
                case Line():
                    self.console.print(Padding(Text(self._fit(part.text), "dim" if part.quiet else ""), (0, 0, 0, 2)))
                case Excerpt():
                    self._excerpt(part)
                case Table():
                    self._table(part, first=at == 0)

    def _fit(self, text: str) -> str:
        return encodable(clean(text), self.encoding)

    def _excerpt(self, excerpt: Excerpt) -> None:
        """A row per line; one that is too wide goes on in the next, under its values."""
        from rich.text import Text

        for cells in excerpt.lines():
            label = width(cells[0][0]) + 2 if excerpt.labelled else 0
            line, used = Text("  "), 2
            for at, (text, value) in enumerate(cells):
                if at > excerpt.labelled and used + 2 + width(text) > self.console.width:
                    self.console.print(line)
                    line, used = Text(" " * label), label
                line.append(("  " if at else "") + self._fit(text), _sign_style(value))
                used += (2 if at else 0) + width(text)
            self.console.print(line)

    def _table(self, table: Table, first: bool) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        if not first:
            self.console.print()
        if table.title:
            self.console.print(Text(self._fit(table.title), "bold"))
        texts = [[self._fit(cell) for cell in row] for row in table.texts()]
        widest = [max([width(c), *(width(row[i]) for row in texts)]) for i, c in enumerate(table.columns)]
        natural = sum(widest) + 2 * (len(widest) - 1)
        if natural > self.console.width and len(table.columns) > 2:
            fitting = self._fitting(widest) if table.side_by_side else 1
            if fitting < 2:
                self._vertical(table, texts)
                return
            for part in table.parts(fitting):
                self._table(part, first)
                first = False
            return
        # Only a table of two columns (name, text) may wrap: its text folds, nothing is cut.
        rich = RichTable(
            box=SIMPLE_HEAD, show_header=any(table.columns), pad_edge=False, show_edge=False, padding=(0, 1, 0, 0)
        )
        for name, right in zip(table.columns, table.right_aligned(), strict=True):
            rich.add_column(name, justify="right" if right else "left", overflow="fold")
        for at, row in enumerate(texts):
            rich.add_row(*(Text(cell) for cell in row), style="bold" if at in table.emphasis else None)
        self.console.print(rich)

    def _fitting(self, widest: list[int]) -> int:
        """How many columns fit beside each other, the first included."""
        total, fitting = 0, 0
        for size in widest:
            total += size + (2 if fitting else 0)
            if total > self.console.width:
                break
            fitting += 1
        return fitting

    def _vertical(self, table: Table, texts: list[list[str]]) -> None:
        """A record per row, `name  value` per line."""
        from rich.text import Text

        wide = max(map(width, table.columns))
        for at, row in enumerate(texts):
            if at:
                self.console.print()
            for name, cell in zip(table.columns, row, strict=True):
                if not cell:
                    continue
                self.console.print(Text(pad(name, wide) + "  ", "dim").append(cell, "not dim"))


def _sign_style(value: float) -> str:
    if math.isnan(value):
        return "dim"
    return "red" if value < 0 else "dim" if value == 0 else "green"


# --- files ------------------------------------------------------------------------------------------------------------


def _would_be_lost(path: str) -> bool:
    """Whether writing there would replace something: a pipe or a device has nothing to lose."""
    return path != "-" and os.path.lexists(path) and (os.path.isfile(path) or not os.path.exists(path))


def _write_file(path: Path, text: str) -> None:
    """Write whole or not at all: a temporary file beside it, then a rename. Devices and pipes are written directly."""
    import tempfile

    try:
        if path.exists() and not path.is_file():
            path.write_text(text, encoding="utf-8")
            return
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.")
        try:
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
    except OSError as error:
        raise FFNError(f"cannot write {clean(str(path))}: {error.strerror}", code=ExitCode.ENVIRONMENT) from None
