"""The machines that the cases of a grid are dealt to, as requested: a launcher, its slots, its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Literal, TypeAlias, get_args

from ffncli.bench.records import Case
from ffncli.errors import FFNError, did_you_mean, option, shown
from ffncli.models.files.json_records import Range

LauncherName: TypeAlias = Literal["slurm", "ray"]
MOST_SLOTS = 10_000
RAY_OPTIONS = ("address",)


@dataclass(frozen=True)
class LauncherChoice:
    """Whose machines, how many cases at once (None: the launcher's default), and the options of the launcher."""

    launcher: LauncherName
    slots: Annotated[int, Range(1, MOST_SLOTS)] | None = None
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class SlotSize:
    """What a slot reserves on its machine: a core for each thread of a case, and a GPU if one computes there."""

    cores: int
    gpus: int


def cluster_of(launcher: str | None, slots: int | None, options: Sequence[str]) -> LauncherChoice | None:
    """The cluster of a launcher, its slots and its options KEY=VALUE; None without a launcher.

    Raises FFNError for an unknown launcher, and for options that it cannot have.
    """
    known = get_args(LauncherName)
    if launcher is None:
        return None
    if launcher not in known:
        near = did_you_mean(launcher, list(known), f"use one of {', '.join(known)}")
        raise FFNError(f"{option('launcher')}: unknown value {shown(launcher)}", near)
    pairs = dict(_pair(text) for text in options)
    if launcher == "ray" and (unknown := [key for key in pairs if key not in RAY_OPTIONS]):
        why = f"{option('launcher_option')}: ray has no option {shown(unknown[0])}"
        sizes = f"{option('slots')} and {option('threads')} say what a slot reserves"
        raise FFNError(why, f"its options are {', '.join(RAY_OPTIONS)}; {sizes}")
    return LauncherChoice("ray" if launcher == "ray" else "slurm", slots, pairs)


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not (key.strip() and equals):
        raise FFNError(
            f"{option('launcher_option')}: {shown(text)} is not KEY=VALUE",
            f"as in {option('launcher_option', 'partition=gpu')}",
        )
    return key.strip().removeprefix("--").replace("-", "_"), value.strip()


def require_any_gpu(devices: Sequence[str]) -> None:
    """Raises FFNError if a case for other machines would take a GPU of this one."""
    if numbered := [device for device in devices if device.startswith("cuda:")]:
        why = f"{option('device', numbered[0])} contradicts {option('launcher')}"
        raise FFNError(why, f"a slot has one GPU, which the launcher chooses: {option('device', 'cuda')}")


def slot_size(cases: Sequence[Case]) -> SlotSize:
    """What a slot needs in order to run any of these cases."""
    return SlotSize(max(case.threads for case in cases), int(any(case.device != "cpu" for case in cases)))
