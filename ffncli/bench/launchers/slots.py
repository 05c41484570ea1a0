"""Slots: places on other machines that each measure one case at a time, and the events that come back from them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

from ffncli.bench.request.cluster import Cluster, SlotSize


@dataclass(frozen=True)
class Begun:
    """A slot measures that case now. `place` is the machine, with the slot or the job there: `node7, slot 2`."""

    case: str
    place: str


@dataclass(frozen=True)
class Answered:
    """A slot has sent its answer, which `slot.units_of` reads."""

    case: str
    place: str
    answer: str


@dataclass(frozen=True)
class Lost:
    """A slot is gone with its case: its machine failed, or its job was ended."""

    case: str
    place: str
    why: str


@dataclass(frozen=True)
class Refused:
    """A slot could not even begin, for a reason that another try does not remove."""

    case: str
    place: str
    why: str


SlotEvent: TypeAlias = Begun | Answered | Lost | Refused


class Slots(Protocol):
    """The slots of a launcher. Closing them (the end of `open_slots`) ends the work that is left in them."""

    @property
    def free(self) -> int:
        """How many cases can be submitted now."""
        ...

    def submit(self, case: str, task: str) -> None:
        """Measure that case, whose task is `slot.task_of`."""
        ...

    def events(self, patience: float) -> Sequence[SlotEvent]:
        """The events since the last call; waits so many seconds for the first."""
        ...


@contextmanager
def open_slots(cluster: Cluster, size: SlotSize, seconds: float, logs: Path) -> Iterator[Slots]:
    """The slots of the cluster; a case takes some `seconds`, and `logs` is a folder for a launcher that writes files.

    Raises FFNError (exit 3) if the launcher's package is missing, or if the cluster cannot be reached.
    """
    if cluster.launcher == "ray":
        from ffncli.bench.launchers.ray_slots import ray_slots

        with ray_slots(cluster, size) as slots:
            yield slots
    else:
        from ffncli.bench.launchers.slurm_slots import slurm_slots

        with slurm_slots(cluster, size, seconds, logs) as jobs:
            yield jobs
