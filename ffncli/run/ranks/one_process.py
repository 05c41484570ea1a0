"""A split block in one process: each rank's weights, steps and traffic, and the ranks' sum compared with the output of
the whole block."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from ffncli.block.cost import cost
from ffncli.block.dtypes import dtype
from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import (
    AllReduce,
    Experts,
    Linear,
    Step,
    experts_per_token,
    ffn_steps,
    routes,
    walk,
)
from ffncli.block.symbols import right_hand_side, weight_symbol
from ffncli.models.counting.parallel import (
    Slice,
    all_gather_bytes,
    all_to_all_bytes,
    exchanged,
    ring_all_reduce_bytes,
    slices,
)
from ffncli.run.engine.sharded import RankEvent, execute_ranks, joined, tokens_of_rank
from ffncli.run.engine.trace import excerpt
from ffncli.run.measure.gap import Agreement, agreement

WIRE_RANKS = (2, 4, 8, 16)


@dataclass(frozen=True)
class RankWeight:
    """A parameter with its shape on one rank and its whole shape; matrices are [in, out], as in the formula.

    `place` is defined in `parallel.Slice`.
    """

    name: str
    symbol: str
    shape: tuple[int, ...]
    whole_shape: tuple[int, ...]
    place: str


@dataclass(frozen=True)
class RankStep:
    """A step of the FFN as rank 0 runs it. If `partial` is set, its output is complete only after the next all-reduce.

    `shape` is None inside experts, because it depends on the tokens routed to each expert.
    """

    name: str
    formula: str
    weights: tuple[RankWeight, ...]
    shape: tuple[int, ...] | None
    partial: bool


@dataclass(frozen=True)
class RankShare:
    """The share of one rank: its place in the grid, its parameters, and its traffic.

    `tokens` is the number of tokens that the rank contributes, `experts` the indices of its routed experts, `rows` the
    number of rows that these experts receive (None unless experts are split over ranks). Bytes are the activations that
    this rank sends, in the run's dtype, for the actual choices of experts.
    """

    rank: int
    tensor_rank: int
    expert_rank: int
    params: int
    tokens: int
    experts: tuple[int, ...]
    rows: int | None
    ring_all_reduce_bytes: float
    dispatch_bytes: int
    combine_bytes: int


@dataclass(frozen=True)
class RankTensor:
    """An excerpt of one rank's tensor; `tokens` is each row's token index, or None if every token has a row."""

    rank: int
    shape: tuple[int, ...]
    values: Any
    values_index: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Collective:
    """A collective that combines the ranks' `parts` into one tensor: their sum, or experts' results sent back to the
    tokens.

    `agreement` compares the result with the step `step` of the whole block.
    """

    kind: Literal["all-reduce", "all-to-all"]
    step: str
    output: str
    parts: tuple[RankTensor, ...]
    shape: tuple[int, ...]
    values: Any
    values_index: tuple[tuple[int, ...], ...]
    agreement: Agreement


@dataclass(frozen=True)
class WireBytes:
    """The bytes that each of `ranks` tensor-parallel ranks sends to sum a tensor, with two methods: around a ring, or
    from every rank to all other ranks.

    distributed-llama uses the second method: the partial sums are gathered on every node and added there.
    """

    ranks: int
    ring_all_reduce_bytes: float
    gather_and_sum_bytes: int


@dataclass(frozen=True)
class RankTrace:
    """A trace of a block split over tp × ep ranks. `agreement` compares the output with the output of the whole block.

    `all_reduces` and `all_to_alls` count the collectives of rank 0. `reduced_bytes` is the size of the tensors that one
    rank contributes to all-reduces. `unneeded_all_gather_bytes` is the number of bytes that each rank would have to
    send if it shared the input of its down projection with all other ranks. `expected_dispatch_bytes` is the mean of a
    rank's dispatch bytes with even routing.
    """

    tp: int
    ep: int
    dtype: str
    steps: tuple[RankStep, ...]
    shares: tuple[RankShare, ...]
    collectives: tuple[Collective, ...]
    all_reduces: int
    all_to_alls: int
    output: str
    agreement: Agreement
    reduced_bytes: int
    unneeded_all_gather_bytes: int
    wire: tuple[WireBytes, ...]
    expected_dispatch_bytes: float


def compared_steps(steps: Sequence[Step], ranks: Ranks) -> frozenset[str]:
    """Return the names of the whole block's steps whose tensors are compared with tensors of the split block."""
    first = rank_steps(steps, 0, ranks)
    reduced = {step.inputs[0] for step in first if isinstance(step.op, AllReduce)}
    return frozenset(reduced | {step.output for step in first if _exchanged(step)} | {steps[-1].output})


def rank_trace(
    steps: Sequence[Step],
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    ranks: Ranks,
    whole: Mapping[str, Tensor],
    show: int | None = 8,
    events: Iterable[RankEvent] | None = None,
) -> RankTrace:
    """Run the block split over ranks. `whole` contains the tensors of `compared_steps`; `show` is the number of values
    recorded per axis.

    `events` are the events of a run over processes; by default, all ranks run in this process.
    """
    seen = _Seen(steps, ranks, inputs)
    with torch.no_grad():
        for event in execute_ranks(steps, weights, inputs, ranks) if events is None else events:
            seen.take(event)
    x, last, first = next(iter(inputs.values())), steps[-1].output, rank_steps(steps, 0, ranks)
    tokens, width = prod(x.shape[:-1]), x.element_size()
    reduced = seen.reduced[0] * width
    return RankTrace(
        tp=ranks.tp,
        ep=ranks.ep,
        dtype=str(x.dtype).removeprefix("torch."),
        steps=_rank_steps(steps, ranks, seen.shapes),
        shares=_shares(steps, ranks, seen, width, tokens),
        collectives=tuple(_collective(event, ranks, whole, show) for event in seen.collectives),
        all_reduces=sum(isinstance(step.op, AllReduce) for _, step in walk(first)),
        all_to_alls=2 * sum(_exchanged(step) for step in first),
        output=last,
        agreement=agreement(joined(seen.output, ranks).reshape(whole[last].shape), whole[last]),
        reduced_bytes=reduced,
        unneeded_all_gather_bytes=all_gather_bytes(_entering_down(first, tokens) * width, ranks.tp),
        wire=tuple(
            WireBytes(n, ring_all_reduce_bytes(reduced, n), all_gather_bytes(reduced, n)) for n in WIRE_RANKS if reduced
        ),
        expected_dispatch_bytes=all_to_all_bytes(exchanged(steps)[0] * width * tokens, ranks.ep) / ranks.ep,
    )


class _Seen:
    """The parts of a run's events that are kept: the collectives, the routes, the shapes on rank 0, the output.

    `reduced` counts the values that each rank contributes to all-reduces.
    """

    def __init__(self, steps: Sequence[Step], ranks: Ranks, inputs: Mapping[str, Tensor]) -> None:
        self._routes = routes(steps)
        self._ranks = ranks
        self.collectives: list[RankEvent] = []
        self.reduced = [0] * ranks.world_size
        self.routes: dict[str, tuple[Tensor, ...]] = {}
        self.shapes = {name: tuple(x.shape) for name, x in inputs.items()}
        self.output: tuple[Tensor, ...] = ()

    def take(self, event: RankEvent) -> None:
        """Keep the relevant parts of one event."""
        inside = event.name != event.step.output
        if isinstance(event.step.op, AllReduce):
            start = 0
            if inside:  # `experts.3.down.sum` belongs to the ranks that have expert 3
                (experts,) = self._routes.values()
                each = experts.experts.size // self._ranks.ep
                start = self._ranks.tp * (int(event.name.split(".")[1]) // each)
            for rank, part in enumerate(event.parts, start):
                self.reduced[rank] += part.numel()
        if inside:
            return
        if event.parts:
            self.collectives.append(event)
        if event.name in self._routes:
            self.routes[event.name] = event.tensors
        self.shapes[event.name] = tuple(event.tensors[0].shape)
        self.output = event.tensors


def _exchanged(step: Step) -> bool:
    """Return whether two all-to-alls exchange this step's rows, because its experts are split over ranks."""
    return isinstance(step.op, Experts) and step.op.ranks > 1


def _rank_steps(steps: Sequence[Step], ranks: Ranks, shapes: Mapping[str, tuple[int, ...]]) -> tuple[RankStep, ...]:
    """Return the FFN's steps on rank 0; steps inside experts come before the step that mixes their results."""
    first, other = (rank_steps(steps, rank, ranks) for rank in (0, ranks.tp - 1))
    cut = {one.name: one for one in slices(steps, first, other, dtype("fp32"), ranks)}
    reduced = {step.inputs[0] for step in first if isinstance(step.op, AllReduce)}
    out = []
    for step in ffn_steps(first):
        program = step.op.program if isinstance(step.op, Experts) else ()
        for inner in program:
            weights = _weights(inner, program, cut, step.prefix)
            name = f"{step.output}[e].{inner.output}"
            out.append(RankStep(name, right_hand_side(inner, program), weights, None, False))
        weights = () if isinstance(step.op, Experts) else _weights(step, first, cut)
        formula = right_hand_side(next((one for one in steps if one.output == step.output), step), first)
        shape = shapes[step.output]
        out.append(RankStep(step.output, formula, weights, shape, step.output in reduced))
    return tuple(out)


def _weights(step: Step, steps: Sequence[Step], cut: Mapping[str, Slice], prefix: str = "") -> tuple[RankWeight, ...]:
    """Return a step's parameters from the slices `cut`; names of expert parameters begin with `prefix`."""
    out = []
    for name in step.parameters():
        one, matrix = cut[prefix + name], isinstance(step.op, Linear) and name.endswith(".weight")
        symbol = weight_symbol(step.output, name.rpartition(".")[2], steps)
        # torch stores [out, in]; formulas multiply by [in, out]
        shape, whole = ((*s[:-2], s[-1], s[-2]) if matrix else s for s in (one.rank_shape, one.shape))
        out.append(RankWeight(one.name, symbol, shape, whole, one.place))
    return tuple(out)


def _shares(steps: Sequence[Step], ranks: Ranks, seen: _Seen, width: int, tokens: int) -> tuple[RankShare, ...]:
    entered = [len(part) for part in torch.arange(tokens).tensor_split(ranks.ep)]
    out = []
    for rank in range(ranks.world_size):
        program, (expert_rank, tensor_rank) = rank_steps(steps, rank, ranks), ranks.place(rank)
        experts: list[int] = []
        rows = sent = back = 0
        for step in filter(_exchanged, program):
            op, into = step.op, tuple(seen.routes[step.inputs[1]][:: ranks.tp])
            assert isinstance(op, Experts)
            experts += range(op.experts.size * ranks.ep)[op.entries]
            received = [int((route.flatten(0, -2)[:, op.entries] != 0).sum()) for route in into]
            chosen = int((into[expert_rank].flatten(0, -2)[:, : op.experts.size * ranks.ep] != 0).sum())
            rows += sum(received)
            sent += (chosen - received[expert_rank]) * seen.shapes[step.inputs[0]][-1]
            back += (sum(received) - received[expert_rank]) * seen.shapes[step.output][-1]
        ring = ring_all_reduce_bytes(seen.reduced[rank] * width, ranks.tp)
        out.append(
            RankShare(
                rank, tensor_rank, expert_rank, cost(program).params, entered[expert_rank], tuple(experts),
                rows if experts else None, ring, sent * width, back * width,
            )
        )  # fmt: skip
    return tuple(out)


def _collective(event: RankEvent, ranks: Ranks, whole: Mapping[str, Tensor], show: int | None) -> Collective:
    """Describe one collective outside the experts, with every rank's part."""
    reduces = isinstance(event.step.op, AllReduce)
    step = event.step.inputs[0] if reduces else event.name
    tensors = [event.tensors[start :: ranks.tp] for start in range(ranks.tp)]
    if reduces or _reduced_inside(event.step):
        tensors = tensors[:1]  # all tensor-parallel ranks have the whole result, not a part of it
    result = sum(joined(one, Ranks(ep=ranks.ep)) for one in tensors).reshape(whole[step].shape)  # type: ignore
    index, values = excerpt(result, show)
    parts = []
    for rank, part in enumerate(event.parts):
        tokens = tokens_of_rank(torch.arange(result[..., 0].numel())[:, None], ranks.place(rank)[0], ranks.ep)
        at, shown = excerpt(part, show)
        numbers = tuple(tokens.flatten().tolist()) if reduces and ranks.ep > 1 else None
        parts.append(RankTensor(rank, tuple(part.shape), shown, at, numbers))
    return Collective(
        "all-reduce" if reduces else "all-to-all", step, event.name, tuple(parts), tuple(result.shape), values, index,
        agreement(result, whole[step]),
    )  # fmt: skip


def _reduced_inside(step: Step) -> bool:
    """Return whether the experts' own program sums over tensor-parallel ranks."""
    return isinstance(step.op, Experts) and any(isinstance(one.op, AllReduce) for one in step.op.program)


def _entering_down(program: Sequence[Step], tokens: int) -> int:
    """Return the number of values that enter a rank's row-parallel matrices, in experts those of all chosen experts."""
    taken = experts_per_token(program)
    out = 0
    for step in program:
        if isinstance(step.op, Experts):
            out += taken[step.output] * _entering_down(step.op.program, tokens)
        elif isinstance(step.op, Linear) and step.op.into.name == "d_ff":
            out += tokens * step.op.into.size
    return out
