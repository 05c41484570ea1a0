"""What the ranks of a case tell each other outside timed calls, over gloo whatever the block's own collectives use.

Every method is called by all ranks, in the same order: each waits for the others.
"""

from __future__ import annotations

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

_OF_LIMIT = 0.9  # of that on a call: a rank that waits in one for another says so before its parent ends it


def waiting_limit(job: Job) -> float:
    """Seconds that a rank waits for the others: less than any call of a case may take."""
    return _OF_LIMIT * max(call_limit(case, job.method) for case in job.cases)


class RankChannel:
    """The ranks of `group`; one waits for the others for `limit` seconds. Those that are at one place of the dimension
    `ep` enter the same tokens."""

    def __init__(self, group: RankGroup, limit: float) -> None:
        self.group, self.rank, self.size = group, group.rank, group.ranks.world_size
        self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=limit))
        self._alike = group.mesh["tp"].get_group()
        self._first_alike = group.rank - group.ranks.place(group.rank)[1]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.largest([0.0])

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, place by place."""
        shared = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(shared, dist.ReduceOp.MAX, group=self._control)
        return [float(value) for value in shared]

    def first(self, value: float) -> float:
        """The value of rank 0."""
        shared = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(shared, 0, group=self._control)
        return float(shared)

    def all(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        shared: list[Any] = [None] * self.size
        dist.all_gather_object(shared, value, group=self._control)
        return shared

    def enter_alike(self, x: Tensor) -> None:
        """Give x the numbers that it has on the first of the ranks which enter the same tokens."""
        if self.group.ranks.tp > 1:
            dist.broadcast(x, self._first_alike, group=self._alike)


# --- the clock of a case over ranks -----------------------------------------------------------------------------------
# A call takes as long as its slowest rank does, and all ranks read the same times.
#
# What a measurement does next depends on its times alone, so all ranks then time the same arms in the same order, as
# often as each other.


class RankClock:
    """Another clock, with the ranks of `channel` in step. With `each_call`, every call that has something to do before
    it starts at a barrier of its own, and is timed by itself: ranks that prepare for longer are not waited for inside.
    """

    def __init__(self, clock: Clock, channel: RankChannel, each_call: bool = True) -> None:
        self.clock, self._channel, self._each_call = clock, channel, each_call

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Seconds of `inner` calls on the slowest rank; of each call, where they are timed one by one."""
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
        """Seconds of rank 0's clock; on the way out of an error, when the others are elsewhere, of this rank's."""
        if sys.exc_info()[0] is not None:
            return self.clock.now()
        return self._channel.first(self.clock.now())

    def finish(self) -> None:
        """Wait until this rank's device has finished all its work."""
        self.clock.finish()
