"""What the ranks of a case tell each other outside timed calls, over gloo whatever the block's own collectives use.

Every method is called by all ranks, in the same order: each waits for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.run.ranks.group import RankGroup


class RankChannel:
    """`group` are the ranks; `alike` are those that enter the same tokens: all of one place on the dimension `ep`."""

    def __init__(self, group: RankGroup) -> None:
        self.group, self.rank, self.size = group, group.rank, group.ranks.world_size
        self._control = dist.new_group(backend="gloo")
        self._alike = group.mesh["tp"].get_group()
        self._first_alike = group.rank - group.ranks.place(group.rank)[1]

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        self.largest([0.0])

    def largest(self, values: Sequence[float]) -> list[float]:
        """The largest of all ranks' values, place by place."""
        told = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(told, dist.ReduceOp.MAX, group=self._control)
        return [float(value) for value in told]

    def first(self, value: float) -> float:
        """The value of rank 0."""
        told = torch.tensor([value], dtype=torch.float64)
        dist.broadcast(told, 0, group=self._control)
        return float(told)

    def all(self, value: Any) -> list[Any]:
        """The values of all ranks, in their order."""
        told: list[Any] = [None] * self.size
        dist.all_gather_object(told, value, group=self._control)
        return told

    def enter_alike(self, x: Tensor) -> None:
        """Give x the numbers that it has on the first of the ranks which enter the same tokens."""
        if self.group.ranks.tp > 1:
            dist.broadcast(x, self._first_alike, group=self._alike)
