"""How a block is split over ranks, derived from its steps: tensor parallelism splits every d_ff, expert parallelism
splits the experts.

gate and up become column-parallel (their outputs are split) and down becomes row-parallel (its inputs are split), so
that the output of down is a partial sum. The bias of a row-split Linear stays on rank 0 only, so that it is added once.
A partial sum passes through Add and Multiply unreduced if possible, and is reduced when a step needs the full sum: one
AllReduce per block (Shoeybi et al. 2019, arXiv:1909.08053). A norm on the output of every expert needs one more
AllReduce, inside the experts' program.

Expert parallelism (Lepikhin et al. 2020, arXiv:2006.16668) gives each rank whole experts and a part of the tokens: a
token's row goes to the ranks of its experts (dispatch) and the results come back (combine); each is one all-to-all.
Everything else is copied to every rank and works on the rank's own tokens; this includes identity experts and the
experts that every token uses.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, isqrt

from ffncli.block.steps import Add, AllReduce, Axis, Experts, Linear, Multiply, Norm, Op, Step, parameters
from ffncli.errors import FFNError

CONVENTIONS: Mapping[str, str] = {
    "ring_all_reduce_bytes": "sent by each rank: 2 (n - 1) / n × d_model values per token per reduction, in the"
    " activations' dtype",
    "all_to_all_bytes": "sent by each rank for each of its tokens: top_k × (n - 1) / n rows of the experts' width to"
    " the ranks of the chosen experts (dispatch), and as many rows of results back (combine), in the activations'"
    " dtype, if every expert is equally likely and each choice is one row",
    "all_gather_bytes": "sent by each rank if every rank sends its partial sum to every other rank: (n - 1) × d_model"
    " values per token per reduction",
}


def rank_steps(steps: Sequence[Step], rank: int, ranks: "Ranks") -> tuple[Step, ...]:
    """Return the steps that rank `rank` of the grid runs: its part of every d_ff, within its part of the experts.

    Raises the FFNErrors of `shard` and `shard_experts`.
    """
    if not 0 <= rank < ranks.world_size:
        raise FFNError(f"rank must be from 0 to {ranks.world_size - 1}, got {rank}")
    expert_place, tensor_place = ranks.place(rank)
    return shard(shard_experts(steps, expert_place, ranks.ep), tensor_place, ranks.tp)


def shard_experts(steps: Sequence[Step], rank: int, ranks: int) -> tuple[Step, ...]:
    """Return the steps that rank `rank` of `ranks` runs under expert parallelism; names do not change.

    Raises FFNError for a block without experts, and if `ranks` does not divide the number of experts.
    """
    if ranks == 1:
        return tuple(steps)
    routed = {step.output: step.op for step in steps if isinstance(step.op, Experts) and not step.op.always}
    if not routed:
        raise FFNError("the block has no experts to split over ranks")
    _require_divides("experts", [op.experts.size for op in routed.values()], ranks)
    out = []
    for step in steps:
        if op := routed.get(step.output):
            part = _part(op.experts, ranks, "experts")
            step = replace(step, op=replace(op, experts=part, first=rank * part.size, ranks=ranks))
        out.append(step)
    return tuple(out)


def shard(steps: Sequence[Step], rank: int, ranks: int, axis: str = "d_ff") -> tuple[Step, ...]:
    """Return the steps that rank `rank` of `ranks` runs; names do not change, and `down.sum` is the reduced `down`.

    Raises FFNError if `ranks` does not divide `axis`, and for a Norm over the split axis, which would need values
    from the other ranks.
    """
    if not 0 <= rank < ranks:
        raise FFNError(f"rank must be from 0 to {ranks - 1}, got {rank}")
    sizes = [one.size for axes in parameters(steps).values() for one in axes if one.name == axis]
    _require_divides(axis, sizes, ranks)
    return _shard(steps, rank, ranks, axis)[0]


def _shard(
    steps: Sequence[Step], rank: int, ranks: int, axis: str, complete: bool = True
) -> tuple[tuple[Step, ...], bool]:
    """Return the rank's steps, and True if the last output is a partial sum; `complete` appends its AllReduce."""
    out: list[Step] = []
    partial: set[str] = set()
    reduced: dict[str, str] = {}

    def whole(name: str) -> str:
        """Return the name of the complete tensor; if `name` is a partial sum, this is the output of an AllReduce."""
        if name in partial and name not in reduced:
            reduced[name] = f"{name}.sum"
            out.append(Step(reduced[name], AllReduce(ranks), (name,)))
        return reduced.get(name, name)

    for step in steps:
        op, makes_partial = _split(step, rank, ranks, axis)
        split = replace(step, op=op)
        if _stays_partial(step, partial):
            partial.add(step.output)
        else:
            split = replace(split, inputs=tuple(whole(name) for name in step.inputs))
        if ranks > 1 and makes_partial:
            partial.add(step.output)
        out.append(_bias_once(split, rank, partial))
    if steps and complete:
        whole(steps[-1].output)
    return tuple(out), bool(steps) and steps[-1].output in partial


def _split(step: Step, rank: int, ranks: int, axis: str) -> tuple[Op, bool]:
    """Return this rank's part of the op, and True if that part sums over the split axis."""
    op = step.op
    if isinstance(op, Norm) and op.axis.name == axis and ranks > 1:
        raise FFNError(f"step '{step.output}' normalises over {axis}, which cannot be split over ranks")
    if isinstance(op, Experts):
        program, partial = _shard(op.program, rank, ranks, axis, complete=False)
        alone = rank == 0 or not partial  # identity experts act like a bias: rank 0 alone adds the token
        return replace(op, program=program, identity=op.identity if alone else 0), partial
    if isinstance(op, Linear):
        partial = op.into.name == axis
        bias = op.bias and (rank == 0 or not partial)
        return replace(op, into=_part(op.into, ranks, axis), out=_part(op.out, ranks, axis), bias=bias), partial
    return op, False


def _bias_once(step: Step, rank: int, partial: set[str]) -> Step:
    """Remove the bias of an Add of partial sums, except on rank 0."""
    if isinstance(step.op, Add) and step.output in partial and rank:
        return replace(step, op=replace(step.op, bias=None))
    return step


def _stays_partial(step: Step, partial: set[str]) -> bool:
    """Return True if the reduction can wait: for a sum of partial sums, or a partial sum times a complete factor."""
    count = sum(name in partial for name in step.inputs)
    if isinstance(step.op, Add):
        return count == len(step.inputs)
    return isinstance(step.op, Multiply) and count == 1


def _part(axis: Axis, ranks: int, name: str) -> Axis:
    return Axis(axis.name, axis.size // ranks) if axis.name == name else axis


def _require_divides(name: str, sizes: Sequence[int], ranks: int) -> None:
    for size in sizes:
        if size % ranks:
            what = f"{name} = {size} does not divide over {ranks} ranks"
            raise FFNError(what, nearest(ranks, divisors(gcd(*sizes))))


@dataclass(frozen=True)
class Ranks:
    """A grid of ranks: `tp` ranks share every d_ff (tensor parallelism), and `ep` groups of such ranks share the
    experts (expert parallelism).

    The rank at position (e, t) of the grid [ep, tp] has index e × tp + t. Raises FFNError if `tp` or `ep` is below 1.
    """

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, ranks in (("--tp", self.tp), ("--ep", self.ep)):
            if ranks < 1:
                raise FFNError(f"{name} must be at least 1, got {ranks}")

    @property
    def world_size(self) -> int:
        """The number of ranks: tp × ep."""
        return self.tp * self.ep

    def __str__(self) -> str:
        """Return the layout as in the results' column `layout`: `tp2`, `ep4`, `tp2-ep4`."""
        parts = [f"{name}{ranks}" for name, ranks in (("tp", self.tp), ("ep", self.ep)) if ranks > 1]
        return "-".join(parts) or "tp1"

    def place(self, rank: int) -> tuple[int, int]:
        """Return (expert-parallel index, tensor-parallel index) of the rank."""
        return divmod(rank, self.tp)


def divisors(number: int) -> tuple[int, ...]:
    """Return every divisor of `number` in ascending order."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def nearest(number: int, possible: Sequence[int]) -> str:
    """Return text such as `nearest: 4 and 8`: the neighbours of `number` in `possible`, which ascends; "" if none."""
    near = (*[n for n in possible if n < number][-1:], *[n for n in possible if n > number][:1])
    return "nearest: " + " and ".join(map(str, near)) if near else ""
