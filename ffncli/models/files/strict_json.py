"""JSON from an untrusted file: refused if it is ambiguous, not a number, too big or too deep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ffncli.errors import FFNError, shown, shown_path
from ffncli.system.files import open_to_read

MOST_CONFIG_BYTES = 10_000_000  # real ones stay below 100 kB


class _Refused(Exception):
    pass


def read_object(path: Path, most_bytes: int, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `path`. Raises FFNError, naming the file, for anything else or over `most_bytes`.

    `constants` allows NaN and Infinity, which Python writes into configs (Mamba-2's time_step_limit).
    """
    return parse_object(_bytes(path, most_bytes), shown_path(path), constants)


def parse_index(path: Path, most_bytes: int) -> dict[str, Any]:
    """The weight_map of a safetensors index: tensor name → shard. Raises FFNError if there is none."""
    shards = read_object(path, most_bytes).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise FFNError(f"{shown_path(path)}: weight_map is missing", "it should map tensor names to shard files")
    return shards


def _bytes(path: Path, most_bytes: int) -> bytes:
    try:
        with open_to_read(path) as file:
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise FFNError(f"cannot read {shown_path(path)}: {error.strerror or error}") from None
    if len(raw) > most_bytes:
        raise FFNError(f"{shown_path(path)} is larger than {most_bytes:,} bytes, far more than such a file needs")
    return raw


def parse_object(raw: bytes, where: str, constants: bool = False) -> dict[str, Any]:
    """The JSON object in `raw`; `where` names it in errors. Duplicate keys, NaN (unless `constants`) and deep
    nesting are refused.
    """
    if not raw.strip():
        raise FFNError(f"{where} is empty", "it should hold a JSON object")
    try:
        text = raw.decode("utf-8")
        constant = float if constants else _no_constant
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=constant, parse_int=_integer)
        if "\\ud" in text.lower():  # half a surrogate pair is valid JSON, but not text
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except _Refused as error:
        raise FFNError(f"{where}: {error}") from None
    except UnicodeError as error:
        at = f" (byte {error.start})" if isinstance(error, UnicodeDecodeError) else ", it has half a surrogate pair"
        raise FFNError(f"{where} is not UTF-8 text{at}") from None
    except json.JSONDecodeError as error:
        raise FFNError(f"{where} is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None
    except RecursionError:
        raise FFNError(f"{where} is nested too deeply") from None
    except ValueError:  # an integer of more than 4300 digits
        raise FFNError(f"{where} holds a number with too many digits") from None
    if not isinstance(value, dict):
        raise FFNError(f"{where} contains a JSON {_kind(value)}, not an object")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        keys: set[str] = set()
        twice = next(key for key, _ in pairs if key in keys or keys.add(key))  # type: ignore[func-returns-value]
        raise _Refused(f"the key {shown(twice)} appears twice")
    return out


def _no_constant(name: str) -> None:
    raise _Refused(f"{name} is not a JSON number")


def _integer(text: str) -> int | float:
    """-0 is a float, as in other readers: nothing can have -0 elements."""
    return -0.0 if text == "-0" else int(text)


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")
