"""Build records from JSON: the annotations of a frozen dataclass are the schema of the file.

Types, choices and ranges are checked for every value at any depth, so new fields are checked automatically. msgspec or
pydantic would be an additional package for what `typing` already describes, and importing pydantic takes longer than a
whole `ffn params`.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from functools import cache
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from ffncli.errors import FFNError, shown

_MOST = 10**40  # the FLOPs of the largest block have 30 digits
Check = Callable[[Any], Any]  # the JSON value → the field's value; raises _Mismatch


@dataclass(frozen=True)
class Range:
    """The range of a number, as in `Annotated[int, Range(1, 1000)]`; `above` excludes `low`."""

    low: float = 0
    high: float = math.inf
    above: bool = False

    def check(self, value: Any) -> Any:
        """Return a value in the range. Raises _Mismatch for other values."""
        if value < self.low or value > self.high or (self.above and value == self.low):
            most = "" if self.high == math.inf else f" and at most {self.high:g}"
            raise _Mismatch(f" must be {'above' if self.above else 'at least'} {self.low:g}{most}, got {shown(value)}")
        return value


@dataclass(frozen=True)
class OneOf:
    """The allowed values of a string; an empty string may mean that nothing is known."""

    words: tuple[str, ...]

    def check(self, value: Any) -> Any:
        """Return one of the words. Raises _Mismatch for other values."""
        if value not in self.words:
            raise _Mismatch(f" must be one of {', '.join(filter(None, self.words))}, got {shown(value)}")
        return value


@dataclass(frozen=True)
class Form:
    """A pattern that strings must match."""

    pattern: str

    def check(self, value: Any) -> Any:
        """Return a matching string. Raises _Mismatch for other strings."""
        if not re.fullmatch(self.pattern, value):
            raise _Mismatch(f" does not have the required form, got {shown(value)}")
        return value


Count = Annotated[int, Range(0)]
Positive = Annotated[int, Range(1)]


class _Mismatch(Exception):
    """The exception for a value that its field cannot have; each enclosing record prepends its part of `path`."""

    def __init__(self, why: str, path: str = "") -> None:
        super().__init__(why)
        self.why, self.path = why, path


def record_of(kind: Any, value: Any, where: str, hint: str = "") -> Any:
    """Build a `kind`, a dataclass or an annotation that contains dataclasses, from a JSON value.

    Errors state `where`, the path of the field (`outcomes[3].status`) and what the value must be.
    """
    try:
        return checker(kind)(value)
    except _Mismatch as error:
        path = error.path.removeprefix(".")
        text = f"{path}{error.why}" if path else f"it{error.why}"
        raise FFNError(f"{where}: {text}", hint) from None


def checked_fields(kind: Any, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the values of some fields of a dataclass, each checked as `record_of` checks it."""
    checks = _of_fields(kind)
    try:
        return {name: _at(name, checks[name], value) for name, value in values.items()}
    except _Mismatch as error:
        raise FFNError(f"{where}: {error.path}{error.why}") from None


def known_fields(kind: Any, value: Any, where: str, hint: str = "") -> Any:
    """Build a `kind` as `record_of` does, without fields that it does not have: a later version may write more."""
    names = hints_of(kind)
    fit = {name: one for name, one in value.items() if name in names} if isinstance(value, dict) else value
    return record_of(kind, fit, where, hint)


@cache
def checker(kind: Any) -> Check:
    """Build the check for an annotation. Raises TypeError for an unsupported annotation."""
    origin, args = get_origin(kind), get_args(kind)
    if kind is Any:
        return lambda value: value
    if kind in _PLAIN:
        return _PLAIN[kind]
    if is_dataclass(kind):
        return _record(kind)
    if origin is Annotated:
        return _limited(checker(args[0]), kind.__metadata__)
    if origin is Literal:
        return OneOf(args).check
    if origin in (Union, UnionType) and len(args) == 2 and type(None) in args:
        inner = checker(next(one for one in args if one is not type(None)))
        return lambda value: None if value is None else inner(value)
    if origin is tuple and len(args) == 2 and args[1] is ...:
        return _tuple(checker(args[0]))
    if origin is Mapping and args[0] is str:
        return _mapping(checker(args[1]))
    raise TypeError(f"no check for {kind}")


def hints_of(kind: Any) -> dict[str, Any]:
    """Return the annotations of a record's fields, including limits."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in fields(kind)}


# --- the kinds --------------------------------------------------------------------------------------------------------


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) >= _MOST:
        raise _Mismatch(f" must be a whole number, got {shown(value)}")
    return value


def _number(value: Any) -> float:
    try:
        number = float(value) if type(value) in (int, float) else math.nan
    except OverflowError:
        number = math.nan
    if not math.isfinite(number):
        raise _Mismatch(f" must be a number, got {shown(value)}")
    return number


def _flag(value: Any) -> bool:
    if type(value) is not bool:
        raise _Mismatch(f" must be true or false, got {shown(value)}")
    return value


def _text(value: Any) -> str:
    if type(value) is not str:
        raise _Mismatch(f" must be a string, got {shown(value)}")
    return value


_PLAIN: Mapping[Any, Check] = {int: _whole, float: _number, bool: _flag, str: _text}


def _limited(inner: Check, limits: tuple[Any, ...]) -> Check:
    def check(value: Any) -> Any:
        value = inner(value)
        for limit in limits:
            limit.check(value)
        return value

    return check


def _tuple(inner: Check) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise _Mismatch(f" must be a list, got {shown(value)}")
        return tuple(_at(f"[{at}]", inner, one) for at, one in enumerate(value))

    return check


def _mapping(inner: Check) -> Check:
    def check(value: Any) -> Any:
        if not isinstance(value, dict):
            raise _Mismatch(f" must be an object, got {shown(value)}")
        return {key: _at(f"[{shown(key)}]", inner, one) for key, one in value.items()}

    return check


@cache
def _of_fields(kind: Any) -> dict[str, Check]:
    return {name: checker(hint) for name, hint in hints_of(kind).items()}


def _record(kind: Any) -> Check:
    checks = _of_fields(kind)
    needed = [f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING]

    def check(value: Any) -> Any:
        if isinstance(value, kind):
            return value
        if not isinstance(value, dict):
            raise _Mismatch(f" must be an object, got {shown(value)}")
        if unknown := [name for name in value if name not in checks]:
            raise _Mismatch(f" has the unknown field {shown(unknown[0])}")
        if missing := [name for name in needed if name not in value]:
            raise _Mismatch(f" has no field {missing[0]}")
        values = {name: _at(f".{name}", checks[name], one) for name, one in value.items()}
        try:
            return kind(**values)
        except FFNError as error:  # its fields are valid individually, but not together
            raise _Mismatch(f" is impossible: {error.message}") from None

    return check


def _at(place: str, check: Check, value: Any) -> Any:
    try:
        return check(value)
    except _Mismatch as error:
        raise _Mismatch(error.why, place + error.path) from None
