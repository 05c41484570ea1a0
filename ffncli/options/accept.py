"""What an option accepts: one converter for the text of a shell and for Python values, and the words for both."""

from __future__ import annotations

import operator
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf, nan
from typing import Any, Generic, TypeVar, overload

from ffncli.errors import FFNError, shown

T = TypeVar("T")
MAX_SIZE = 2**31 - 1  # no tensor axis in use is larger; beyond it torch overflows in places
MAX_INTEGER = 2**63 - 1
_MOST_VALUES = 1000  # of a comma list
_MOST_IDS = 1_000_000
_SECONDS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_PREFIXES = " KMGT"


@dataclass(frozen=True)
class Accepts(Generic[T]):
    """A converter and the `words` for what it takes: `a whole number from 1`.

    `convert` raises TypeError or ValueError for anything else, or an FFNError that says more. `none`: None is a value,
    not the default. `hint` adds to the error what a wrong value suggests. `values` are what a shell offers, if there
    are few.
    """

    words: str
    convert: Callable[[Any], T]
    none: bool = False
    hint: Callable[[Any], str] = lambda value: ""
    values: tuple[str, ...] = ()


# --- numbers ----------------------------------------------------------------------------------------------------------


def whole_number(value: Any) -> int:
    """A whole number of any integer type (numpy's too) but bool, or digits."""
    if isinstance(value, bool):
        raise TypeError
    if not isinstance(value, str):
        return operator.index(value)
    if not re.fullmatch(r"\s*[-+]?[0-9]{1,4000}\s*", value, re.ASCII):
        raise ValueError
    return int(value)


def whole(low: int, high: int = MAX_INTEGER) -> Accepts[int]:
    """A whole number from `low` to `high`."""

    def convert(value: Any) -> int:
        number = whole_number(value)
        if not low <= number <= high:
            raise ValueError
        return number

    limit = f" to {high}" if high not in (MAX_SIZE, MAX_INTEGER) else ""
    return Accepts(f"a whole number from {low}{limit}", convert)


def real(words: str, allowed: Callable[[float], bool]) -> Accepts[float]:
    """A number for which `allowed` holds; NaN never is."""

    def convert(value: Any) -> float:
        if isinstance(value, bool):
            raise TypeError
        number = float(value)
        if number != number or not allowed(number):
            raise ValueError
        return number

    return Accepts(words, convert)


COUNT = whole(1, MAX_SIZE)
NATURAL = whole(0)
THREADS = whole(1, 4096)
RANKS = whole(1, 65536)
PROBABILITY = real("a number from 0 and below 1", lambda x: 0 <= x < 1)
SHARE = real("a number above 0 and at most 1", lambda x: 0 < x <= 1)
ABOVE_ZERO = real("a number above 0", lambda x: 0 < x < inf)
FROM_ZERO = real("a number from 0", lambda x: 0 <= x < inf)


def percentage(most: float = inf, zero: bool = False) -> Accepts[float]:
    """A difference as `3%` or 0.03, up to `most`, above 0, or from 0 if `zero`.

    A bare number of 1 or more is refused: it is likely a percentage.
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
    return Accepts(f"a percentage {'from' if zero else 'above'} 0{limit} such as 3%", convert, hint=hint)


def _percent(value: Any) -> tuple[float, bool]:
    """(the number, or NaN for none; whether it was written without %)."""
    text = str(value).strip()
    try:
        return float(text.removesuffix("%").rstrip()) / (100 if text.endswith("%") else 1), not text.endswith("%")
    except ValueError:
        return nan, True


def _seconds(value: Any) -> float:
    if isinstance(value, str):
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|min|h|)", value.strip())
        value = float(match[1]) * _SECONDS[match[2]] if match else 0.0
    if isinstance(value, bool) or not 0 < float(value) <= 86_400:
        raise ValueError
    return float(value)


SECONDS = Accepts("a time up to a day, as in 20s or 2m", _seconds)


def byte_count(value: Any) -> int:
    """`512MB`, `4G`, `2.5GiB` or a number of bytes; with `i` it is in powers of 1024."""
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(I?)B?|B?)", str(value).strip().upper())
    unit = (1024 if match[3] else 1000) ** _PREFIXES.index(match[2] or " ") if match else 0
    size = int(float(match[1]) * unit) if match else 0
    if isinstance(value, bool) or not 0 < size < 2**63:
        raise ValueError
    return size


BYTES = Accepts("a size, as in 512MB or 4GiB", byte_count)

# --- text and flags ---------------------------------------------------------------------------------------------------


def text(value: Any) -> str:
    """Text, or a path as text."""
    path = os.fspath(value) if isinstance(value, os.PathLike) else value
    if not isinstance(path, str):
        raise TypeError
    return path


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


TEXT = Accepts("text", text)
PATH = Accepts("a path", text)
FLAG = Accepts("True or False", _flag)


def number_or_text(words: str) -> Accepts[str]:
    """A whole number, or text in a form of its own (`4x`, `decoder.3`) that a later check reads."""
    return Accepts(words, lambda value: value if isinstance(value, str) else str(whole_number(value)))


def choice(*words: str) -> Accepts[str]:
    """One of some words."""

    def convert(value: Any) -> str:
        word = text(value).strip()
        if word not in words:
            raise FFNError(f"unknown value {shown(word)}", f"use one of {', '.join(words)}")
        return word

    return Accepts("text", convert, values=words)


# --- several ----------------------------------------------------------------------------------------------------------


def _members(value: Any) -> Iterable[Any]:
    """The members of a list, or the value alone; an array without axes is one number."""
    if isinstance(value, str | os.PathLike) or not isinstance(value, Iterable) or getattr(value, "ndim", 1) == 0:
        return (value,)
    return value


@overload
def listed(value: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None) -> tuple[str, ...]: ...
@overload
def listed(value: T | Iterable[T] | None) -> tuple[T, ...]: ...
def listed(value: Any) -> tuple[Any, ...]:
    """The values of a field that takes one or several, as its record has converted them; () for None."""
    return value if isinstance(value, tuple) else () if value is None else (value,)


def several(one: Accepts[T], words: str, least: int = 1) -> Accepts[tuple[T, ...]]:
    """One or several, as they are: a repeated option, a list; a comma is part of a text."""

    def convert(value: Any) -> tuple[T, ...]:
        values = tuple(one.convert(member) for member in _members(value))
        if len(values) < least:
            raise ValueError
        return values

    return Accepts(words, convert)


def comma_list(one: Accepts[T], words: str) -> Accepts[tuple[T, ...]]:
    """One or several, where a shell's text is a comma list: `1,32,512`."""

    def convert(value: Any) -> tuple[T, ...]:
        parts = [
            part for member in _members(value) for part in (member.split(",") if isinstance(member, str) else (member,))
        ]
        if len(parts) > _MOST_VALUES:
            raise FFNError(f"at most {_MOST_VALUES} values, got {len(parts)}")
        if not parts:
            raise ValueError
        return tuple(one.convert(part) for part in parts)

    return Accepts(words, convert, values=one.values)


def joined(words: str) -> Accepts[str]:
    """One text of a comma list, from whole numbers or from text that a later check reads (`0,3`, `2:5`, `all`)."""
    one = number_or_text(words)
    return Accepts(words, lambda value: ",".join(one.convert(member) for member in _members(value)))


def _prompt(value: Any) -> str | tuple[str, ...]:
    """One text; of several, which a shell can type and a call refuses later, all."""
    texts = (text(value),) if isinstance(value, str | os.PathLike) else tuple(text(one) for one in value)
    return texts[0] if len(texts) == 1 else texts


def _ids(value: Any) -> tuple[int, ...]:
    """Token numbers, from text as typed or from whole numbers."""
    words = [
        word for one in _members(value) for word in (one.replace(",", " ").split() if isinstance(one, str) else [one])
    ]
    if not words or len(words) > _MOST_IDS:
        raise ValueError
    return tuple(whole(0, MAX_SIZE).convert(word) for word in words)


PROMPT = Accepts[Any]("text", _prompt)
IDS = Accepts("token numbers such as 1,2,3", _ids)
NUMBERS = joined("a whole number, several of them, or text as it is typed in a shell")
TEXTS = several(TEXT, "text, or several texts", least=0)
PATHS = several(PATH, "a path, or several of them", least=0)
COUNTS = comma_list(COUNT, "a whole number from 1, or several of them")
NAMES = comma_list(Accepts("a name", lambda value: text(value).strip()), "a name, or several of them")
FORMATS = replace(NAMES, words="a format such as 'fp8', or several")


def optional(accepts: Accepts[T], words: str, *nothing: str) -> Accepts[T | None]:
    """The same, or None, which a shell writes as one of these words (`all`)."""

    def convert(value: Any) -> T | None:
        is_none = value is None or (isinstance(value, str) and value.strip() in nothing)
        return None if is_none else accepts.convert(value)

    return Accepts(words, convert, none=True)
