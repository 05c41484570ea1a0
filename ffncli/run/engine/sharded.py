"""A block split over ranks, simulated in this process: every step runs on one rank after the other, with each rank's
own part of the weights.

All ranks complete a step before any rank starts the next, so a collective can read the parts of all ranks. A rank's
weights are views of the whole weights, not copies.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import AllReduce, Experts, Step, block_inputs, parameters, tables
from ffncli.run.engine.execute import apply, mix, possible, received, unmixed


@dataclass(frozen=True)
class RankEvent:
    """A step on all ranks: its printed name, rank 0's step, and every rank's tensor, in the order of the ranks.

    `parts` are the tensors that a collective combined: for an all-reduce, every rank's summand; for experts split over
    ranks, the results [tokens, d] of each rank's experts for the tokens of all ranks.
    """

    name: str
    step: Step
    tensors: tuple[Tensor, ...]
    parts: tuple[Tensor, ...] = ()


def execute_ranks(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], ranks: Ranks
) -> Iterator[RankEvent]:
    """Yield every step's output on all ranks, as `execute` does for a whole block. The mode is eval.

    The tokens are split over expert-parallel ranks (`tokens_of_rank`), whose tensors are then [tokens, d].
    """
    programs = [rank_steps(steps, rank, ranks) for rank in range(ranks.world_size)]
    shares, entering = [], []
    for rank, program in enumerate(programs):
        expert_place, tensor_place = ranks.place(rank)
        shares.append(share_of(weights, steps, program, tensor_place, expert_place))
        entering.append({name: tokens_of_rank(x, expert_place, ranks.ep) for name, x in inputs.items()})
    yield from _execute(programs, shares, entering, ranks)


def summed(steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], ranks: Ranks) -> Tensor:
    """Return the block's output for all tokens, computed by the ranks together."""
    with torch.no_grad():
        *_, last = execute_ranks(steps, weights, inputs, ranks)
    return joined(last.tensors, ranks).reshape(*next(iter(inputs.values())).shape[:-1], -1)


def tokens_of_rank(x: Tensor, place: int, ranks: int) -> Tensor:
    """Return an expert-parallel rank's part of x [..., d] as [tokens, d]; if the tokens do not divide evenly, the first
    ranks get one more."""
    return x if ranks == 1 else x.flatten(0, -2).tensor_split(ranks)[place]


def joined(tensors: Sequence[Tensor], ranks: Ranks) -> Tensor:
    """Concatenate the tokens of expert-parallel ranks in order, from the first rank of each tensor-parallel group."""
    return tensors[0] if ranks.ep == 1 else torch.cat(list(tensors[:: ranks.tp]))


def share_of(
    weights: Mapping[str, Tensor], steps: Sequence[Step], program: Sequence[Step], rank: int, expert_rank: int = 0
) -> dict[str, Tensor]:
    """Return one rank's weights: its part along every axis that the split made smaller (experts, d_ff)."""
    whole, out = parameters(steps), {name: weights[name] for name in tables(program)}
    for name, axes in parameters(program).items():
        tensor = weights[name]
        for at, (before, after) in enumerate(zip(whole[name], axes, strict=True)):
            if before.size != after.size:
                place = expert_rank if after.name == "experts" else rank
                tensor = tensor.narrow(at, place * after.size, after.size)
        out[name] = tensor
    return out


def _execute(
    programs: Sequence[Sequence[Step]],
    weights: Sequence[Mapping[str, Tensor]],
    inputs: Sequence[Mapping[str, Tensor]],
    ranks: Ranks,
) -> Iterator[RankEvent]:
    """Run each rank's program with that rank's weights and inputs; all programs have the same step names."""
    last_use = {name: at for at, step in enumerate(programs[0]) for name in step.inputs}
    tensors = [dict(one) for one in inputs]
    for at, steps in enumerate(zip(*programs, strict=True)):
        arguments = [[one[name] for name in steps[0].inputs] for one in tensors]
        parts: tuple[Tensor, ...] = ()
        if isinstance(steps[0].op, Experts):
            results, parts = yield from _experts(steps, arguments, weights, ranks)
        elif isinstance(steps[0].op, AllReduce):
            parts = tuple(x for (x,) in arguments)
            results = _all_reduced(parts, ranks)
        else:
            results = []
            for one, mine, read in zip(steps, weights, arguments, strict=True):
                params = {name.rpartition(".")[2]: mine[name] for name in (*one.parameters(), *one.tables())}
                with possible(one, read[0]):
                    results.append(apply(one, params, read))
        for one, result in zip(tensors, results, strict=True):
            one[steps[0].output] = result
            for name in {*steps[0].inputs, steps[0].output}:
                if last_use.get(name, at) == at:
                    del one[name]
        yield RankEvent(steps[0].output, steps[0], tuple(results), parts)


def _all_reduced(parts: Sequence[Tensor], ranks: Ranks) -> list[Tensor]:
    """Return, for every rank, the sum of the parts of its tensor-parallel group, added in rank order."""
    out: list[Tensor] = []
    for start in range(0, len(parts), ranks.tp):
        out += [torch.stack(list(parts[start : start + ranks.tp])).sum(0)] * ranks.tp
    return out


def _experts(
    steps: Sequence[Step], arguments: Sequence[Sequence[Tensor]], weights: Sequence[Mapping[str, Tensor]], ranks: Ranks
) -> Generator[RankEvent, None, tuple[list[Tensor], tuple[Tensor, ...]]]:
    """Return (every rank's mixed output for its own tokens, every rank's expert results before the combine)."""
    flat = [(x.flatten(0, -2), route.flatten(0, -2)) for x, route in arguments]
    sizes = [len(x) for x, _ in flat[:: ranks.tp]]
    exchanged = isinstance(steps[0].op, Experts) and steps[0].op.ranks > 1
    by_rank: list[Tensor] = []
    for start in range(0, len(steps), ranks.tp):
        group = slice(start, start + ranks.tp)
        entering = flat[group]
        if exchanged:  # the dispatch: pass all rows; `received` selects the rows for the group's experts
            entering = [
                tuple(torch.cat(parts) for parts in zip(*flat[place :: ranks.tp], strict=True))  # type: ignore[misc]
                for place in range(ranks.tp)
            ]
        by_rank += yield from _group_results(steps[group], entering, weights[group])
    results = []
    for rank, (step, (x, route)) in enumerate(zip(steps, flat, strict=True)):
        assert isinstance(step.op, Experts)
        expert_place, tensor_place = ranks.place(rank)
        alone = unmixed(step.op, x, route)
        if exchanged:  # the combine
            parts = [torch.split(one, sizes)[expert_place] for one in by_rank[tensor_place :: ranks.tp]]
            results.append(torch.stack([alone, *parts]).sum(0))
        else:
            results.append(alone + by_rank[rank])
    shaped = [one.reshape(*x.shape[:-1], one.shape[-1]) for one, (x, _) in zip(results, arguments, strict=True)]
    return shaped, tuple(by_rank) if exchanged else ()


def _group_results(
    steps: Sequence[Step], entering: Sequence[tuple[Tensor, Tensor]], weights: Sequence[Mapping[str, Tensor]]
) -> Generator[RankEvent, None, list[Tensor]]:
    """Return the results of one tensor-parallel group's experts for all rows, one tensor per rank of the group."""
    ops = [step.op for step in steps if isinstance(step.op, Experts)]
    out = [unmixed(replace(op, identity=0), x, route) for op, (x, route) in zip(ops, entering, strict=True)]
    works = [received(*one) for one in zip(steps, ops, *zip(*entering, strict=True), weights, strict=True)]
    # The ranks of a tensor-parallel group have the same route, so they receive the same experts in the same order.
    for each in zip(*works, strict=True):
        programs = [op.program for op in ops]
        inputs = [{block_inputs(op.program)[0]: one.x} for op, one in zip(ops, each, strict=True)]
        results = tuple(one.x for one in each)
        for event in _execute(programs, [one.weights for one in each], inputs, Ranks(len(steps))):
            results = event.tensors
            yield replace(event, name=f"{steps[0].output}.{each[0].expert}.{event.name}")
        for total, one, result in zip(out, each, results, strict=True):
            mix(total, one, result)
    return out
