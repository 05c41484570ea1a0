"""Communication between the ranks of a case outside timed calls. It uses gloo, whatever the block's own collectives
use.

Every method is called by all ranks in the same order, and each rank waits for the others.
"""

import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.bench.judge.limits import call_limit
from ffncli.bench.records import Job
from ffncli.bench.timing.clock import Call, Clock
from ffncli.run.ranks.store import RankGroup

_OF_LIMIT = 0.9  # fraction of a call's limit, so that a rank reports its wait before its parent kills it


def waiting_limit(job: Job) -> float:
    """Return how long to wait for other ranks, in seconds: a little less than the largest limit of a call."""
    return _OF_LIMIT * max(call_limit(case, job.method) for case in job.cases)


class RankChannel:
    """The ranks of `group`; a rank waits up to `limit` seconds for the others. Ranks with the same index in the
    dimension `ep` get the same tokens."""

    def __init__(self, group: RankGroup, limit: float) -> None:
        self.group, self.rank, self.size = group, group.rank, group.ranks.world_size
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        self._alike = group.mesh["tp"].get_group()
        self._first_alike = group.rank - group.ranks.place(group.rank)[1]

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        self.largest([0.0])

    def largest(self, values: Sequence[float]) -> list[float]:
        """Return the maximum over all ranks, for each position of `values`."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._control)
        return [float(value) for value in shared]

    def first(self, value: float) -> float:
        """Return rank 0's value."""
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0, group=self._control)
        return float(shared)

    def all(self, value: Any) -> list[Any]:
        """Return the values of all ranks, in rank order."""
        shared: list[Any] = [None] * self.size
        dist.all_gather_object(shared, value, group=self._control)
        return shared

    def enter_alike(self, x: Tensor) -> None:
        """Copy x from the first of the ranks that get the same tokens."""
        if self.group.ranks.tp > 1:
            dist.broadcast(x, self._first_alike, group=self._alike)


# --- the clock of a case over ranks -----------------------------------------------------------------------------------
# A call takes as long as on its slowest rank, and all ranks read the same times. The next step of a measurement depends
# only on the times so far, so all ranks time the same arms, in the same order and equally often.


class RankClock:
    """A clock that wraps another clock and keeps the ranks of `channel` in step. With `each_call`, every call that has
    a `before` starts at its own barrier and is timed separately, so that its time does not include the wait for ranks
    whose `before` takes longer."""

    thread_seconds: float | None = None  # ranks are timed by the slowest, so no thread's own time counts
    quartile_seconds: float | None = None

    def __init__(self, clock: Clock, channel: RankChannel, each_call: bool = True) -> None:
        self.clock, self._channel, self._each_call = clock, channel, each_call

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Return the seconds of `inner` calls on the slowest rank; if calls are timed separately, the sum over calls of
        the slowest rank's time."""
        if before is None or not self._each_call:
            self._channel.barrier()
            return self._channel.largest([self.clock.time(call, inner, before)])[0]
        seconds = []
        for _ in range(inner):
            before()
            self._channel.barrier()
            seconds.append(self.clock.time(call, 1))
        return sum(self._channel.largest(seconds))

    def now(self) -> float:
        """Return the time of rank 0's clock or, while an error is being handled and the other ranks are elsewhere, of
        this rank's clock."""
        if sys.exc_info()[0] is not None:
            return self.clock.now()
        return self._channel.first(self.clock.now())

    def finish(self) -> None:
        """Wait until this rank's device has finished all its work."""
        self.clock.finish()
