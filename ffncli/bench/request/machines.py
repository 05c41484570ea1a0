"""Decide which machine measures which case: each machine measures one part of a grid, or a launcher distributes the
cases.

`--shard 3/8` is the third of eight parts. The cases are sorted by the SHA-256 of their keys and dealt to the parts one
by one, like cards. So every machine computes the same parts, in any version of Python and for any order of the options.
Long cases, which are neighbours in a grid, are spread over the parts. All kernels of a case are in the same part, so a
ratio never compares machines. Part 3 of 8 has the cases of parts 3 and 11 of 16.
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, get_args

from ffncli.bench.records import Case
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.models.files.json_records import Range
from ffncli.options.accept import Accepts, text

MOST_PARTS = 10_000  # the maximum number of cases in a grid


@dataclass(frozen=True)
class GridPart:
    """Part `index` of `count`, counted from 1."""

    index: int
    count: int

    def __str__(self) -> str:
        return f"{self.index}/{self.count}"


def grid_part(value: Any) -> GridPart:
    """Parse a part such as `3/8`."""
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
    """Return the cases of a part, in the order of the grid; part sizes differ by at most one."""
    places = dealt(cases, count)
    return tuple(case for case in cases if places[case.key] == index)


def dealt(cases: Sequence[Case], count: int) -> dict[str, int]:
    """Map each case key to the index of its part, counted from 1."""
    keys = sorted((case.key for case in cases), key=lambda key: hashlib.sha256(key.encode()).digest())
    return {key: place % count + 1 for place, key in enumerate(keys)}


# --- launchers: their machines, slots and options ---------------------------------------------------------------------


LauncherName: TypeAlias = Literal["slurm", "ray"]
MOST_SLOTS = 10_000
RAY_OPTIONS = ("address",)


@dataclass(frozen=True)
class LauncherChoice:
    """A launcher, the number of cases to measure at once (None: the launcher's default), and its options."""

    launcher: LauncherName
    slots: Annotated[int, Range(1, MOST_SLOTS)] | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotSize:
    """What a slot reserves on its machine: a core per thread of a case, and a GPU if a case uses one."""

    cores: int
    gpus: int


def cluster_of(launcher: str | None, slots: int | None, options: Sequence[str]) -> LauncherChoice | None:
    """Return the launcher with its slots and its KEY=VALUE options; None if there is no launcher.

    Raises FFNError for an unknown launcher, and for options that the launcher does not support.
    """
    known = get_args(LauncherName)
    if launcher is None:
        return None
    if launcher not in known:
        near = did_you_mean(launcher, list(known), f"use one of {', '.join(known)}")
        raise FFNError(f"{option('launcher')}: unknown value {shown(launcher)}", near)
    pairs: dict[str, str] = {}
    for pair in options:
        key, equals, value = pair.partition("=")
        if not (key.strip() and equals):
            why = f"{option('launcher_option')}: {shown(pair)} is not KEY=VALUE"
            raise FFNError(why, f"as in {option('launcher_option', 'partition=gpu')}")
        pairs[key.strip().removeprefix("--").replace("-", "_")] = value.strip()
    if launcher == "ray" and (unknown := [key for key in pairs if key not in RAY_OPTIONS]):
        why = f"{option('launcher_option')}: ray has no option {shown(unknown[0])}"
        sizes = f"{option('slots')} and {option('threads')} set what a slot reserves"
        raise FFNError(why, f"its options are {', '.join(RAY_OPTIONS)}; {sizes}")
    return LauncherChoice("ray" if launcher == "ray" else "slurm", slots, pairs)


def require_any_gpu(devices: Sequence[str]) -> None:
    """Raise FFNError if a case for other machines requests a specific GPU, such as cuda:1."""
    if numbered := [device for device in devices if device.startswith("cuda:")]:
        why = f"{option('device', numbered[0])} contradicts {option('launcher')}"
        raise FFNError(why, f"a slot has one GPU, which the launcher chooses: {option('device', 'cuda')}")


def slot_size(cases: Sequence[Case]) -> SlotSize:
    """Return the resources that a slot needs to run any of these cases."""
    return SlotSize(max(case.threads for case in cases), int(any(case.device != "cpu" for case in cases)))
