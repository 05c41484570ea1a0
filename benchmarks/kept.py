"""Results that grow row by row: each is on the disk as soon as it is known, and a later run goes on where one ended."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path


def cell(value: object) -> str:
    """A value as the results have it: full precision, `true|false`, empty for unknown."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value:.9g}" if isinstance(value, float) else str(value)


def read(path: str | Path) -> list[dict[str, str]]:
    """The whole rows of a CSV; a last line without its end, which a stopped run leaves, is none."""
    text = Path(path).read_text("utf-8") if Path(path).exists() else ""
    whole = text[: text.rfind("\n") + 1]
    return list(csv.DictReader(io.StringIO(whole)))


class Kept:
    """The rows of a CSV, and the place where new ones go. Without a path they are only held.

    `about` (machine and versions) stands in every new row.
    """

    def __init__(self, path: str | None, columns: Sequence[str], about: Mapping[str, str]) -> None:
        self.path, self.columns, self.about = path, (*columns, *about), dict(about)
        self.rows = read(path) if path else []
        if not path:
            return
        head = _line(self.columns)
        there = Path(path).read_text("utf-8") if Path(path).exists() else ""
        if self.rows and not there.startswith(head):
            raise SystemExit(f"{path} has other columns than this script writes: move it away, or give another --save")
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        whole = there[: there.rfind("\n") + 1] if there.startswith(head) else head
        if whole != there:
            Path(path).write_text(whole, "utf-8")

    def add(self, row: Mapping[str, object]) -> None:
        """Append a row and wait until the disk has it."""
        self.add_all([row])

    def add_all(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows that belong together, in one write: what is of one piece is there or it is not."""
        full = [{name: cell({**self.about, **row}.get(name)) for name in self.columns} for row in rows]
        self.rows += full
        if self.path:
            with open(self.path, "a", encoding="utf-8", newline="") as file:
                file.write("".join(_line(row.values()) for row in full))
                file.flush()
                os.fsync(file.fileno())

    def has(self, **values: object) -> bool:
        """Whether a row with these values is there."""
        return bool(self.of(**values))

    def of(self, **values: object) -> list[dict[str, str]]:
        """The rows with these values."""
        wanted = {name: cell(value) for name, value in values.items()}
        return [row for row in self.rows if all(row[name] == value for name, value in wanted.items())]


def _line(cells: Iterable[str]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()
