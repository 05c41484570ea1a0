"""What a notebook shows of a record: tables of HTML."""

from collections.abc import Iterable, Sequence
from dataclasses import is_dataclass

from ffncli.errors import clean

_MOST_ROWS = 100
_SIMPLE = (str, int, float)


class Shown:
    """A record that a notebook shows as tables: its values, and each of its lists of records."""

    def _repr_html_(self) -> str:
        values = {name: value for name, value in vars(self).items() if not name.startswith("_")}
        single = [(name, value) for name, value in values.items() if isinstance(value, _SIMPLE) and value != ""]
        parts = [record_table(type(self).__name__, ("", ""), single)]
        for name, rows in values.items():
            if isinstance(rows, (tuple, list)) and rows and all(is_dataclass(row) for row in rows):
                cells = [{key: one for key, one in vars(row).items() if isinstance(one, _SIMPLE)} for row in rows]
                columns = list(dict.fromkeys(key for row in cells for key in row))
                parts.append(record_table(name, columns, [[row.get(key) for key in columns] for row in cells]))
        return "".join(parts)


def record_table(caption: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return rows as an HTML table with a caption; floats have four digits; if rows are omitted, the last row says how
    many."""
    every = [*rows]
    body = ["".join(f"<td>{_text(cell)}</td>" for cell in row) for row in every[:_MOST_ROWS]]
    if len(every) > _MOST_ROWS:
        body.append(f'<td colspan="{len(columns)}">… {len(every) - _MOST_ROWS:,} more</td>')
    head = "".join(f"<th>{_text(name)}</th>" for name in columns) if any(columns) else ""
    lines = "".join(f"<tr>{line}</tr>" for line in [head, *body] if line)
    return f"<table><caption>{_text(caption)}</caption>{lines}</table>"


def _text(value: object) -> str:
    if value is None:
        return ""
    from html import escape  # not needed at start-up

    return escape(clean(f"{value:.4g}" if isinstance(value, float) else str(value)))
