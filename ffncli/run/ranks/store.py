"""The store of a run's ranks (torch's TCPStore, opened by torchrun's agent or rank 0): who is there, who failed."""

from __future__ import annotations

import time
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import DistNetworkError, DistStoreError, TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import PrefixStore, Store

from ffncli.block.shard import Ranks
from ffncli.errors import ExitCode, FFNError
from ffncli.run.ranks.environment import Place


@dataclass(frozen=True)
class RankGroup:
    """The ranks of a run, which of them this process is, and their mesh with the dimensions `ep` and `tp`."""

    ranks: Ranks
    rank: int
    device: torch.device
    mesh: DeviceMesh


STORE_ERRORS = (DistNetworkError, DistStoreError)  # of a store that cannot be reached, or no longer
_BETWEEN = 0.02  # s between two looks
_ANSWERING = 1.5  # s in which a rank that runs answers the others, after an error that all of them see
LEFT, FAILED, STOPPED, TIMED_OUT, CLOSED = "left", "failed", "stopped", "timed out", "closed"


@dataclass(frozen=True)
class RankStore:
    """The common store of the ranks, as one of them uses it."""

    place: Place
    shared: Store

    def arrive(self, limit: float) -> None:
        """Wait until all ranks have arrived, handling signals; raise FFNError (exit 3) after `limit`."""
        self.shared.set(f"here/{self.place.rank}", "1")
        until = time.monotonic() + limit
        others = [rank for rank in range(self.place.world_size) if rank != self.place.rank]
        while others:
            others = self._without("here", others)
            if others and self.reported():
                raise FFNError("another rank reports an error", code=ExitCode.ENVIRONMENT)
            if others and time.monotonic() > until:
                raise absent(others, f"did not join within {limit:g} s")
            time.sleep(_BETWEEN if others else 0)

    def answer(self, how: str) -> None:
        """Leave for the others how this rank ends."""
        self.shared.set(f"ended/{self.place.rank}", how)

    def answers(self) -> dict[int, str]:
        """Return how the ranks end, by rank; leave out those that say nothing within a moment."""
        until = time.monotonic() + _ANSWERING
        silent = list(range(self.place.world_size))
        while (silent := self._without("ended", silent)) and time.monotonic() < until:
            time.sleep(_BETWEEN)
        heard = sorted(set(range(self.place.world_size)) - set(silent))
        return {rank: self.shared.get(f"ended/{rank}").decode() for rank in heard}

    def may_report(self) -> bool:
        """Return whether this rank is the first to ask: it prints the error of them all."""
        mine = str(self.place.rank)
        return self.shared.compare_set("reporter", "", mine).decode() == mine

    def reported(self) -> bool:
        """Return whether some rank has."""
        return self.shared.check(["reporter"])

    def _without(self, key: str, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if not self.shared.check([f"{key}/{rank}"])]


def open_store(place: Place, limit: float, opens: bool = True) -> RankStore:
    """Open the store on rank 0 if no agent has, and if it `opens` one at all; else connect within `limit` s."""
    master = opens and place.first and not place.has_agent
    try:
        store = TCPStore(
            place.address, place.port, place.world_size, master, timedelta(seconds=limit), wait_for_workers=False
        )
    except (*STORE_ERRORS, RuntimeError, ValueError) as error:
        where, text = f"{place.address}:{place.port}", str(error)
        if master and ("EADDRINUSE" in text or "in use" in text):
            raise FFNError(f"port {place.port} is in use", "choose another MASTER_PORT", ExitCode.ENVIRONMENT) from None
        what = "cannot open the store of the ranks at" if master else f"no answer within {limit:g} s from rank 0 at"
        hint = "check MASTER_ADDR and MASTER_PORT" + ("" if master else ", and that rank 0 runs")
        raise FFNError(f"{what} {where}", hint, ExitCode.ENVIRONMENT) from None
    return RankStore(place, PrefixStore(f"ffn/{place.attempt}", store))


def absent(ranks: list[int], what: str) -> FFNError:
    """Return the error about missing ranks: `rank 1 did not join within 60 s`."""
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return FFNError(f"rank{'s' if len(ranks) > 1 else ''} {named} {what}", code=ExitCode.ENVIRONMENT)
