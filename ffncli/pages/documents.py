"""JSON answers as sections: `ffn verify` (a certificate, or its checks) and `ffn compare` as records and a table, those
about layers as `layers.py` has them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ffncli.errors import FFNError, shown, shown_path
from ffncli.models.files.strict_json import read_object
from ffncli.pages.layers import layer_parts, layer_rows
from ffncli.show.page.document import PageParts, Section
from ffncli.show.page.element import Child, element

_MOST_BYTES = 50_000_000
_TITLES = {"verify": "verified", "compare": "compared", "bench": "results"}


def document_parts(path: Path, name: str) -> PageParts:
    """The section of one JSON answer. Raises FFNError for any other JSON."""
    values = read_object(path, _MOST_BYTES)
    if (layers := layer_rows(values)) is not None:
        return layer_parts(path, name, layers, values.get("model"))
    command, rows = values.get("command"), values.get("rows")
    if command not in _TITLES or not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        what = (
            f"the JSON of ffn {command}" if isinstance(command, str) and command.isalpha() else "not an answer of ffn"
        )
        raise FFNError(
            f"{shown_path(path)} is {what}",
            "a page is made of results, saved traces, ffn verify, ffn compare, ffn experts and ffn trace --layer all",
        )
    children: list[Child] = []
    for key in ("certificate", "block"):
        if isinstance(record := values.get(key), Mapping):
            children += [element("h3", key.capitalize()), _record(record)]
    children += [element("h3", "Rows"), element("div", data_table=name)]
    title = f"{path.name}: {_TITLES[command]}"
    return PageParts((Section(f"{name}-section", title, tuple(children)),), {name: _table(rows)})


def _record(record: Mapping[str, Any]) -> Child:
    """A record's fields with their values; those of records inside it in the same list."""
    out: list[Child] = []
    for key, value in record.items():
        for inner, one in value.items() if isinstance(value, Mapping) else [(key, value)]:
            if one not in (None, "", []):
                out += [element("dt", str(inner)), element("dd", _text(one))]
    return element("dl", out)


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return shown(value) if isinstance(value, list) else str(_cell(value))


def _table(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows under the keys that are plain values."""
    keys = list(dict.fromkeys(key for row in rows for key in row))
    plain = [key for key in keys if not any(isinstance(row.get(key), (list, dict)) for row in rows)]
    return {"columns": plain, "rows": [[_cell(row.get(key)) for key in plain] for row in rows]}


def _cell(value: Any) -> Any:
    return "yes" if value is True else "no" if value is False else value
