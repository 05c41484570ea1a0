"""This process's place among ranks, from torchrun's environment variables. Every command imports this file, so it must
not import torch."""

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ffncli.block.shard import Ranks
from ffncli.errors import ExitCode, FFNError, clean, shown

RANK_TIMEOUT = 120.0  # s; the default time that a rank waits for another rank
_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """The place of this process among the ranks, and the address where they meet. `local_rank` is the rank's index on
    its machine.

    If `has_agent` is set, torchrun's agent is the parent process and has already opened the store at the address;
    otherwise rank 0 opens it. `attempt` distinguishes a restart by the agent from earlier attempts.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    address: str
    port: int
    has_agent: bool = False
    attempt: str = "0"

    @property
    def first(self) -> bool:
        """Whether this process is rank 0, which prints."""
        return self.rank == 0


class RanksNeeded(FFNError):
    """Raised for a split over several processes, which the command line then starts."""

    def __init__(self, ranks: Ranks) -> None:
        count = ranks.world_size
        hint = f"start it with torchrun --nproc-per-node {count}, or use the command line, which starts the ranks"
        super().__init__(f"{count} ranks are needed, but this is one process", hint, ExitCode.USAGE)
        self.ranks = ranks


def split_asked_for(tp: int | None, ep: int | None) -> Ranks | None:
    """Return the split: under torchrun over all ranks, else by --tp and --ep; None for a whole block."""
    if place := torchrun():
        return split_over(tp, ep, place.world_size)
    ranks = Ranks(tp or 1, ep or 1)
    return ranks if ranks.world_size > 1 else None


def require_ranks(ranks: Ranks | None) -> None:
    """Raise RanksNeeded if the split needs several processes, but this process is not one of several ranks."""
    if ranks is not None and torchrun() is None:
        raise RanksNeeded(ranks)


def torchrun(environ: Mapping[str, str] = os.environ) -> Place | None:
    """Return this process's place under torchrun, or any launcher that sets the same variables; None if they are not
    set.

    Clusters set some of the variables for whole containers, but LOCAL_RANK is set per process. Raises FFNError for
    values that contradict each other.
    """
    if any(not environ.get(name) for name in (*_NUMBERS, "MASTER_ADDR")):
        return None
    rank, local_rank, world_size, port = (_number(name, environ[name]) for name in _NUMBERS)
    local = _number("LOCAL_WORLD_SIZE", environ.get("LOCAL_WORLD_SIZE") or str(world_size))
    if not (rank < world_size and local_rank < local <= world_size and port < 1 << 16):
        given = ", ".join(f"{name}={clean(environ[name])}" for name in _NUMBERS)
        raise FFNError(f"the variables of the ranks contradict each other: {given}", "start the ranks with torchrun")
    agent = environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, local_rank, world_size, local, environ["MASTER_ADDR"], port, agent, attempt)


def follows() -> bool:
    """Return whether this process is a rank other than rank 0; such a rank prints nothing."""
    place = torchrun()
    return place is not None and not place.first


def split_over(tp: int | None, ep: int | None, world_size: int) -> Ranks:
    """Return the split over exactly `world_size` ranks; tp defaults to world_size / ep.

    >>> split_over(None, None, 4), split_over(None, 2, 8)
    (Ranks(tp=4, ep=1), Ranks(tp=4, ep=2))
    """
    ranks = Ranks(tp or (max(1, world_size // (ep or 1))), ep or 1)
    if ranks.world_size != world_size:
        there = "there is 1 rank" if world_size == 1 else f"there are {world_size} ranks"
        hint = f"start {ranks.world_size} ranks, or choose values whose product is {world_size}"
        raise FFNError(f"--tp {ranks.tp} × --ep {ranks.ep} = {ranks.world_size} ranks, but {there}", hint)
    return ranks


def device_of(place: Place, device: str) -> str:
    """Return this rank's device: `cuda` is the GPU with the rank's local index; raise FFNError for another GPU."""
    named = f"cuda:{place.local_rank}"
    if device not in ("cpu", "cuda", named):
        raise FFNError(
            f"--device {device}: every rank uses the GPU with its own number, here {named}", "use --device cuda"
        )
    return device if device == "cpu" else named


def _number(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise FFNError(f"{name} must be a whole number, got {shown(text)}", "start the ranks with torchrun")
    return int(text)
