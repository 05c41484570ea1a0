"""A record of an answer in JSON, whatever its keys: its values as a list, its lists of records as tables."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ffncli.show.page.document import Child, definitions, element

_MOST_ROWS = 1_000  # of a table inside the answer; the main table has all
_MOST_LISTED, _MOST_CHARACTERS = 8, 200
# What names a record: a table of the records inside it repeats these.
_NAMES = (
    "machine", "case", "device", "source", "stack", "layer", "expert", "name", "step", "kernel", "axis", "unit", "row",
    "check", "finding", "group",
)  # fmt: skip
Record = Mapping[str, Any]


class Records:
    """Turns records into elements. `data` are the tables, each named after `name`; the list `main` is the one called
    `name` itself."""

    def __init__(self, name: str, main: object) -> None:
        self.name, self.main = name, main
        self.data: dict[str, Any] = {}

    def children(self, record: Record, title: str = "") -> Iterator[Child]:
        """Yield the record's values as a list, then a table or a list for each list of records, and for each record."""
        values, texts, inner = list[tuple[str, str]](), list[Child](), list[tuple[str, Any]]()
        for key, value in record.items():
            if isinstance(value, Mapping) or _is_records(value):
                inner.append((key, value))
            elif isinstance(value, str) and "\n" in value:
                texts += [element("h3", _words(title, key)), element("pre", value, tabindex="0")]
            elif value not in (None, "", []) and (text := _cell(value)) is not None:
                values.append((key, f"{text:.6g}" if isinstance(text, float) else str(text)))
        if values:
            yield element("h3", title) if title else None
            yield definitions(values)
        yield from texts
        for key, value in inner:
            heading = _words(title, key)
            yield from self.children(value, heading) if isinstance(value, Mapping) else self.tables(heading, value)

    def tables(self, title: str, rows: Sequence[Record], named: Sequence[Record] = ()) -> Iterator[Child]:
        """Yield a table of the rows, then one for each list of records inside them; `named` has what to write before
        each row."""
        flat = [dict(_flat(row)) for row in rows]
        inside = {key: None for row in flat for key, value in row.items() if _is_records(value)}
        cells = [{key: cell for key, value in row.items() if (cell := _cell(value)) is not None} for row in flat]
        if named:
            cells = [{**names, **row} for names, row in zip(named, cells, strict=True)]
        columns = list(dict.fromkeys(key for row in cells for key in row))
        if columns:
            main = rows is self.main
            name = self.name if main else f"{self.name}-{len(self.data) + 1}"
            kept = cells if main else cells[:_MOST_ROWS]
            self.data[name] = {"columns": columns, "rows": [[row.get(key) for key in columns] for row in kept]}
            yield element("h3", title)
            yield element("div", data_table=name)
            if len(kept) < len(cells):
                yield element("p", f"Only the first {len(kept):,} of {len(cells):,} rows.", class_="muted")
        for key in inside:
            pairs = [(one, row) for row, cell in zip(flat, cells, strict=True) if _is_records(row.get(key))
                     for names in [{name: cell[name] for name in _NAMES if name in cell}]
                     for one, row in [(names, inner) for inner in row[key]]]  # fmt: skip
            yield from self.tables(_words(title, key), [row for _, row in pairs], [names for names, _ in pairs])


def _flat(record: Record, before: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of a record and of the records inside it, as in `min_at.token`."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{key}.")
        else:
            yield before + key, value


def _is_records(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)


def _words(title: str, key: str) -> str:
    words = key.replace("_", " ").replace(".", " ")
    return f"{title}: {words}" if title else words[:1].upper() + words[1:]


def _cell(value: Any) -> Any:
    """Return a value for a table: a list of values as text; None for lists of lists, which are tensors."""
    if isinstance(value, list):
        if not value or any(isinstance(one, (list, Mapping)) for one in value):
            return None
        words = [f"{one:.4g}" if isinstance(one, float) else str(_cell(one)) for one in value[:_MOST_LISTED]]
        value = ", ".join(words) + (" …" if len(value) > _MOST_LISTED else "")
    if isinstance(value, str):
        return (value if len(value) <= _MOST_CHARACTERS else value[: _MOST_CHARACTERS - 1] + "…") or None
    return "yes" if value is True else "no" if value is False else value


_LONGEST = 80  # characters of a prompt in a title


def titled(name: str, prompt: str) -> str:
    """Return a page's title: the name, and the prompt, cut if it is long."""
    cut = prompt if len(prompt) <= _LONGEST else prompt[: _LONGEST - 1] + "…"
    return f"{name}: “{cut}”" if name and prompt else name
