"""Slots: places on other machines that each measure one case at a time, and the events that come back from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

from ffncli.dataclass import dataclass


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
class Refusal:
    """A slot could not even begin, for a reason that another try does not remove."""

    case: str
    place: str
    why: str


SlotEvent: TypeAlias = Begun | Answered | Lost | Refusal


class Slots(Protocol):
    """The slots of a launcher. At the end, the work that is left in them is ended too."""

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
