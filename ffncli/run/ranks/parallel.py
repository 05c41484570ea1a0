"""A block whose weights are split over ranks, as a module: what `block/shard.py` says, executed with DTensor.

A Linear that is split along its outputs is ColwiseParallel, one along its inputs RowwiseParallel; the other steps run
on a rank's values as in `engine/execute.py`. Experts are in `experts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module
from torch.nn import functional

from ffncli.block.shard import rank_steps
from ffncli.block.steps import AllReduce, Axis, Experts, Linear, Step, block_inputs, parameters, tables
from ffncli.run.engine.execute import Mode, apply
from ffncli.run.ranks.experts import Dispatch, ExpertStep
from ffncli.run.ranks.group import RankGroup

_ROUTED = Dispatch()


class ParallelBlock(nn.Module):
    """The block of `steps` on one rank of `group`, in eval mode; its weights are frozen until `requires_grad_()`.

    After one all-reduce over the dimension `tp` all its ranks have the output; backward has one for the input's
    gradient. Over `ep` every rank enters its own tokens, as many as it likes: the gradients of copied weights are then
    those of its tokens, to be summed over `ep` as in data parallelism. `weights` are the whole block's, on any device;
    each rank keeps its part of them. `reduce` may be replaced, to leave the all-reduces out, for example. Raises
    FFNError for a block that cannot be split so.
    """

    def __init__(
        self, steps: Sequence[Step], weights: Mapping[str, Tensor], group: RankGroup, dispatch: Dispatch = _ROUTED
    ) -> None:
        super().__init__()
        self.steps = rank_steps(steps, group.rank, group.ranks)
        self.styles, self.divided = styles(steps, self.steps), divided(steps, self.steps)
        last = group.rank - group.rank % group.ranks.tp + group.ranks.tp - 1
        everywhere = parameters(rank_steps(steps, last, group.ranks)).keys()  # a bias added once is on rank 0 alone
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
        """x [..., d_model], and a block's further inputs in the order of `block_inputs` → the block's output."""
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
        """This rank's parts of the weights, by the block's names."""
        return {name: _local(parameter).detach() for name, parameter in self.parts.named_parameters()}

    def summed(self, part: Tensor) -> Tensor:
        """The sum of the parts of all ranks along `tp`: the all-reduce."""
        partial = DTensor.from_local(part, self.tp, [Partial()], run_check=False)
        return partial.redistribute(placements=[Replicate()]).to_local()

    def spread(self, x: Tensor) -> Tensor:
        """x, which all ranks along `tp` have, where it meets a part of theirs: backward sums its gradient over them."""
        if self.group.ranks.tp == 1 or not (torch.is_grad_enabled() and x.requires_grad):
            return x
        copied = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
        return copied.to_local(grad_placements=[Partial()])

    def _result(self, step: Step, tensors: Mapping[str, Tensor], entered: dict[str, DTensor]) -> Tensor:
        """One step's output, complete or this rank's part."""
        if style := self.styles.get(step.output):
            return self._product(step, style, tensors[step.inputs[0]], entered)
        params = {name: self._local(name) for name in (*step.parameters(), *step.tables())}
        for name in params:  # in the same order on all ranks, which is that of their gradients' all-reduces
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
        """A split Linear's output. gate and up read one DTensor, so that backward sums both gradients at once."""
        linear, (name,) = self.parts.get_submodule(step.output), step.inputs
        if isinstance(style, ColwiseParallel):
            if name not in entered:
                entered[name] = DTensor.from_local(x, self.tp, [Replicate()], run_check=False)
            return linear(entered[name])  # type: ignore[no-any-return]
        part: Tensor = linear(x)
        return part if linear.bias is None else part + linear.bias  # type: ignore[operator]  # a Linear's bias

    def _add_linear(self, step: Step, style: ParallelStyle, weights: Mapping[str, Tensor]) -> None:
        """A Linear that is split, with torch's own style; what it holds is this rank's part."""
        params = {name.rpartition(".")[2]: weights[name] for name in step.parameters()}
        bias = params.pop("bias", None) if isinstance(style, RowwiseParallel) else None  # rank 0 adds it
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
        """This rank's part of a parameter that no Linear's style splits; the whole of one that every rank has."""
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
        """(the submodule of `shared.up.weight` or `shared.up`, added if it is missing; the last part of the name)."""
        *path, key = name.split(".")
        module = self.parts
        for part in path:
            if part not in dict(module.named_children()):
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        return module, key


class _RowLinear(nn.Linear):
    """The product alone: rank 0 adds the bias to its part of the sum."""

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in / ranks] → this rank's part of the sum [..., out]."""
        return functional.linear(x, self.weight)


def styles(whole: Sequence[Step], local: Sequence[Step]) -> dict[str, ParallelStyle]:
    """By name, the style of every Linear that a rank's steps have a part of.

    The output of a row-parallel one stays a part of the sum: the steps say where it is reduced.
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
    """The outputs of a rank's steps that differ between tensor-parallel ranks: its d_ff, and its parts of sums."""
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
    """Parameters that no Linear has, of steps with `divided` outputs: an activation's learned ones, learned factors."""
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
