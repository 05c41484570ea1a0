"""A block over several processes, step by step with the tensors of every rank, as `engine/sharded.py` yields them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field

import torch
from torch import Tensor, distributed
from torch.distributed.tensor import DTensor

from ffncli.block.ranks import Ranks
from ffncli.block.shard import rank_steps
from ffncli.block.steps import AllReduce, Experts, Step, block_inputs
from ffncli.dataclass import dataclass
from ffncli.run.engine.sharded import RankEvent, tokens_of_rank
from ffncli.run.ranks.environment import RANK_TIMEOUT
from ffncli.run.ranks.experts import Choices, Dispatch
from ffncli.run.ranks.group import RankGroup
from ffncli.run.ranks.join import joined
from ffncli.run.ranks.parallel import ParallelBlock


@dataclass
class StepOnRank:
    """A step on one rank, on the CPU: its tensor, and what the rank gave to its all-reduces.

    `choices` and `results` [rows, d]: for experts that are split over ranks, those of this rank's tokens.
    """

    tensor: Tensor = field(default_factory=lambda: torch.zeros(0))
    given: list[Tensor] = field(default_factory=list)
    choices: Choices | None = None
    results: Tensor = field(default_factory=lambda: torch.zeros(0))


class RecordingBlock(ParallelBlock):
    """A block on one rank that records every step."""

    def __init__(self, steps: Sequence[Step], weights: Mapping[str, Tensor], group: RankGroup) -> None:
        self.recorded: list[StepOnRank] = []
        super().__init__(steps, weights, group, _RecordingDispatch(self.recorded))

    def forward(self, *inputs: Tensor) -> Tensor:
        """As the block does, with a new record."""
        self.recorded.clear()
        return super().forward(*inputs)

    def summed(self, part: Tensor) -> Tensor:
        """The same all-reduce, with this rank's part kept."""
        self.recorded[-1].given.append(part.detach().cpu())
        return super().summed(part)

    def _result(self, step: Step, tensors: Mapping[str, Tensor], entered: dict[str, DTensor]) -> Tensor:
        self.recorded.append(StepOnRank())
        out = super()._result(step, tensors, entered)
        self.recorded[-1].tensor = out.detach().cpu()
        return out


class _RecordingDispatch(Dispatch):
    """The same rows, with what came back from other ranks' experts kept in the last record."""

    def __init__(self, recorded: list[StepOnRank]) -> None:
        self.recorded = recorded

    def combined(self, step: Step, out: Tensor, choices: Choices, results: Tensor) -> Tensor:
        if isinstance(step.op, Experts) and step.op.ranks > 1:
            self.recorded[-1].choices = Choices(choices.tokens.cpu(), choices.experts.cpu())
            self.recorded[-1].results = results.detach().cpu()
        return super().combined(step, out, choices, results)


def gathered_events(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], ranks: Ranks, device: str
) -> list[RankEvent]:
    """Run the block over the processes of this run, of which this is one; every step's tensors from all ranks.

    Expert-parallel ranks share the tokens (`tokens_of_rank`). On other ranks than the first the list is empty. Raises
    FFNError as `joined` does.
    """
    every: list[list[StepOnRank] | None] = [None] * ranks.world_size
    with joined(ranks, device, RANK_TIMEOUT) as group, torch.no_grad():
        block, place = RecordingBlock(steps, weights, group), ranks.place(group.rank)[0]
        block(*(tokens_of_rank(inputs[name], place, ranks.ep) for name in block_inputs(steps)))
        distributed.gather_object(block.recorded, every if group.rank == 0 else None)
    if group.rank:
        return []
    program, records = rank_steps(steps, 0, ranks), [one for one in every if one is not None]
    return [event for step, *of_step in zip(program, *records, strict=True) for event in _events(step, of_step, ranks)]


def _events(step: Step, records: Sequence[StepOnRank], ranks: Ranks) -> list[RankEvent]:
    """A step on all ranks, by their records, after the all-reduces inside its experts."""
    tensors = tuple(one.tensor for one in records)
    together = list(zip(*(one.given for one in records), strict=True))
    if isinstance(step.op, AllReduce):
        return [RankEvent(step.output, step, tensors, together[0])]
    inside = [
        _inside(step, parts[at : at + ranks.tp], at) for parts in together for at in range(0, len(parts), ranks.tp)
    ]
    return [*inside, RankEvent(step.output, step, tensors, _results_by_rank(step, records, ranks))]


def _inside(step: Step, parts: tuple[Tensor, ...], first_rank: int) -> RankEvent:
    """An all-reduce inside experts: one for all of a group of ranks, under the name of their first."""
    assert isinstance(step.op, Experts)
    expert = first_rank // len(parts) * step.op.experts.size
    reduces = Step(f"{step.output}.sum", AllReduce(len(parts)), (step.output,))
    summed = sum(parts, torch.zeros_like(parts[0]))
    return RankEvent(f"{step.output}.{expert}.sum", reduces, (summed,) * len(parts), parts)


def _results_by_rank(step: Step, records: Sequence[StepOnRank], ranks: Ranks) -> tuple[Tensor, ...]:
    """The results [tokens, d] of each rank's experts for the tokens of all ranks, from those of each rank's choices."""
    if not (isinstance(step.op, Experts) and step.op.ranks > 1):
        return ()
    sizes = [one.tensor.shape[0] for one in records[:: ranks.tp]]
    out = [one.tensor.new_zeros(sum(sizes), one.tensor.shape[-1]) for one in records]
    for rank, one in enumerate(records):
        assert one.choices is not None
        entered_at, tensor_place = sum(sizes[: ranks.place(rank)[0]]), ranks.place(rank)[1]
        places = one.choices.experts // step.op.experts.size
        for place, results in enumerate(out[tensor_place :: ranks.tp]):
            there = places == place
            results.index_add_(0, one.choices.tokens[there] + entered_at, one.results[there])
    return tuple(out)
