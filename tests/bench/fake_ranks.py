"""Ranks as threads of one process: what they tell each other goes through memory, and so do their all-reduces."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import torch

from ffncli.block.shard import Ranks


class Line:
    """What all ranks give at once. A rank that fails breaks the wait of the others."""

    def __init__(self, size: int) -> None:
        self.given: list[Any] = [None] * size
        self.enter, self.leave = Barrier(size, timeout=20), Barrier(size, timeout=20)

    def all(self, rank: int, value: Any) -> list[Any]:
        self.given[rank] = value
        self.enter.wait()
        found = list(self.given)
        self.leave.wait()
        return found


class FakeChannel:
    """A RankChannel of that rank."""

    def __init__(self, line: Line, rank: int, ranks: Ranks) -> None:
        self.line, self.rank, self.size = line, rank, ranks.world_size
        tp = SimpleNamespace(get_group=lambda: self)
        self.group = SimpleNamespace(ranks=ranks, rank=rank, mesh={"tp": tp, "ep": tp})
        self.told = 0

    def barrier(self) -> None:
        self.all(None)

    def largest(self, values: Sequence[float]) -> list[float]:
        return [max(one) for one in zip(*self.all(list(values)), strict=True)]

    def first(self, value: float) -> float:
        return self.all(value)[0]

    def all(self, value: Any) -> list[Any]:
        self.told += 1
        return self.line.all(self.rank, value)

    def enter_alike(self, x: torch.Tensor) -> None:
        x.copy_(self.all(x.clone())[self.rank // self.group.ranks.tp * self.group.ranks.tp])


def all_reduce(tensor: torch.Tensor, group: FakeChannel) -> None:
    """In place of torch's, over a group which is a FakeChannel."""
    tensor.copy_(torch.stack(group.all(tensor.clone())).sum(0))


def on_ranks(ranks: Ranks, act: Callable[[FakeChannel], Any]) -> list[Any]:
    """What every rank's thread returns, or raises."""
    line = Line(ranks.world_size)

    def one(rank: int) -> Any:
        try:
            return act(FakeChannel(line, rank, ranks))
        except BaseException as error:
            return error

    with ThreadPoolExecutor(ranks.world_size) as pool:
        return list(pool.map(one, range(ranks.world_size)))
