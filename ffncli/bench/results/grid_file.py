"""The file `NAME.grid.json` next to the results of a part. It stores the whole grid, so that a merge knows which cases
belong to it.

The file contains the request with all cases, as in a journal, and the number of parts. It is the same for every part of
a grid.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

from ffncli.bench.request.grid import BenchRequest, from_json, to_json
from ffncli.bench.request.machines import MOST_PARTS, GridPart, dealt, part_of
from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.json_records import Range, record_of
from ffncli.models.files.strict_json import parse_object
from ffncli.system.files import read_whole

_VERSION = 1
_MOST_BYTES = 50_000_000  # maximum size; the largest grid needs a fifth of it
SHARD = "--shard"


@dataclass(frozen=True)
class WholeGrid:
    """The request with the cases of all parts, and the number of parts."""

    request: BenchRequest
    parts: int

    def request_of(self, part: GridPart) -> BenchRequest:
        """Return the request of one part, with only its cases."""
        return replace(
            self.request,
            cases=part_of(self.request.cases, part.index, part.count),
            asked={**self.request.asked, SHARD: str(part)},
        )

    @cached_property
    def part_of_case(self) -> dict[str, GridPart]:
        """The part of each case, by case key."""
        return {key: GridPart(index, self.parts) for key, index in dealt(self.request.cases, self.parts).items()}


def whole_grid(request: BenchRequest, parts: int) -> WholeGrid:
    """Return the grid of a request, in the form that every part stores."""
    return WholeGrid(replace(request, asked={k: v for k, v in request.asked.items() if k != SHARD}), parts)


@dataclass(frozen=True)
class _GridFile:
    """The contents of the file. `request` is checked by `from_json`."""

    grid: int
    parts: Annotated[int, Range(1, MOST_PARTS)]
    request: Any


def grid_bytes(grid: WholeGrid) -> bytes:
    """Return the contents of the grid file."""
    stored = {"grid": _VERSION, "parts": grid.parts, "request": to_json(grid.request)}
    return (json.dumps(stored, allow_nan=False, indent=1) + "\n").encode()


def stored_grid(path: Path) -> bytes | None:
    """Return the contents of a grid file; None if it does not exist. Raises FFNError if it cannot be read."""
    try:
        return read_whole(path, _MOST_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        why = f"cannot read {shown_path(path)}: {error.strerror}"
        raise FFNError(why, code=ExitCode.ENVIRONMENT) from None


def parse_grid(raw: bytes, name: str) -> WholeGrid:
    """Return the grid in the contents `raw` of a file called `name`. Raises FFNError for anything but a grid."""
    entry = parse_object(raw, name)
    if entry.get("grid") != _VERSION:
        raise FFNError(f"{name}: not a grid written by this version of ffn", "merge with the version that measured it")
    file: _GridFile = record_of(_GridFile, entry, name)
    return WholeGrid(from_json(file.request, f"{name}: request"), file.parts)


def difference(one: WholeGrid, other: WholeGrid) -> str:
    """Return the difference between two grids in words, or "" if they are the same, even if divided into different
    numbers of parts.

    The directories of files and the way in which a block was typed are ignored, since they may differ between machines.
    """
    return next(_differences(one.request, other.request), "")


def _differences(one: BenchRequest, other: BenchRequest) -> Iterator[str]:
    sides = [{case.key: replace(case, source="") for case in request.cases} for request in (one, other)]
    for side, rest in (sides, sides[::-1]):
        if only := [key for key in side if key not in rest]:
            more = f" and {len(only) - 1} more" if len(only) > 1 else ""
            yield f"only one of them has the case {shown(only[0], 120)}{more}"
    if key := next((key for key, case in sides[0].items() if case != sides[1].get(key)), ""):
        yield f"the block or the data of the case {shown(key, 120)}"
    if _kernels(one) != _kernels(other):
        yield f"the kernels, {', '.join(one.names)} and {', '.join(other.names)}"
    if one.suite != other.suite:
        yield f"the suite, {shown(one.suite or 'none')} and {shown(other.suite or 'none')}"
    if one.baseline != other.baseline:
        yield f"the baseline, {shown(one.baseline)} and {shown(other.baseline)}"
    if one.method != other.method:
        name = next(name for name, value in vars(one.method).items() if value != getattr(other.method, name))
        yield f"the method: {name} is {getattr(one.method, name)!r} and {getattr(other.method, name)!r}"
    if files := sorted({*_files(one)} ^ {*_files(other)}):
        yield f"the contents of {shown(files[0][0])}"


def _kernels(request: BenchRequest) -> list[tuple[str | None, ...]]:
    return [(one.label, Path(one.kernel).name, one.attribute, one.factor, one.ref) for one in request.kernels]


def _files(request: BenchRequest) -> list[tuple[str, str]]:
    """Return (name, sha256) for each of the user's files, both code and data."""
    return [(Path(name).name, digest) for name, digest in request.files.items()]
