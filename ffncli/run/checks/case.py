"""What is checked: one layer's block with its weights and input, and the pieces that several checks look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ffncli.block.steps import Axis, Experts, Route, Step, block_inputs, ffn_span, ffn_steps
from ffncli.kernels.kernel import Kernel, kernel_steps
from ffncli.models.model import Layer, Resolved
from ffncli.run.checks.row import Judge, tolerance_for
from ffncli.run.execute import EVAL, Mode, execute
from ffncli.run.probe import Runner

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class Own:
    """A user's own nn.Module, and how it is run on tokens [tokens, d_model]."""

    module: nn.Module
    runner: Runner


@dataclass(frozen=True)
class Dense:
    """A dense FFN inside the block: the block's own, or that of its first routed expert; `label` says which.

    `x` [tokens, d_model] is what enters it (all of it, in an expert); experts may work in a narrower space.
    """

    steps: tuple[Step, ...]
    weights: Weights
    x: Tensor
    label: str

    @property
    def entry(self) -> str:
        """The name of its input."""
        return block_inputs(self.steps)[0]


@dataclass(frozen=True)
class Case:
    """One block to be checked. `inputs` are [tokens, d_model]; `tolerance` None takes the dtype's.

    `kernels` are those to be held to float64, `against` is the model whose weights are the reference, if any.
    """

    model: Resolved
    layer: Layer
    steps: tuple[Step, ...]
    weights: Weights
    inputs: Mapping[str, Tensor]
    dtype: torch.dtype
    device: str = "cpu"
    seed: int = 0
    tolerance: float | None = None
    kernels: tuple[Kernel, ...] = ()
    own: Own | None = None
    against: Resolved | None = None

    def judge(self, check: str, dtype: torch.dtype | None = None) -> Judge:
        """What counts as equal in the block's dtype, or in another for what has no router."""
        spec, scores = self.layer.spec, self._scores() if dtype is None else None
        dtype = dtype or self.dtype
        allowed = tolerance_for(dtype, max(spec.d_model, spec.d_ff, spec.shared_width), scores)
        return Judge(check, allowed if self.tolerance is None else self.tolerance, dtype)

    def _scores(self) -> torch.dtype | None:
        fixed = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in self.steps)
        return torch.float32 if fixed else None

    def generator(self) -> torch.Generator:
        """A source of random numbers that is not the weights' nor the input's."""
        return torch.Generator().manual_seed(self.seed + 1)

    @property
    def tokens(self) -> int:
        """How many tokens the input has."""
        return next(iter(self.inputs.values())).shape[0]

    @cached_property
    def ffn(self) -> tuple[Step, ...]:
        """The steps of the FFN in eval mode, as kernels get them."""
        return kernel_steps(self.steps)

    @cached_property
    def ffn_weights(self) -> dict[str, Tensor]:
        """The weights of those steps alone."""
        return {name: self.weights[name] for step in self.ffn for name in step.parameters()}

    @cached_property
    def entry(self) -> str:
        """The name of what enters the FFN."""
        return ffn_span(self.steps)[0]

    @cached_property
    def x(self) -> Tensor:
        """What enters the FFN, [tokens, d_model]: the input, after a norm where the block begins with one."""
        if self.entry in self.inputs:
            return self.inputs[self.entry]
        before = self.steps[: self.steps.index(ffn_steps(self.steps)[0])]
        return next(e.tensor for e in execute(before, self.weights, self.inputs) if e.name == self.entry)

    @cached_property
    def dense(self) -> Dense:
        """The dense FFN that statements about one are checked on."""
        for step in self.ffn:
            if isinstance(step.op, Experts):
                own = {name: self.weights[name][0] for name in step.op.parameters()}
                return Dense(step.op.program, own, self._within(step.inputs[0]), "expert 0")
        return Dense(self.ffn, self.ffn_weights, self.x, "the FFN")

    def _within(self, name: str) -> Tensor:
        """A tensor of the FFN by its name."""
        events = execute(self.ffn, self.ffn_weights, {self.entry: self.x})
        return self.x if name == self.entry else next(e.tensor for e in events if e.name == name)


def chosen(steps: Sequence[Step], weights: Weights, inputs: Weights, mode: Mode = EVAL) -> tuple[Tensor, Tensor | None]:
    """(the output, which experts each token went to as booleans, or None in a dense block)."""
    experts, tensor = None, None
    for event in execute(steps, weights, inputs, mode):
        tensor = event.tensor
        if isinstance(event.step.op, Route):
            experts = event.tensor != 0
    assert tensor is not None
    return tensor, experts


def wide(steps: Sequence[Step], weights: Weights, inputs: Weights) -> tuple[Tensor, Tensor | None]:
    """The same in float64: the reference. One step's weights are widened at a time, so that memory stays bounded."""
    known = {name: tensor.double() for name, tensor in inputs.items()}
    experts = None
    for step in steps:
        own, given = {name: weights[name] for name in step.parameters()}, {name: known[name] for name in step.inputs}
        if isinstance(step.op, Experts):
            step, own, given[step.inputs[1]] = _touched(step, step.op, own, given[step.inputs[1]])
        own = {name: tensor.double() for name, tensor in own.items()}
        known[step.output], found = chosen([step], own, given)
        experts = found if found is not None else experts
    return known[steps[-1].output], experts


def _touched(step: Step, op: Experts, own: Weights, share: Tensor) -> tuple[Step, dict[str, Tensor], Tensor]:
    """The same step over those experts alone that any token goes to: (step, weights, route)."""
    used = share[:, : op.experts.size].any(0).nonzero().flatten()
    fewer = replace(step, op=replace(op, experts=Axis(op.experts.name, len(used))))
    rest = share[:, op.experts.size :]  # identity experts have no weights
    return fewer, {name: tensor[used] for name, tensor in own.items()}, torch.cat([share[:, used], rest], 1)


def alike(a: Tensor | None, b: Tensor | None, tokens: int) -> tuple[Tensor, str]:
    """(which tokens went to the same experts in two runs, a remark where some did not).

    Where two experts score nearly the same, rounding decides which is chosen, and the outputs then differ as a whole.
    """
    if a is None or b is None:
        return torch.ones(tokens, dtype=torch.bool), ""
    same = (a == b).all(-1).cpu()
    apart = int((~same).sum())
    return same, f"{apart} of {tokens} tokens left out: rounding sent them to other experts" if apart else ""


def routing(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that come to the choice of experts; none in a dense block."""
    at = next((n for n, step in enumerate(steps) if isinstance(step.op, Route)), -1)
    return tuple(steps[: at + 1])


def steady(steps: Sequence[Step], weights: Weights, inputs: Weights, dtype: torch.dtype) -> tuple[Tensor, str]:
    """(which tokens go to the same experts however another program rounds, a remark where some do not).

    The router runs in the dtype, in float64, and there with numbers that are off by what a few roundings make of them.
    """
    before, (first, *_) = routing(steps), inputs.values()
    same, remark = torch.ones(first.shape[0], dtype=torch.bool), ""
    if before:
        _, here = chosen(before, weights, inputs)
        generator, off = torch.Generator().manual_seed(0), 4 * torch.finfo(dtype).eps
        own = {name: weights[name] for step in before for name in step.parameters()}
        for scale in (0.0, *(off,) * 16):
            given = {n: _off(t, scale, generator) for n, t in inputs.items()}
            _, there = wide(before, {n: _off(t, scale, generator) for n, t in own.items()}, given)
            same &= alike(here, there, len(same))[0]
        apart = int((~same).sum())
        remark = f"{apart} of {len(same)} tokens left out: rounding decides to which experts they go" if apart else ""
    return same, remark


def _off(tensor: Tensor, scale: float, generator: torch.Generator) -> Tensor:
    """In float64, every number off by about that share of itself."""
    return tensor.double() * (1 + scale * torch.randn(tensor.shape, generator=generator).to(tensor.device))
