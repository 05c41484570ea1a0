"""Tensor parallelism as a reading of the steps: split every axis named d_ff over n ranks.

gate and up become column-parallel (their outputs are split) and down row-parallel (its inputs are split), so that its
output is a partial sum; the bias of a row-split Linear stays on rank 0 alone, so that the sum has it once. A partial
sum passes through Add and Multiply where possible, and is reduced where a step needs the full sum: one AllReduce per
block (Shoeybi et al. 2019, arXiv:1909.08053).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ffncli.block.steps import Add, AllReduce, Axis, Experts, Linear, Multiply, Norm, Op, Step
from ffncli.errors import FFNError

CONVENTIONS: Mapping[str, str] = {
    "ring_all_reduce_bytes": "sent by each rank: 2 (n - 1) / n × d_model values per token and reduction, in the"
    " activations' dtype",
    "all_gather_bytes": "sent by each rank where every rank sends its partial sum to every other: (n - 1) × d_model"
    " values per token and reduction",
}


def shard(steps: Sequence[Step], rank: int, ranks: int, axis: str = "d_ff") -> tuple[Step, ...]:
    """The steps that rank `rank` of `ranks` runs; names stay, `down.sum` is the reduced `down`.

    Raises FFNError if `ranks` does not divide `axis`, and for a Norm over the split axis, which would need values
    from the other ranks.
    """
    if not 0 <= rank < ranks:
        raise FFNError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    out: list[Step] = []
    partial: set[str] = set()
    reduced: dict[str, str] = {}

    def whole(name: str) -> str:
        """The name under which `name` is complete on every rank, reducing it now if it is not."""
        if name in partial and name not in reduced:
            reduced[name] = f"{name}.sum"
            out.append(Step(reduced[name], AllReduce(ranks), (name,)))
        return reduced.get(name, name)

    for step in steps:
        split = replace(step, op=_split(step, rank, ranks, axis))
        if _stays_partial(step, partial):
            partial.add(step.output)
        else:
            split = replace(split, inputs=tuple(whole(name) for name in step.inputs))
        if ranks > 1 and _makes_partial(step, axis):
            partial.add(step.output)
        out.append(split)
    if steps:
        whole(steps[-1].output)
    return tuple(out)


def _split(step: Step, rank: int, ranks: int, axis: str) -> Op:
    """This rank's form of the op; unchanged if there is nothing to split."""
    op = step.op
    if isinstance(op, Norm) and op.axis.name == axis and ranks > 1:
        raise FFNError(f"step '{step.output}' normalises over {axis}, which cannot be split over ranks")
    if isinstance(op, Experts):
        program = tuple(replace(s, op=_split(s, rank, ranks, axis)) for s in op.program)
        alone = rank == 0 or not _makes_partial(step, axis)  # as a bias: the token itself is added once
        return replace(op, program=program, identity=op.identity if alone else 0)
    if isinstance(op, Linear):
        alone = op.into.name != axis or rank == 0
        return Linear(_part(op.into, ranks, axis), _part(op.out, ranks, axis), op.bias and alone)
    return op


def _makes_partial(step: Step, axis: str) -> bool:
    """Whether the op sums over the split axis: a row-split Linear, or experts whose down projection is one."""
    if isinstance(step.op, Experts):
        return any(_makes_partial(inner, axis) for inner in step.op.program)
    return isinstance(step.op, Linear) and step.op.into.name == axis


def _stays_partial(step: Step, partial: set[str]) -> bool:
    """Whether the sum over ranks may wait: a sum of partial sums, or a partial sum times a complete factor."""
    count = sum(name in partial for name in step.inputs)
    if isinstance(step.op, Add):
        return count == len(step.inputs)
    return isinstance(step.op, Multiply) and count == 1


def _part(axis: Axis, ranks: int, name: str) -> Axis:
    if axis.name != name:
        return axis
    if axis.size % ranks:
        raise FFNError(f"{name} = {axis.size} does not divide over {ranks} ranks")
    return Axis(axis.name, axis.size // ranks)
