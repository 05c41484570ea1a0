"""The store of a run's ranks (torch's TCPStore, on torchrun's agent or rank 0): which have joined or failed."""

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
    """The ranks of a run, the rank and device of this process, and the mesh with dimensions `ep` and `tp`."""

    ranks: Ranks
    rank: int
    device: torch.device
    mesh: DeviceMesh


STORE_ERRORS = (DistNetworkError, DistStoreError)  # raised if a store is unreachable, or no longer reachable
_BETWEEN = 0.02  # s between two polls of the store
_ANSWERING = 1.5  # s within which a running rank answers the others, after an error that all ranks see
LEFT, FAILED, STOPPED, TIMED_OUT, CLOSED = "left", "failed", "stopped", "timed out", "closed"


@dataclass(frozen=True)
class RankStore:
    """The common store of the ranks, as used by the rank at `place`."""

    place: Place
    shared: Store

    def arrive(self, limit: float) -> None:
        """Wait until all ranks have arrived, handling signals. Raise FFNError (exit 3) after `limit` seconds."""
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
        """Tell the other ranks how this rank has ended."""
        self.shared.set(f"ended/{self.place.rank}", how)

    def answers(self) -> dict[int, str]:
        """Return a mapping from each rank to how it has ended, without ranks that do not answer in time."""
        until = time.monotonic() + _ANSWERING
        silent = list(range(self.place.world_size))
        while (silent := self._without("ended", silent)) and time.monotonic() < until:
            time.sleep(_BETWEEN)
        heard = sorted(set(range(self.place.world_size)) - set(silent))
        return {rank: self.shared.get(f"ended/{rank}").decode() for rank in heard}

    def may_report(self) -> bool:
        """Claim the report; return True for the first rank that does so, which prints the error for all ranks."""
        mine = str(self.place.rank)
        return self.shared.compare_set("reporter", "", mine).decode() == mine

    def reported(self) -> bool:
        """Return whether a rank has already claimed the report."""
        return self.shared.check(["reporter"])

    def _without(self, key: str, ranks: list[int]) -> list[int]:
        return [rank for rank in ranks if not self.shared.check([f"{key}/{rank}"])]


def open_store(place: Place, limit: float, opens: bool = True) -> RankStore:
    """Open the store on rank 0 if `opens` and no agent has opened it; otherwise connect within `limit` s."""
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
    """Return the error for missing ranks, such as `rank 1 did not join within 60 s`."""
    named = ", ".join(map(str, ranks[:8])) + (" ..." if len(ranks) > 8 else "")
    return FFNError(f"rank{'s' if len(ranks) > 1 else ''} {named} {what}", code=ExitCode.ENVIRONMENT)
