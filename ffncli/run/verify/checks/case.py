"""The subject of the checks: one layer's block with its weights and input, and the parts that several checks use."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn

from ffncli.block.ranks import Ranks
from ffncli.block.steps import Experts, Route, Step, block_inputs, ffn_span, ffn_steps
from ffncli.dataclass import dataclass
from ffncli.kernels.kernel import Kernel, kernel_steps
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import execute
from ffncli.run.measure.tolerance import declared_tolerance, tolerance_for
from ffncli.run.user.probe import Runner
from ffncli.run.verify.checks.row import Judge

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class UserModule:
    """A user's own nn.Module, and how to run it on tokens [tokens, d_model]."""

    module: nn.Module
    runner: Runner


@dataclass(frozen=True)
class SplitRun:
    """Over which ranks a block runs, which of them this process is, and how many seconds it waits for the others."""

    ranks: Ranks
    rank: int
    patience: float


@dataclass(frozen=True)
class DenseFFN:
    """A dense FFN inside the block: the block's FFN, or its first routed expert; `label` names it.

    `x` [tokens, d_model] is its input (every token, even for an expert); experts may work in a narrower space.
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
class CheckedBlock:
    """One block to be checked. `inputs` are [tokens, d_model]; `tolerance` None means the dtype's.

    `kernels` are to be compared with float64, `against` is the model whose weights are the reference, if any; `split`
    is the run over several processes, of which this is one. `computes` is what the judged kernel declares: fewer bits
    than the dtype has.
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
    user_module: UserModule | None = None
    against: Resolved | None = None
    split: SplitRun | None = None
    computes: str = ""

    def judge(self, check: str, dtype: torch.dtype | None = None) -> Judge:
        """The tolerance in the block's dtype, or in another one for checks without a router."""
        spec, scores = self.layer.spec, self._scores() if dtype is None else None
        dtype = dtype or self.dtype
        allowed = tolerance_for(dtype, max(spec.d_model, spec.d_ff, spec.shared_width), scores)
        allowed = max(allowed, declared_tolerance(self.computes)[0]) if self.computes else allowed
        return Judge(check, allowed if self.tolerance is None else self.tolerance, dtype)

    def _scores(self) -> torch.dtype | None:
        fixed = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in self.steps)
        return torch.float32 if fixed else None

    def generator(self) -> torch.Generator:
        """A source of random numbers separate from those of the weights and the input."""
        return torch.Generator().manual_seed(self.seed + 1)

    @property
    def tokens(self) -> int:
        """The number of tokens in the input."""
        return next(iter(self.inputs.values())).shape[0]

    @cached_property
    def ffn(self) -> tuple[Step, ...]:
        """The steps of the FFN in eval mode, as kernels get them."""
        return kernel_steps(self.steps)

    @cached_property
    def ffn_weights(self) -> dict[str, Tensor]:
        """The weights of only those steps."""
        return {name: self.weights[name] for step in self.ffn for name in step.parameters()}

    @cached_property
    def entry(self) -> str:
        """The name of the FFN's input."""
        return ffn_span(self.steps)[0]

    @cached_property
    def x(self) -> Tensor:
        """The FFN's input, [tokens, d_model]: the block's input, after a norm if the block begins with one."""
        if self.entry in self.inputs:
            return self.inputs[self.entry]
        before = self.steps[: self.steps.index(ffn_steps(self.steps)[0])]
        return next(e.tensor for e in execute(before, self.weights, self.inputs) if e.name == self.entry)

    @cached_property
    def dense(self) -> DenseFFN:
        """The dense FFN that statements about one are checked on."""
        for step in self.ffn:
            if isinstance(step.op, Experts):
                weights = step.op.of_one(self.weights, 0)
                return DenseFFN(step.op.program, weights, self._within(step.inputs[0]), "expert 0")
        return DenseFFN(self.ffn, self.ffn_weights, self.x, "the FFN")

    def _within(self, name: str) -> Tensor:
        """A tensor of the FFN by its name."""
        events = execute(self.ffn, self.ffn_weights, {self.entry: self.x})
        return self.x if name == self.entry else next(e.tensor for e in events if e.name == name)
