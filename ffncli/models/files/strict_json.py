"""Read JSON from an untrusted file: anything ambiguous, NaN, too big or too deep is refused. Fields reads a config's
values just as strictly."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

from ffncli.block.recipe import size
from ffncli.errors import FFNError, shown, shown_path
from ffncli.options.accept import MAX_SIZE
from ffncli.system.files import open_to_read

MOST_CONFIG_BYTES = 10_000_000  # real configs stay below 100 kB


class _Refused(Exception):
    pass


def read_object(path: Path, most_bytes: int, constants: bool = False) -> dict[str, Any]:
    """Read the JSON object in `path`, which may have up to `most_bytes` bytes.

    `constants` allows NaN and Infinity, which Python writes into configs (Mamba-2's time_step_limit).
    """
    return parse_object(_bytes(path, most_bytes), shown_path(path), constants)


def parse_index(path: Path, most_bytes: int) -> dict[str, Any]:
    """Return the weight_map of a safetensors index, which maps tensor names to shards."""
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
    """Parse the JSON object in `raw`; `where` names it in errors. Raises FFNError for duplicate keys, deep nesting, and
    NaN unless `constants` is set."""
    if not raw.strip():
        raise FFNError(f"{where} is empty", "it should hold a JSON object")
    try:
        text = raw.decode("utf-8")
        constant = float if constants else _no_constant
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=constant, parse_int=_integer)
        if "\\ud" in text.lower():  # half a surrogate pair is valid JSON, but not valid Unicode
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
    except ValueError:  # an integer with more than 4300 digits
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
    """Parse an integer; -0 becomes a float, as in other readers, since nothing can have -0 elements."""
    return -0.0 if text == "-0" else int(text)


def _kind(value: object) -> str:
    return {list: "array", str: "string", bool: "boolean", type(None): "null"}.get(type(value), "number")


REQUIRED: Any = object()  # no default: the field is required


@dataclass(frozen=True)
class Fields:
    """Strict access to a config's values: every error names the file, the field and the value.

    A name may list alternative spellings (`hidden_size|n_embed`), of which the first one present is used, and may refer
    to a nested object (`ffn_config.ffn_hidden_size`). `looked_up` collects the names that were read, including nested
    names; `not_run` collects the reasons why the model can be counted but not run.
    """

    values: Mapping[str, Any]
    where: str
    looked_up: set[str] = field(default_factory=set, compare=False, repr=False)
    prefix: str = ""
    not_run: dict[str, None] = field(default_factory=dict, compare=False, repr=False)

    def inside(self, name: str) -> "Fields":
        """Return the nested config with that name, which must be an object; an empty name returns this config."""
        if not name:
            return self
        inner = self.get(name, kind="an object")
        if not isinstance(inner, dict):
            raise self.wrong(name, inner, "an object")
        return Fields(inner, f"{self.where}: {name}", self.looked_up, f"{self.prefix}{name}.", self.not_run)

    def get(self, names: str, default: Any = REQUIRED, kind: str = "a value") -> Any:
        """Return the value, or `default` if absent or null; other spellings with this value also count as read."""
        for name in names.split("|"):
            if (value := self._value(name)) is not None:
                same = [other for other in names.split("|") if self.values.get(other) == value]
                self.looked_up.update(self.prefix + other for other in same)
                return value
        if default is REQUIRED:
            spellings = names.split("|")
            first = next((n for n in spellings if n in self.values), spellings[0])  # present, but null
            others = [n for n in spellings if n != first]
            problem = "is null" if first in self.values else "is missing"
            also = f" (or {', '.join(others)})" if others else ""
            raise FFNError(f"{self.where}: {first}{also} {problem}", f"this family has no default for it; give {kind}")
        return default

    @overload
    def integer(self, names: str, *, low: int = 1, high: int = MAX_SIZE) -> int: ...
    @overload
    def integer(self, names: str, default: int, low: int = 1, high: int = MAX_SIZE) -> int: ...
    @overload
    def integer(self, names: str, default: None, low: int = 1, high: int = MAX_SIZE) -> int | None: ...
    def integer(self, names: str, default: Any = REQUIRED, low: int = 1, high: int = MAX_SIZE) -> int | None:
        """Return a whole number from `low` to `high`, or `default`."""
        value = self.get(names, default, "a whole number")
        return value if value is default else size(f"{self.where}: {self.name(names)}", value, high, low)

    def number(self, names: str, default: float) -> float:
        """Return a finite number."""
        value = self.get(names, default)
        if type(value) not in (int, float) or not abs(value) < 1e30:
            raise self.wrong(names, value, "a number")
        return float(value)

    def flag(self, names: str, default: bool) -> bool:
        """Return true or false."""
        value = self.get(names, default)
        if type(value) is not bool:
            raise self.wrong(names, value, "true or false")
        return value

    def text(self, names: str, default: Any = REQUIRED) -> str:
        """Return a string."""
        value = self.get(names, default, "a string")
        if type(value) is not str:
            raise self.wrong(names, value, "a string")
        return value

    def integers(self, names: str) -> tuple[int, ...]:
        """Return a list of whole numbers; empty if the field is absent."""
        value = self.get(names, [])
        if type(value) is not list or any(type(v) is not int for v in value):
            raise self.wrong(names, value, "a list of whole numbers")
        return tuple(value)

    def pass_over(self, *names: str) -> None:
        """Mark fields as read although their values are not used, since another field decides."""
        self.looked_up.update(self.prefix + name for name in names)

    def name(self, names: str) -> str:
        """Return the spelling that the config uses, else the first spelling."""
        return next((n for n in names.split("|") if self._value(n) is not None), names.split("|")[0])

    def _value(self, name: str) -> Any:
        """Return the value of a name or, failing that, of the path that its dots describe; otherwise None."""
        self.looked_up.add(self.prefix + name)
        if name in self.values or "." not in name:
            return self.values.get(name)
        value: Any = self.values
        for part in name.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def wrong(self, names: str, value: object, wanted: str) -> FFNError:
        """Build the error for an invalid value."""
        return FFNError(f"{self.where}: {self.name(names)} must be {wanted}, got {shown(value)}")
