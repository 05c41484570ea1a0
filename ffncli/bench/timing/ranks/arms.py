"""The arms of a case over ranks: kernels with their collectives, the same without them, and the collectives alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.bench.judge.roofline import sent_by_rank
from ffncli.bench.records import COLLECTIVES, COMPUTE
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.fresh_inputs import Source, in_turn
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.ranks.channel import RankChannel
from ffncli.bench.timing.ranks.kernels import KernelOverRanks
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm


class RankSource:
    """What another source writes on the first of the ranks that enter the same tokens, on all of them."""

    def __init__(self, source: Source, channel: RankChannel) -> None:
        self.source, self._channel = source, channel

    def draw(self) -> None:
        """Other numbers in the source."""
        self.source.draw()

    def write(self, x: Tensor) -> None:
        """Other contents into x, the same on these ranks."""
        self.source.write(x)
        self._channel.enter_alike(x)

    def write_gradient(self, g: Tensor) -> None:
        """Of no use here: no gradients are computed over ranks."""
        raise NotImplementedError


class RankArms:
    """What the ranks of `channel` add to the arms of a case: kernels, split as in `splits`, without their collectives,
    and the collectives alone."""

    def __init__(self, channel: RankChannel, splits: Mapping[str, KernelOverRanks]) -> None:
        self._channel, self._splits = channel, splits
        for name in splits:
            REPORTER.stands_for(name + COMPUTE, name)

    def hear(self, notes: Mapping[str, str]) -> list[tuple[str, str]]:
        """Which kernels some rank has found wrong, and why: each is then wrong on all of them."""
        every = enumerate(self._channel.all(dict(notes)))
        return [(name, f"rank {rank}: {note}") for rank, theirs in every for name, note in theirs.items()]

    def more(self, arms: Arms) -> list[Arm]:
        """The arms that there are over ranks alone."""
        parts = ((placed, self._splits[placed.name].alone) for placed in arms.kernels)
        return [*(_alone(arms, placed, alone) for placed, alone in parts if alone), self._collectives(arms)]

    def _collectives(self, arms: Arms) -> Arm:
        """What the block sends, of tensors of the same sizes, without its computing."""
        problem, group = arms.problem, self._channel.group
        sizes = sent_by_rank(problem.case)
        sent, calls = [], []
        for numbers in sizes.all_reduced:
            sent.append(torch.randn(numbers).to(problem.first.x))
            calls.append(partial(dist.all_reduce, sent[-1].clone(), group=group.mesh["tp"].get_group()))
        for numbers in sizes.exchanged:
            sent.append(torch.randn(numbers).to(problem.first.x))
            arriving = torch.empty_like(sent[-1])
            calls.append(partial(dist.all_to_all_single, arriving, sent[-1], group=group.mesh["ep"].get_group()))

        def call() -> None:
            for one in calls:
                one()

        def before() -> None:
            for one, numbers in zip(calls[: len(sizes.all_reduced)], sent, strict=False):
                one.args[0].copy_(numbers)  # a sum of sums would overflow

        return Arm(COLLECTIVES, call, in_turn(before, arms.flush), flushes=arms.flush is not None)


def _alone(arms: Arms, placed: PlacedKernel, compute: Callable[..., object]) -> Arm:
    """A kernel without its collectives, on the same x and weights; what it returns is one rank's part."""
    turn = cycle(placed.copies)

    def enter() -> None:
        arms.source.write(placed.entry[0])

    def call() -> object:
        try:
            return compute(placed.x, next(turn))
        except BaseException as error:  # SystemExit too
            raise BrokenArm(placed.name) from error

    return Arm(placed.name + COMPUTE, call, in_turn(enter, arms.flush), flushes=arms.flush is not None)
