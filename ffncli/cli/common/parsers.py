"""Parsers of an option's text; their FFNErrors name the option."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from math import inf, nan

from ffncli.errors import FFNError, shown
from ffncli.models.dimensions import whole
from ffncli.options.accept import MAX_SIZE
from ffncli.show.text import bytes_text

_MOST_VALUES = 1000  # of a comma list
_PREFIXES = " KMGT"
_UNITS = {"ms": 1e-3, "s": 1.0, "": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def positive(option: str, high: int = MAX_SIZE) -> Callable[[str], int]:
    """A parser for a whole number from 1 to `high`; its FFNError names the option."""

    def parse(text: str) -> int:
        return whole(option, text, high)

    return parse


def natural(option: str, high: int = 2**63 - 1) -> Callable[[str], int]:
    """A parser for a whole number from 0."""

    def parse(text: str) -> int:
        text = str(text).strip()
        if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= high):
            limit = f" to {high}" if high < 2**63 - 1 else ""
            raise FFNError(f"{option} must be a whole number from 0{limit}, got {shown(text)}")
        return int(text)

    return parse


def _number(option: str, allowed: Callable[[float], bool], words: str) -> Callable[[str], float]:
    """A parser for an `allowed` number, described by `words`; NaN is never allowed."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = nan
        if not allowed(value):
            raise FFNError(f"{option} must be {words}, got {shown(text)}")
        return value

    return parse


def probability(option: str) -> Callable[[str], float]:
    """A parser for a number of at least 0 and below 1."""
    return _number(option, lambda value: 0 <= value < 1, "at least 0 and below 1")


def share(option: str) -> Callable[[str], float]:
    """A parser for a number above 0 and at most 1."""
    return _number(option, lambda value: 0 < value <= 1, "above 0 and at most 1")


def above_zero(option: str) -> Callable[[str], float]:
    """A parser for a finite number above 0."""
    return _number(option, lambda value: 0 < value < inf, "a number above 0")


def from_zero(option: str) -> Callable[[str], float]:
    """A parser for a finite number of at least 0."""
    return _number(option, lambda value: 0 <= value < inf, "a number from 0")


def percentage(option: str, most: float = inf, zero: bool = False) -> Callable[[str], float]:
    """A parser for a difference, `3%` or `0.03`, up to `most`, above 0, or from 0 if `zero`.

    A bare number of 1 or more is refused: it is likely a percentage.
    """
    limit = "" if most == inf else f" and at most {most:.0%},"
    words = f"a percentage {'from' if zero else 'above'} 0{limit} such as 3%"

    def parse(text: str) -> float:
        typed = str(text).strip()
        bare = not typed.endswith("%")
        try:
            value = float(typed.removesuffix("%").rstrip()) / (1 if bare else 100)
        except ValueError:
            value = nan
        if not (0 <= value <= most and value < inf and (zero or value)) or (bare and value >= 1):
            hint = f"that would be {value:.0%}: write {typed}%" if bare and 1 <= value <= 100 * min(most, 1) else ""
            raise FFNError(f"{option} must be {words}, got {shown(text)}", hint)
        return value

    return parse


def duration(option: str) -> Callable[[str], float]:
    """A parser for `20s`, `2m`, `500ms`: seconds, at most a day."""

    def parse(text: str) -> float:
        match = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|m|min|h|)", str(text).strip())
        value = float(match[1]) * _UNITS[match[2]] if match else 0.0
        if not 0 < value <= 86_400:
            raise FFNError(f"{option} must be a time, as in 20s or 2m, got {shown(text)}")
        return value

    return parse


def byte_count(option: str, least: int = 1) -> Callable[[str], int]:
    """A parser for `512MB`, `4G`, `2.5GiB` or a number of bytes, `least` or more; `i` is for powers of 1024."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?)\s*(?:([KMGT])(I?)B?|B?)", str(text).strip().upper())
        unit = (1024 if match[3] else 1000) ** _PREFIXES.index(match[2] or " ") if match else 0
        value = int(float(match[1]) * unit) if match else 0
        if not 0 < value < 2**63:
            raise FFNError(f"{option} must be a size, as in 512MB or 4GiB, got {shown(text)}")
        if value < least:
            raise FFNError(f"{option} must be at least {bytes_text(least)}, got {shown(text)}")
        return value

    return parse


def joined(values: list[str] | None) -> str | None:
    """One comma-separated list from an option that may be repeated; None if not given."""
    return ",".join(values) if values else None


def flat(lists: Sequence[Sequence[int]] | None) -> tuple[int, ...] | None:
    """The same for lists of numbers: all of them in order."""
    return tuple(number for numbers in lists for number in numbers) if lists else None


def numbers(option: str) -> Callable[[str], tuple[int, ...]]:
    """A parser for a comma-separated list of positive whole numbers, `1,32,512`; its FFNError names the option."""
    one = positive(option)

    def parse(text: str) -> tuple[int, ...]:
        parts = str(text).split(",")
        if len(parts) > _MOST_VALUES:
            raise FFNError(f"{option} takes at most {_MOST_VALUES} values, got {len(parts)}")
        return tuple(one(part) for part in parts)

    return parse
