"""What the ranks of a case tell each other outside timed calls, over gloo whatever the block's own collectives use.

Every method is called by all ranks, in the same order: each waits for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.bench.judge.limits import call_limit
from ffncli.bench.records import Job
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
