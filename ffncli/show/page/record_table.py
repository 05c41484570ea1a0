"""A record as a notebook shows it: a small table of HTML."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ffncli.show.page.element import element, written

_MOST_ROWS = 100


def record_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """The rows under a caption; floats with four digits, None empty, and how many of many rows are left out."""
    every = [*rows]
    head = element("tr", [element("th", name) for name in columns])
    body = [element("tr", [element("td", _cell(cell)) for cell in row]) for row in every[:_MOST_ROWS]]
    if len(every) > _MOST_ROWS:
        body.append(element("tr", element("td", f"… {len(every) - _MOST_ROWS:,} more", colspan=len(columns))))
    return written(element("table", element("caption", caption), head, body))


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
