"""A block over several processes, step by step with the tensors of every rank, as `engine/sharded.py` yields them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from ffncli.block.ranks import Ranks
from ffncli.block.shard import rank_steps
from ffncli.block.steps import AllReduce, Step, block_inputs
from ffncli.run.engine.sharded import RankEvent
from ffncli.run.ranks.environment import RANK_TIMEOUT
from ffncli.run.ranks.join import joined
from ffncli.run.ranks.parallel import ParallelBlock

Recorded = list[tuple[Tensor, list[Tensor]]]  # for each step its tensor, and what this rank gave to its all-reduces


class RecordingBlock(ParallelBlock):
    """A block on one rank that keeps every step's tensor, and the parts that it gives to all-reduces, on the CPU."""

    recorded: Recorded

    def forward(self, *inputs: Tensor) -> Tensor:
        """As the block does, with a new record."""
        self.recorded = []
        return super().forward(*inputs)

    def summed(self, part: Tensor) -> Tensor:
        """The same all-reduce, with this rank's part kept."""
        self.given.append(part.detach().cpu())
        return super().summed(part)

    def _result(self, step: Step, tensors: Mapping[str, Tensor], entered: dict[str, DTensor]) -> Tensor:
        self.given: list[Tensor] = []
        out = super()._result(step, tensors, entered)
        self.recorded.append((out.detach().cpu(), self.given))
        return out


def gathered_events(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], ranks: Ranks, device: str
) -> list[RankEvent]:
    """Run the block over the processes of this run, of which this is one; every step's tensors from all ranks.

    Only tensor-parallel ranks, which all enter every token. On other ranks than the first the list is empty. Raises
    FFNError as `joined` does.
    """
    every: list[Recorded | None] = [None] * ranks.world_size
    with joined(ranks, device, RANK_TIMEOUT) as group, torch.no_grad():
        block = RecordingBlock(steps, weights, group)
        block(*(inputs[name] for name in block_inputs(steps)))
        distributed.gather_object(block.recorded, every if group.rank == 0 else None)
    if group.rank:
        return []
    program, records = rank_steps(steps, 0, ranks), [one for one in every if one is not None]
    events: list[RankEvent] = []
    for at, step in enumerate(program):
        tensors, given = zip(*(one[at] for one in records), strict=True)
        together = [tuple(parts) for parts in zip(*given, strict=True)]
        if isinstance(step.op, AllReduce):
            events.append(RankEvent(step.output, step, tensors, together[0]))
            continue
        events += [_inside(step, parts) for parts in together]
        events.append(RankEvent(step.output, step, tensors))
    return events


def _inside(step: Step, parts: tuple[Tensor, ...]) -> RankEvent:
    """An all-reduce inside experts, one for all of them."""
    reduces = Step(f"{step.output}.sum", AllReduce(len(parts)), (step.output,))
    return RankEvent(f"{step.output}.0.sum", reduces, (sum(parts, torch.zeros_like(parts[0])),) * len(parts), parts)
