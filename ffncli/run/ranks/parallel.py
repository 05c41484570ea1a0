"""A block whose weights are split over ranks: the steps from `block/shard.py`, executed with DTensor.

A Linear that is split along its outputs becomes ColwiseParallel; a Linear that is split along its inputs becomes
RowwiseParallel. The other steps run on a rank's values as in `engine/execute.py`.

Under expert parallelism, a forward pass has two all-to-alls over the mesh dimension `ep`: a rank sends one row per
choice of its tokens (dispatch) and receives one result per row (combine). Before that, a small all-gather of one
integer per expert and rank tells each rank how many rows it receives from every other rank. No row is dropped,
regardless of the load of an expert.

`gathered_events` runs the block step by step and yields the tensors of every rank, as `engine/sharded.py` does.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise

import torch
from torch import Tensor, distributed, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.steps import AllReduce, Axis, Experts, Linear, Step, block_inputs, parameters, tables
from ffncli.run.engine.execute import Mode, apply, run, unmixed
from ffncli.run.engine.sharded import RankEvent, tokens_of_rank
from ffncli.run.ranks.environment import RANK_TIMEOUT
from ffncli.run.ranks.join import joined
from ffncli.run.ranks.store import RankGroup


class Dispatch:
    """The default policy for sending rows to experts: follow the route."""

    def choices(self, step: Step, route: Tensor) -> "Choices":
        """Return the nonzero entries of the route [tokens, experts] to a step's experts."""
        experts, tokens = route.t().nonzero(as_tuple=True)
        return Choices(tokens, experts)

    def counts(self, choices: "Choices", experts: int, ep: DeviceMesh | None) -> Tensor:
        """Return each rank's row count per expert, [ranks, experts] on the CPU; without `ep`, only this rank's."""
        rows = torch.bincount(choices.experts, minlength=experts)
        return (rows[None] if ep is None else gathered(rows, ep)).cpu()

    def combined(self, step: Step, out: Tensor, choices: "Choices", results: Tensor) -> Tensor:
        """Add the weighted results [rows, d] of a step's choices to their tokens in `out` [tokens, d]."""
        return out.index_add(0, choices.tokens, results)


_ROUTED = Dispatch()


class ParallelBlock(nn.Module):
    """The part of the block `steps` on one rank of `group`, in eval mode; its weights are frozen until
    `requires_grad_()`.

    After one all-reduce over the dimension `tp`, all ranks along `tp` have the output; the backward pass has one
    all-reduce for the input's gradient. Along `ep`, every rank passes its own tokens, any number of them. The gradients
    of replicated weights then cover only the rank's own tokens, and must be summed over `ep` as in data parallelism.
    `weights` are the weights of the whole block, on any device; each rank keeps its part of them. `reduce` may be
    replaced, for example to skip the all-reduces.
    """

    def __init__(
        self, steps: Sequence[Step], weights: Mapping[str, Tensor], group: RankGroup, dispatch: Dispatch = _ROUTED
    ) -> None:
        super().__init__()
        self.steps = rank_steps(steps, group.rank, group.ranks)
        self.styles, self.divided = styles(steps, self.steps), divided(steps, self.steps)
        last = group.rank - group.rank % group.ranks.tp + group.ranks.tp - 1
        everywhere = parameters(rank_steps(steps, last, group.ranks)).keys()  # a bias added only once is on rank 0
        self.spread_parameters = spread_parameters(steps, self.steps) & everywhere
        self.group, self.tp, self.dispatch = group, group.mesh["tp"], dispatch
        self.reduce: Callable[[Tensor], Tensor] = self.summed
        self.parts = nn.Module()
        axes = parameters(steps)
        for step in self.steps:
            if style := self.styles.get(step.output):
                self._add_linear(step, style, weights)
                continue
            for name, local in step.parameters().items():
                self._add(name, _frozen(self._part(weights[name], axes[name], local)))
        for name in tables(steps):
            self._add(name, weights[name].to(group.device))
        self.eval()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the block's output for its inputs: x [..., d_model], then the inputs that follow it in
        `block_inputs`."""
        tensors = dict(zip(block_inputs(self.steps), inputs, strict=True))
        last_use = {name: at for at, step in enumerate(self.steps) for name in step.inputs}
        entered: dict[str, DTensor] = {}
        for at, step in enumerate(self.steps):
            tensors[step.output] = self._result(step, tensors, entered)
            for name in set(step.inputs):
                if last_use[name] == at:
                    del tensors[name]
                    entered.pop(name, None)
        return tensors[self.steps[-1].output]

    @property
    def local_weights(self) -> dict[str, Tensor]:
        """This rank's parts of the weights, by canonical name."""
        return {name: _local(parameter).detach() for name, parameter in self.parts.named_parameters()}

    def summed(self, part: Tensor) -> Tensor:
        """Return the sum of `part` over all ranks along `tp` (an all-reduce)."""
        partial = DTensor.from_local(part, self.tp, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()

    def spread(self, x: Tensor) -> Tensor:
        """Return x unchanged; the backward pass sums the ranks' parts of x's gradient along `tp`."""
        if self.group.ranks.tp == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        copied = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
        return copied.to_local(grad_placements=[Partial()])

    def _result(self, step: Step, tensors: Mapping[str, Tensor], entered: dict[str, DTensor]) -> Tensor:
        """Return one step's output: the complete output or this rank's part of it."""
        if style := self.styles.get(step.output):
            return self._product(step, style, tensors[step.inputs[0]], entered)
        params = {name: self._local(name) for name in (*step.parameters(), *step.tables())}
        for name in params:  # The order must be the same on all ranks, because the gradients' all-reduces follow it
            if name in self.spread_parameters:
                params[name] = self.spread(params[name])
        inputs = [tensors[name] for name in step.inputs]
        if isinstance(step.op, Experts):
            ep = self.group.mesh["ep"] if self.group.ranks.ep > 1 and not step.op.always else None
            experts = ExpertStep(step, step.op, params, step.output in self.divided, self.spread, self.reduce)
            return experts.mixed(inputs[0], inputs[1], self.dispatch, ep)
        if step.output in self.divided:
            inputs = [x if n in self.divided else self.spread(x) for n, x in zip(step.inputs, inputs, strict=True)]
        return apply(step, {n.rpartition(".")[2]: p for n, p in params.items()}, inputs, Mode(reduce=self.reduce))

    def _product(self, step: Step, style: ParallelStyle, x: Tensor, entered: dict[str, DTensor]) -> Tensor:
        """Return a split Linear's output; gate and up share one DTensor, so one all-reduce sums their gradients."""
        linear, (name,) = self.parts.get_submodule(step.output), step.inputs
        if isinstance(style, ColwiseParallel):
            if name not in entered:
                entered[name] = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
            return linear(entered[name])  # type: ignore[no-any-return]
        part: Tensor = linear(x)
        return part if linear.bias is None else part + linear.bias  # type: ignore[operator]  # a Linear's bias

    def _add_linear(self, step: Step, style: ParallelStyle, weights: Mapping[str, Tensor]) -> None:
        """Add a split Linear, parallelized in torch's own style; it contains only this rank's part of the weights."""
        params = {name.rpartition(".")[2]: weights[name] for name in step.parameters()}
        bias = params.pop("bias", None) if isinstance(style, RowwiseParallel) else None  # added by rank 0
        out, into = params["weight"].shape
        kind = nn.Linear if isinstance(style, ColwiseParallel) else _RowLinear
        linear = kind(into, out, "bias" in params, device="meta")
        for name, tensor in params.items():
            linear.register_parameter(name, _frozen(tensor))
        holder, key = self._holder(step.output)
        holder.add_module(key, linear)
        parallelize_module(self.parts, self.tp, {step.output: style}, src_data_rank=None)
        if bias is not None:
            linear.bias = _frozen(bias.to(self.group.device))

    def _part(self, tensor: Tensor, whole: Sequence[Axis], local: Sequence[Axis]) -> Tensor:
        """Return this rank's part of a parameter that torch's style for Linears does not split; return the whole
        parameter if it has no parts."""
        split = {
            "ep" if before.name == "experts" else "tp": Shard(at)
            for at, (before, after) in enumerate(zip(whole, local, strict=True))
            if before.size != after.size
        }
        if not split:
            return tensor.to(self.group.device)
        return distribute_tensor(tensor, self.group.mesh[tuple(split)], list(split.values()), src_data_rank=None)

    def _add(self, name: str, tensor: Tensor) -> None:
        holder, key = self._holder(name)
        if isinstance(tensor, nn.Parameter):
            holder.register_parameter(key, tensor)
        else:
            holder.register_buffer(key, tensor)

    def _local(self, name: str) -> Tensor:
        holder, key = self._holder(name)
        return _local(getattr(holder, key))

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        """Return (the submodule of `shared.up.weight` or `shared.up`, added if missing; the last part of the name)."""
        *path, key = name.split(".")
        module = self.parts
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, key


class _RowLinear(nn.Linear):
    """A row-parallel Linear without its bias, which rank 0 adds to its part of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's part of the sum [..., out] for x [..., in / ranks]."""
        return functional.linear(x, self.weight)


def styles(whole: Sequence[Step], local: Sequence[Step]) -> dict[str, ParallelStyle]:
    """Return the style of each Linear that is split over ranks.

    The output of a row-parallel Linear stays a part of the sum; an AllReduce step reduces it.
    """
    ops = {step.output: step.op for step in whole}
    out: dict[str, ParallelStyle] = {}
    for step in local:
        before = ops.get(step.output)
        if isinstance(step.op, Linear) and isinstance(before, Linear):
            if before.out != step.op.out:
                out[step.output] = ColwiseParallel()
            elif before.into != step.op.into:
                out[step.output] = RowwiseParallel(output_layouts=Partial())
    return out


def divided(whole: Sequence[Step], local: Sequence[Step]) -> frozenset[str]:
    """Return the names of outputs that differ between tensor-parallel ranks: slices of d_ff, and parts of sums."""
    split, ops, out = styles(whole, local).keys(), {step.output: step.op for step in whole}, set[str]()
    for step in local:
        before = ops.get(step.output)
        if isinstance(step.op, Experts) and isinstance(before, Experts):
            differs = step.op.program[-1].output in divided(before.program, step.op.program)
        else:
            differs = step.output in split or bool(out & {*step.inputs})
        if differs and not isinstance(step.op, AllReduce):
            out.add(step.output)
    return frozenset(out)


def spread_parameters(whole: Sequence[Step], local: Sequence[Step]) -> frozenset[str]:
    """Return the parameters of all steps with `divided` outputs except Linears, such as activations and factors."""
    out: set[str] = set()
    ops = {step.output: step.op for step in whole}
    names = divided(whole, local)
    for step in local:
        before = ops.get(step.output)
        if isinstance(step.op, Experts) and isinstance(before, Experts):
            out |= {step.prefix + name for name in spread_parameters(before.program, step.op.program)}
        elif step.output in names and not isinstance(step.op, Linear):
            out |= step.parameters().keys()
    return frozenset(out)


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Choices:
    """A rank's rows, one per choice of its tokens, ordered by expert: the token and the expert of each row."""

    tokens: Tensor
    experts: Tensor


def gathered(rows: Tensor, ep: DeviceMesh) -> Tensor:
    """All-gather the row counts `rows` [experts] of all ranks into [ranks, experts] before the rows are sent."""
    return DTensor.from_local(rows[None], ep, [Shard(0)], run_check=False).full_tensor()


@dataclass(frozen=True)
class ExpertStep:
    """An Experts step on one rank: its op, with only the rank's experts, and their weights by the step's parameter
    names.

    `spread` is applied to a tensor that all tensor-parallel ranks have, before it is combined with one rank's part of
    d_ff; `reduce` sums over ranks before norms inside the experts. If `divided` is True, the output is one rank's part
    of a sum.
    """

    step: Step
    op: Experts
    weights: Mapping[str, Tensor]
    divided: bool
    spread: Callable[[Tensor], Tensor]
    reduce: Callable[[Tensor], Tensor]

    def mixed(self, x: Tensor, route: Tensor, dispatch: Dispatch, ep: DeviceMesh | None) -> Tensor:
        """Return the weighted sum [..., d] of all ranks' experts for x [..., d] and its route [..., entries]."""
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
        """Exchange rows: send each row to its expert's rank, compute the received rows, send the results back."""
        ours, place = self.op.experts.size, ep.get_local_rank()
        sent = counts[place].reshape(-1, ours).sum(1).tolist()
        incoming = counts[:, place * ours : (place + 1) * ours]
        received = incoming.sum(1).tolist()
        arrived = all_to_all_single_autograd(rows, received, sent, ep.get_group())
        experts = torch.arange(ours).repeat(ep.size()).repeat_interleave(incoming.flatten())
        order = experts.argsort(stable=True).to(rows.device)  # rows arrive sorted by rank, and run sorted by expert
        results = self._results(arrived[order], incoming.sum(0).tolist())
        results = torch.empty_like(results).index_copy(0, order, results)
        return all_to_all_single_autograd(results, sent, received, ep.get_group())

    def _results(self, rows: Tensor, per_expert: list[int]) -> Tensor:
        """Return every expert's results for its rows, concatenated; one all-reduce, if needed, serves them all."""
        rows = rows if self.divided else self.spread(rows)
        # Run at least one expert, even without rows, so that the autograd graph stays connected.
        busy = [e for e, count in enumerate(per_expert) if count] or [0]
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
    """Split a program at its AllReduce steps, each of which passes on one tensor."""
    cuts = [at for at, step in enumerate(program) if isinstance(step.op, AllReduce)]
    return [tuple(program[a + 1 : b]) for a, b in pairwise([-1, *cuts, len(program)])]


@dataclass
class StepOnRank:
    """A step on one rank, on the CPU: its tensor, and the tensors that the rank contributed to its all-reduces
    (`given`).

    If experts are split over ranks, `choices` and `results` [rows, d] belong to this rank's tokens.
    """

    tensor: Tensor = field(default_factory=lambda: torch.zeros(0))
    given: list[Tensor] = field(default_factory=list)
    choices: Choices | None = None
    results: Tensor = field(default_factory=lambda: torch.zeros(0))


class RecordingBlock(ParallelBlock):
    """A ParallelBlock that records every step."""

    def __init__(self, steps: Sequence[Step], weights: Mapping[str, Tensor], group: RankGroup) -> None:
        self.recorded: list[StepOnRank] = []
        super().__init__(steps, weights, group, _RecordingDispatch(self.recorded))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run the block with a new record."""
        self.recorded.clear()
        return super().forward(*inputs)

    def summed(self, part: Tensor) -> Tensor:
        """Record this rank's part, and return the all-reduced sum."""
        self.recorded[-1].given.append(part.detach().cpu())
        return super().summed(part)

    def _result(self, step: Step, tensors: Mapping[str, Tensor], entered: dict[str, DTensor]) -> Tensor:
        self.recorded.append(StepOnRank())
        out = super()._result(step, tensors, entered)
        self.recorded[-1].tensor = out.detach().cpu()
        return out


class _RecordingDispatch(Dispatch):
    """A Dispatch that stores the results returned by the experts in the last record."""

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
    """Run the block split over the processes of this run. Return every step's tensors from all ranks on rank 0, and an
    empty list on other ranks.

    The tokens are split over expert-parallel ranks (`tokens_of_rank`).
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
    """Return a step's event on all ranks from their records, after the events inside its experts."""
    tensors = tuple(one.tensor for one in records)
    together = list(zip(*(one.given for one in records), strict=True))
    if isinstance(step.op, AllReduce):
        return [RankEvent(step.output, step, tensors, together[0])]
    inside = [
        _inside(step, parts[at : at + ranks.tp], at) for parts in together for at in range(0, len(parts), ranks.tp)
    ]
    return [*inside, RankEvent(step.output, step, tensors, _results_by_rank(step, records, ranks))]


def _inside(step: Step, parts: tuple[Tensor, ...], first_rank: int) -> RankEvent:
    """Return the event of an all-reduce inside experts, which serves all experts of a group of ranks and is named after
    the first of these experts."""
    assert isinstance(step.op, Experts)
    expert = first_rank // len(parts) * step.op.experts.size
    reduces = Step(f"{step.output}.sum", AllReduce(len(parts)), (step.output,))
    summed = sum(parts, torch.zeros_like(parts[0]))
    return RankEvent(f"{step.output}.{expert}.sum", reduces, (summed,) * len(parts), parts)


def _results_by_rank(step: Step, records: Sequence[StepOnRank], ranks: Ranks) -> tuple[Tensor, ...]:
    """Return each rank's results [tokens, d] of its experts for all tokens; empty if experts are not split."""
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
