"""The arms of a case over ranks: kernels with their collectives, the same without them, and the collectives alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.bench.activity import REPORTER
from ffncli.bench.judge.roofline import sent_by_rank
from ffncli.bench.records import COLLECTIVES, COMPUTE
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.fresh_inputs import Source, in_turn
from ffncli.bench.timing.outcomes import BrokenArm
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.ranks.channel import RankChannel
from ffncli.bench.timing.ranks.kernels import KernelOverRanks
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.verdict import Ruling


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


class RankArms(Arms):
    """The arms of a case over ranks, placed and judged as those of one rank are.

    A kernel that one rank finds wrong is wrong on all of them.
    """

    channel: RankChannel
    splits: Mapping[str, KernelOverRanks]

    def over(self, channel: RankChannel, splits: Mapping[str, KernelOverRanks]) -> RankArms:
        """These arms over the ranks of `channel`, their kernels split as in `splits`."""
        self.channel, self.splits, self.chain = channel, splits, None
        for name in splits:
            REPORTER.stands_for(name + COMPUTE, name)
        return self

    def inspect(self) -> None:
        """The same; then every rank hears of what the others found wrong."""
        super().inspect()
        for rank, notes in enumerate(self.channel.all({name: ruling.note for name, ruling in self.wrong.items()})):
            for name, note in notes.items():
                self.rule(name, Ruling(f"rank {rank}: {note}"))

    def _arms(self, calls: Mapping[str, int]) -> list[Arm]:
        arms = super()._arms(calls)
        more = [self._alone(placed, alone) for placed in self.kernels if (alone := self.splits[placed.name].alone)]
        more.append(self._collectives())
        self.by_name |= {arm.name: arm for arm in more}
        return [*arms, *more]

    def _alone(self, placed: PlacedKernel, compute: Callable[..., object]) -> Arm:
        """A kernel without its collectives, on the same x and weights; what it returns is one rank's part."""
        turn = cycle(placed.copies)

        def call() -> object:
            try:
                return compute(placed.x, next(turn))
            except BaseException as error:  # SystemExit too
                raise BrokenArm(placed.name) from error

        enter = partial(self._enter, placed)
        return Arm(placed.name + COMPUTE, call, in_turn(enter, self._flush), flushes=self._flush is not None)

    def _enter(self, placed: PlacedKernel) -> None:
        self._source.write(placed.entry[0])

    def _collectives(self) -> Arm:
        """What the block sends, of tensors of the same sizes, without its computing."""
        sizes, group = sent_by_rank(self._problem.case), self.channel.group
        sent, calls = [], []
        for numbers in sizes.all_reduced:
            sent.append(torch.randn(numbers).to(self._problem.first.x))
            calls.append(partial(dist.all_reduce, sent[-1].clone(), group=group.mesh["tp"].get_group()))
        for numbers in sizes.exchanged:
            sent.append(torch.randn(numbers).to(self._problem.first.x))
            arriving = torch.empty_like(sent[-1])
            calls.append(partial(dist.all_to_all_single, arriving, sent[-1], group=group.mesh["ep"].get_group()))

        def call() -> None:
            for one in calls:
                one()

        def before() -> None:
            for one, numbers in zip(calls[: len(sizes.all_reduced)], sent, strict=False):
                one.args[0].copy_(numbers)  # a sum of sums would overflow

        return Arm(COLLECTIVES, call, in_turn(before, self._flush), flushes=self._flush is not None)
