"""A block that is split over ranks, run here: the ranks one after the other, each on its own part of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ffncli.block.steps import AllReduce, Step, parameters
from ffncli.run.engine.execute import Mode, run


@dataclass
class _Collective:
    """The all-reduces of one run: the first ones return their sums, the next one records this rank's part."""

    sums: list[Tensor]
    parts: list[Tensor] = field(default_factory=list)
    at: int = 0

    def reduce(self, part: Tensor) -> Tensor:
        """The sum over ranks, once the ranks have computed it."""
        self.at += 1
        if self.at <= len(self.sums):
            return self.sums[self.at - 1]
        if self.at == len(self.sums) + 1:
            self.parts.append(part)
        return part


def summed(
    programs: list[tuple[Step, ...]],
    steps: tuple[Step, ...],
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """The output after the last all-reduce: all ranks run once per all-reduce, and rank 0 once more."""
    shares = [share_of(weights, steps, program, rank) for rank, program in enumerate(programs)]
    sums: list[Tensor] = []
    for _ in [step for step in programs[0] if isinstance(step.op, AllReduce)]:
        collective = _Collective(sums)
        for program, share in zip(programs, shares, strict=True):
            collective.at = 0
            run(program, share, inputs, Mode(reduce=collective.reduce))
        sums = [*sums, torch.stack(collective.parts).sum(0)]
    return run(programs[0], shares[0], inputs, Mode(reduce=_Collective(sums).reduce))


def share_of(
    weights: Mapping[str, Tensor], steps: tuple[Step, ...], program: tuple[Step, ...], rank: int
) -> dict[str, Tensor]:
    """One rank's weights: its part along every axis that became smaller."""
    whole, out = parameters(steps), {}
    for name, axes in parameters(program).items():
        tensor = weights[name]
        for at, (before, after) in enumerate(zip(whole[name], axes, strict=True)):
            if before.size != after.size:
                tensor = tensor.narrow(at, rank * after.size, after.size)
        out[name] = tensor
    return out
