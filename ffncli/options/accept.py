"""What options accept: converters for strings from a shell and for Python values, each with words for what it takes."""

import operator
import os
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import islice
from math import inf, nan
from typing import Any, Generic, TypeVar, overload

from ffncli.errors import FFNError, option, shown

T = TypeVar("T")
MAX_SIZE = 2**31 - 1  # no real tensor axis is larger; beyond it, torch overflows in places
MAX_INTEGER = 2**63 - 1
_MOST_VALUES = 1000  # in a comma-separated list
_MOST_IDS = 1_000_000
_BYTES = (bytes, bytearray, memoryview)
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PREFIXES = " KMGT"


@dataclass(frozen=True)
class Accepts(Generic[T]):
    """A converter, and the `words` that describe what it accepts: `a whole number from 1`.

    `convert` raises TypeError or ValueError for any other value, or an FFNError with a better message. `none`: None is
    a value of its own, not a request for the default. `hint` returns a hint for the error that a wrong value causes.
    `values` lists the values for shell completion, if there are only a few. `metavar` is the placeholder for such a
    value in the help; `repeat`: several values are accepted, so an option may be given several times.
    """

    words: str
    convert: Callable[[Any], T]
    none: bool = False
    hint: Callable[[Any], str] = lambda value: ""
    values: tuple[str, ...] = ()
    metavar: str | None = None
    repeat: bool = False


def converted(name: str, value: object, accepts: Accepts[T]) -> T:
    """Convert an argument. Raises FFNError with the argument's name and the values that it accepts."""
    try:
        return accepts.convert(value)
    except FFNError as error:
        raise error.within(option(name)) from None
    except Exception:  # the methods of a caller's object may raise anything
        hint = ""
        with suppress(Exception):
            hint = accepts.hint(value)
        raise FFNError(f"{option(name)} must be {accepts.words}, got {shown(value)}", hint) from None


def instance(kind: type[T], words: str) -> Accepts[T]:
    """Accept an object of this class, unchanged."""

    def convert(value: Any) -> T:
        if not isinstance(value, kind):
            raise TypeError
        return value

    return Accepts(words, convert)


# --- numbers ----------------------------------------------------------------------------------------------------------


def _is_bool(value: Any) -> bool:
    """Return whether the value is a bool of Python, NumPy or torch."""
    return isinstance(value, bool) or str(getattr(value, "dtype", "")).rpartition(".")[2] == "bool"


def whole_number(value: Any) -> int:
    """Convert an integer of any type except bool (numpy's types included), or a string of digits."""
    if _is_bool(value):
        raise TypeError
    if not isinstance(value, str):
        return operator.index(value)
    if not re.fullmatch(r"\s*[-+]?[0-9]{1,4000}\s*", value, re.ASCII):
        raise ValueError
    return int(value)


def whole(low: int, high: int = MAX_INTEGER) -> Accepts[int]:
    """Accept a whole number from `low` to `high`."""

    def convert(value: Any) -> int:
        number = whole_number(value)
        if not low <= number <= high:
            raise ValueError
        return number

    limit = f" to {high}" if high not in (MAX_SIZE, MAX_INTEGER) else ""
    return Accepts(f"a whole number from {low}{limit}", convert, metavar="N")


def real(words: str, allowed: Callable[[float], bool], metavar: str = "X") -> Accepts[float]:
    """Accept a number for which `allowed` is true; NaN is never accepted."""

    def convert(value: Any) -> float:
        if _is_bool(value) or isinstance(value, _BYTES):  # float() also reads bytes as text
            raise TypeError
        number = float(value)
        if number != number or not allowed(number):
            raise ValueError
        return number

    return Accepts(words, convert, metavar=metavar)


COUNT = whole(1, MAX_SIZE)
NATURAL = whole(0)
THREADS = whole(1, 4096)
RANKS = whole(1, 65536)
PROBABILITY = real("a number from 0 and below 1", lambda x: 0 <= x < 1, "P")
SHARE = real("a number above 0 and at most 1", lambda x: 0 < x <= 1, "P")
ABOVE_ZERO = real("a number above 0", lambda x: 0 < x < inf)
FROM_ZERO = real("a number from 0", lambda x: 0 <= x < inf)


def percentage(most: float = inf, zero: bool = False) -> Accepts[float]:
    """Accept a difference written as `3%` or 0.03, up to `most`, and above 0 (or from 0 if `zero`).

    A bare number of 1 or more is rejected, because it is probably meant as a percentage.
    """

    def convert(value: Any) -> float:
        number, bare = _percent(value)
        if not (0 <= number <= most and number < inf and (zero or number)) or (bare and number >= 1):
            raise ValueError
        return number

    def hint(value: Any) -> str:
        number, bare = _percent(value)
        likely = bare and 1 <= number <= 100 * min(most, 1)
        return f"that would be {number:.0%}: write {str(value).strip()}%" if likely else ""

    limit = "" if most == inf else f" and at most {most:.0%},"
    return Accepts(f"a percentage {'from' if zero else 'above'} 0{limit} such as 3%", convert, hint=hint, metavar="X%")


def _percent(value: Any) -> tuple[float, bool]:
    """Return (the share of 1, or NaN if it is not a number; whether it was written without %)."""
    text = str(value).strip()
    try:
        return float(text.removesuffix("%").rstrip()) / (100 if text.endswith("%") else 1), not text.endswith("%")
    except ValueError:
        return nan, True


_DAY = real("a time up to a day", lambda x: 0 < x <= 86_400)


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|min|h|)", value.strip())
        value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    return _DAY.convert(value)


SECONDS = Accepts("a time up to a day, as in 20s or 2m", _seconds, metavar="TIME")


def byte_count(value: Any) -> int:
    """Convert `512MB`, `4G`, `2.5GiB` or a number of bytes; prefixes with `i` are powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(I?)B?|B?)", str(value).strip().upper())
    unit = (1024 if match[3] else 1000) ** _PREFIXES.index(match[2] or " ") if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if isinstance(value, bool) or not 0 < size < 2**63:
        raise ValueError
    return size


BYTES = Accepts("a size, as in 512MB or 4GiB", byte_count)

# --- text and flags ---------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Return a string as it is, or a path as a string."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError
    return path


def _path(value: Any) -> str:
    path = text(value)
    if "\0" in path:
        raise FFNError(f"{shown(path)} is not a file name")
    return path


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


TEXT = Accepts("a string", text)
PATH = Accepts("a path", _path, metavar="FILE")
FLAG = Accepts("True or False", _flag)


def number_or_text(words: str) -> Accepts[str]:
    """Accept a whole number, or a string with its own syntax (`4x`, `decoder.3`), which is parsed later."""
    return Accepts(words, lambda value: value if isinstance(value, str) else str(whole_number(value)), metavar="N")


def choice(*words: str) -> Accepts[str]:
    """Accept one of these words."""

    def convert(value: Any) -> str:
        word = text(value).strip()
        if word not in words:
            raise FFNError(f"unknown value {shown(word)}", f"use one of {', '.join(words)}")
        return word

    return Accepts("a string", convert, values=words, metavar="NAME")


# --- several ----------------------------------------------------------------------------------------------------------


def _members(value: Any) -> Iterable[Any]:
    """Return the members of a list, or a single value as its only member; a 0-dimensional array is a single value.

    A mapping and bytes are not lists. Raises FFNError for a list without an end.
    """
    if isinstance(value, (str, os.PathLike, Mapping, *_BYTES)) or not isinstance(value, Iterable):
        return (value,)
    if getattr(value, "ndim", 1) == 0:
        return (value,)
    members = [*islice(value, _MOST_IDS + 1)]
    if len(members) > _MOST_IDS:
        raise FFNError(f"at most {_MOST_IDS:,} values")
    return members


@overload
def listed(value: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None) -> tuple[str, ...]: ...
@overload
def listed(value: T | Iterable[T] | None) -> tuple[T, ...]: ...
def listed(value: Any) -> tuple[Any, ...]:
    """Return the converted value of a field that accepts one or several values as a tuple; () for None."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def several(one: Accepts[T], words: str, least: int = 1) -> Accepts[tuple[T, ...]]:
    """Accept one value or several (a repeated option, a list); a comma is part of a value."""

    def convert(value: Any) -> tuple[T, ...]:
        values = tuple(one.convert(member) for member in _members(value))
        if len(values) < least:
            raise ValueError
        return values

    return Accepts(words, convert, metavar=one.metavar, repeat=True)


def comma_list(one: Accepts[T], words: str) -> Accepts[tuple[T, ...]]:
    """Accept one value or several; in a shell these are a comma-separated list: `1,32,512`."""

    def convert(value: Any) -> tuple[T, ...]:
        parts = [
            part for member in _members(value) for part in (member.split(",") if isinstance(member, str) else (member,))
        ]
        if len(parts) > _MOST_VALUES:
            raise FFNError(f"at most {_MOST_VALUES} values, got {len(parts)}")
        if not parts:
            raise ValueError
        return tuple(one.convert(part) for part in parts)

    return Accepts(words, convert, values=one.values, metavar=f"{one.metavar},...", repeat=True)


def joined(words: str) -> Accepts[str]:
    """Accept whole numbers, or strings that are parsed later (`0,3`, `2:5`, `all`), and join them with commas."""
    one = number_or_text(words)
    return Accepts(
        words, lambda value: ",".join(map(one.convert, _members(value))), metavar=f"{one.metavar},...", repeat=True
    )


def outside_brackets(text: str) -> list[str]:
    """Split a string at the commas outside brackets: `W1[0,3]=5,W2[1,1]=0`.

    A comma is inside if the next bracket closes. A pattern that looks ahead from every comma would take minutes for a
    long string.
    """
    groups: list[list[str]] = [[]]
    next_bracket = ""
    for piece in reversed(text.split(",")):
        if groups[-1] and next_bracket != "]":
            groups.append([])
        groups[-1].append(piece)
        first = re.search(r"[\[\]]", piece)
        next_bracket = first[0] if first else next_bracket
    return [",".join(reversed(group)) for group in reversed(groups)]


def _prompt(value: Any) -> str | tuple[str, ...]:
    """Return one prompt as a string, several as a tuple; calls that accept only one prompt reject the tuple later."""
    texts = tuple(text(one) for one in _members(value))
    return texts[0] if len(texts) == 1 else texts


def _ids(value: Any) -> tuple[int, ...]:
    """Convert typed strings, or whole numbers, to token ids."""
    words = [
        word for one in _members(value) for word in (one.replace(",", " ").split() if isinstance(one, str) else [one])
    ]
    if not words or len(words) > _MOST_IDS:
        raise ValueError
    return tuple(whole(0, MAX_SIZE).convert(word) for word in words)


PROMPT = Accepts[Any]("a string", _prompt, metavar="TEXT", repeat=True)
IDS = Accepts("token ids such as 1,2,3", _ids, metavar="N,...", repeat=True)
NUMBERS = joined("one or more whole numbers, or a string as typed in a shell")
TEXTS = several(TEXT, "one or more strings", least=0)
PATHS = several(PATH, "one or more paths", least=0)
COUNTS = comma_list(COUNT, "one or more whole numbers from 1")
NAMES = comma_list(Accepts("a name", lambda value: text(value).strip(), metavar="NAME"), "one or more names")
FORMATS = replace(NAMES, words="one or more formats such as 'fp8'")


def optional(accepts: Accepts[T], words: str, *nothing: str) -> Accepts[T | None]:
    """Also accept None, written in a shell as one of the words `nothing` (such as `all`)."""

    def convert(value: Any) -> T | None:
        is_none = value is None or (isinstance(value, str) and value.strip() in nothing)
        return None if is_none else accepts.convert(value)

    return Accepts(words, convert, none=True, metavar="|".join([accepts.metavar or "", *nothing]))
