"""A mixture's experts on several ranks: a token's rows are sent to the ranks of its experts, and the results back.

Under expert parallelism a forward has two all-to-alls over the mesh dimension `ep`: a rank sends one row for each
choice of its tokens (dispatch) and receives as many results (combine). How many rows come from where is known
beforehand from a small all-gather, of one integer per expert and rank. No row is dropped, however many an expert gets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from ffncli.block.steps import AllReduce, Experts, Step, block_inputs
from ffncli.dataclass import dataclass
from ffncli.run.engine.execute import run, unmixed


@dataclass(frozen=True)
class Choices:
    """A rank's rows, one for each choice of its tokens, ordered by expert: the token and the expert of each [rows]."""

    tokens: Tensor
    experts: Tensor


class Dispatch:
    """Which rows go to which experts, as the route says."""

    def choices(self, step: Step, route: Tensor) -> Choices:
        """Of the route [tokens, experts] to a step's experts, the entries that are not zero."""
        experts, tokens = route.t().nonzero(as_tuple=True)
        return Choices(tokens, experts)

    def counts(self, choices: Choices, experts: int, ep: DeviceMesh | None) -> Tensor:
        """How many rows each rank has for each expert [ranks, experts], on the CPU; without `ep`, this rank alone."""
        rows = torch.bincount(choices.experts, minlength=experts)
        return (rows[None] if ep is None else gathered(rows, ep)).cpu()

    def combined(self, step: Step, out: Tensor, choices: Choices, results: Tensor) -> Tensor:
        """`out` [tokens, d] with the weighed results [rows, d] of a step's choices added to their tokens."""
        return out.index_add(0, choices.tokens, results)


def gathered(rows: Tensor, ep: DeviceMesh) -> Tensor:
    """All ranks' `rows` [experts] as [ranks, experts]: the all-gather before the rows are sent."""
    return DTensor.from_local(rows[None], ep, [Shard(0)], run_check=False).full_tensor()


@dataclass(frozen=True)
class ExpertStep:
    """An Experts step on one rank: its op there, with the rank's experts, and their weights by the step's names.

    `spread` marks a tensor that all tensor-parallel ranks have where it meets one rank's part of d_ff; `reduce` is for
    norms inside the experts. With `divided` the output is one rank's part of a sum.
    """

    step: Step
    op: Experts
    weights: Mapping[str, Tensor]
    divided: bool
    spread: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]

    def mixed(self, x: Tensor, route: Tensor, dispatch: Dispatch, ep: DeviceMesh | None) -> Tensor:
        """x [..., d] and its route [..., entries] → the experts' weighed sum [..., d]; `ep` has the other experts."""
        op, experts = self.op, self.op.experts.size * (1 if ep is None else ep.size())
        flat, share = x.flatten(0, -2), route.flatten(0, -2)
        if self.divided:
            flat, share = self.spread(flat), self.spread(share)
        out = unmixed(op, flat, share)
        share = share[:, -experts:] if op.always else share[:, :experts]
        choices = dispatch.choices(self.step, share.detach())
        counts = dispatch.counts(choices, experts, ep)
        rows, factor = flat[choices.tokens], share[choices.tokens, choices.experts, None]
        rows = rows * factor if op.weigh == "input" else rows
        results = self._results(rows, counts[0].tolist()) if ep is None else self._sent(rows, counts, ep)
        out = dispatch.combined(self.step, out, choices, results if op.weigh == "input" else results * factor)
        return out.reshape(*x.shape[:-1], out.shape[-1])

    def _sent(self, rows: Tensor, counts: Tensor, ep: DeviceMesh) -> Tensor:
        """The results of rows that other ranks' experts compute, while this rank's experts compute the others' rows."""
        ours, place = self.op.experts.size, ep.get_local_rank()
        sent = counts[place].reshape(-1, ours).sum(1).tolist()
        incoming = counts[:, place * ours : (place + 1) * ours]
        received = incoming.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, ep.get_group())
        experts = torch.arange(ours).repeat(ep.size()).repeat_interleave(incoming.flatten())
        order = experts.argsort(stable=True).to(rows.device)  # they arrive by rank, and are run by expert
        results = self._results(arrived[order], incoming.sum(0).tolist())
        results = torch.empty_like(results).index_copy(0, order, results)
        return all_to_all_single_autograd(results, sent, received, ep.get_group())

    def _results(self, rows: Tensor, per_expert: list[int]) -> Tensor:
        """Every expert's results for its rows, which follow each other; one all-reduce for all, if any is needed."""
        rows = rows if self.divided else self.spread(rows)
        busy = [e for e, count in enumerate(per_expert) if count] or [0]  # without rows the graph stays connected
        ends = list(accumulate(per_expert))
        for number, stage in enumerate(stages(self.op.program)):
            rows, (entry,) = self.reduce(rows) if number else rows, block_inputs(stage)
            parts = []
            for e in busy:
                params = self.op.of_one(self.weights, e, self.step.prefix)
                parts.append(run(stage, params, {entry: rows[ends[e] - per_expert[e] : ends[e]]}))
            rows = torch.cat(parts)
        return rows


def stages(program: Sequence[Step]) -> list[tuple[Step, ...]]:
    """The steps between the AllReduces of a program, which each pass on one tensor."""
    cuts = [at for at, step in enumerate(program) if isinstance(step.op, AllReduce)]
    return [tuple(program[a + 1 : b]) for a, b in pairwise([-1, *cuts, len(program)])]
