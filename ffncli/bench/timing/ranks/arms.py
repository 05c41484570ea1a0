"""The arms of a case over ranks: kernels with their collectives, the same without them, and the collectives alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle

import torch
import torch.distributed as dist
from torch import Tensor

from ffncli.bench.activity import ACTIVITY
from ffncli.bench.records import COLLECTIVES, COMPUTE
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.fresh_inputs import Source, in_turn
from ffncli.bench.timing.outcomes import BrokenArm, WrongResult, verdict_of
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.ranks.channel import RankChannel
from ffncli.bench.timing.ranks.kernels import Split
from ffncli.bench.timing.rounds import Arm


class RankSource:
    """What another source writes on the first of the ranks that enter the same tokens, on all of them."""

    def __init__(self, own: Source, channel: RankChannel) -> None:
        self.own, self._channel = own, channel

    def draw(self) -> None:
        """Other numbers in the source."""
        self.own.draw()

    def write(self, x: Tensor) -> None:
        """Other contents into x, the same on these ranks."""
        self.own.write(x)
        self._channel.enter_alike(x)

    def write_gradient(self, g: Tensor) -> None:
        """Of no use here: no gradients are computed over ranks."""
        raise NotImplementedError


class RankArms(Arms):
    """The arms of a case over ranks, placed and judged as those of one rank are.

    A kernel that one rank finds wrong is wrong on all of them.
    """

    channel: RankChannel
    splits: Mapping[str, Split]

    def over(self, channel: RankChannel, splits: Mapping[str, Split]) -> RankArms:
        """These arms over the ranks of `channel`, their kernels split as in `splits`."""
        self.channel, self.splits, self.chain = channel, splits, None
        first = self._problem.first.x
        self._sent = torch.empty_like(first)
        return self

    def inspect(self) -> None:
        """The same; then every rank hears of what the others found wrong."""
        super().inspect()
        for rank, wrong in enumerate(self.channel.all({name: verdict_of(w)[1] for name, w in self.wrong.items()})):
            for name, text in wrong.items():
                self.wrong.setdefault(name, WrongResult(f"rank {rank}: {text}"))

    def _arms(self, calls: Mapping[str, int]) -> list[Arm]:
        arms = super()._arms(calls)
        more = [self._alone(placed, alone) for placed in self.kernels if (alone := self.splits[placed.name].alone)]
        if self.channel.group.ranks.ep == 1:
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
        """The all-reduce of an output, of other numbers at every call."""
        over, sent = self.channel.group.mesh["tp"].get_group(), self._sent

        def call() -> object:
            dist.all_reduce(sent, group=over)
            return sent

        return Arm(
            COLLECTIVES, call, in_turn(partial(self._source.write, sent), self._flush), flushes=self._flush is not None
        )


def stand_for(splits: Sequence[str]) -> None:
    """Calls without collectives count as their kernels'."""
    for name in splits:
        ACTIVITY.stands_for(name + COMPUTE, name)
