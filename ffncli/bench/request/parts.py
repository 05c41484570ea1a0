"""Parts of a grid, each for a machine of its own: `--shard 3/8` is the third of eight.

The cases are sorted by the SHA-256 of their keys and dealt in turn, as cards are: every machine computes the same
parts, in any version of Python and for any order of the options, and long cases, which are neighbours in a grid, are
spread. A case is dealt with all its kernels, so a ratio is always of one machine. Part 3 of 8 is parts 3 and 11 of 16.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ffncli.bench.records import Case
from ffncli.errors import FFNError
from ffncli.options.accept import Accepts, text

MOST_PARTS = 10_000  # as many as a grid may have cases


@dataclass(frozen=True)
class GridPart:
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def grid_part(value: Any) -> GridPart:
    """The part that `3/8` means."""
    if isinstance(value, GridPart):
        return value
    match = re.fullmatch(r"([0-9]{1,9})/([0-9]{1,9})", text(value).strip())
    if match is None:
        raise ValueError
    part = GridPart(int(match[1]), int(match[2]))
    if not 1 <= part.count <= MOST_PARTS:
        raise FFNError(f"{part}: a grid has from 1 to {MOST_PARTS:,} parts")
    if not 1 <= part.index <= part.count:
        raise FFNError(f"{part}: the first number must be from 1 to {part.count}")
    return part


PART = Accepts("a part of the grid, as in 3/8", grid_part)


def part_of(cases: Sequence[Case], index: int, count: int) -> tuple[Case, ...]:
    """The cases of a part, in the order of the grid; part sizes differ by at most one."""
    places = dealt(cases, count)
    return tuple(case for case in cases if places[case.key] == index)


def dealt(cases: Sequence[Case], count: int) -> dict[str, int]:
    """Case key → the index of its part, from 1."""
    keys = sorted((case.key for case in cases), key=lambda key: hashlib.sha256(key.encode()).digest())
    return {key: place % count + 1 for place, key in enumerate(keys)}
