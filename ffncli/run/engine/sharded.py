"""A block that is split over ranks, run here: a thread for each rank, on its own part of the weights."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError

import torch
from torch import Tensor

from ffncli.block.steps import Step, parameters
from ffncli.run.engine.execute import Mode, run


class _Collective:
    """Sums over ranks: every rank's thread waits until all have given their parts."""

    def __init__(self, ranks: int) -> None:
        self._parts: list[Tensor | None] = [None] * ranks
        self._given, self._read = Barrier(ranks), Barrier(ranks)

    def reduce(self, rank: int, part: Tensor) -> Tensor:
        """The sum of all ranks' parts, in the order of the ranks."""
        self._parts[rank] = part
        self._given.wait()
        total = torch.stack([one for one in self._parts if one is not None]).sum(0)
        self._read.wait()
        return total

    def abort(self) -> None:
        """After an error in one rank the others wait no longer."""
        self._given.abort()
        self._read.abort()


def summed(
    programs: list[tuple[Step, ...]],
    steps: tuple[Step, ...],
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
) -> Tensor:
    """Rank 0's output, after the last all-reduce."""
    shares = [share_of(weights, steps, program, rank) for rank, program in enumerate(programs)]
    collective = _Collective(len(programs))

    def one(rank: int) -> Tensor | BaseException:
        try:
            with torch.no_grad():
                return run(
                    programs[rank], shares[rank], inputs, Mode(reduce=lambda part: collective.reduce(rank, part))
                )
        except BaseException as error:
            collective.abort()
            return error

    with ThreadPoolExecutor(len(programs)) as pool:
        outputs = list(pool.map(one, range(len(programs))))
    errors = [output for output in outputs if isinstance(output, BaseException)]
    if errors:
        raise next((error for error in errors if not isinstance(error, BrokenBarrierError)), errors[0])
    first = outputs[0]
    assert isinstance(first, Tensor)
    return first


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
