"""The block under check (one layer with its weights and input), and the result rows that a check yields."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from ffncli.block.shard import Ranks
from ffncli.block.steps import Experts, Route, Step, block_inputs, ffn_span, ffn_steps
from ffncli.kernels.kernel import Kernel, kernel_steps
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import execute
from ffncli.run.measure import statistics
from ffncli.run.measure.gap import declared_tolerance, gap, tolerance_for
from ffncli.run.measure.statistics import in_words
from ffncli.run.user.probe import Runner
from ffncli.run.verify.certificate import CheckRow as CheckRow  # the rows that all checks yield

Weights = Mapping[str, Tensor]


@dataclass(frozen=True)
class UserModule:
    """A user's own nn.Module, and a runner that calls it on tokens [tokens, d_model]."""

    module: nn.Module
    runner: Runner


@dataclass(frozen=True)
class SplitRun:
    """A run of a block over several ranks: the ranks, this process's rank, and the seconds to wait for the others."""

    ranks: Ranks
    rank: int
    patience: float


@dataclass(frozen=True)
class DenseFFN:
    """A dense FFN inside the block: the block's FFN, or its first routed expert; `label` names it.

    `x` [tokens, width] is its input: all tokens, even for an expert. The width is d_model unless experts work in a
    narrower space.
    """

    steps: tuple[Step, ...]
    weights: Weights
    x: Tensor
    label: str

    @property
    def entry(self) -> str:
        """The name of the input of `steps`."""
        return block_inputs(self.steps)[0]


@dataclass(frozen=True)
class CheckedBlock:
    """A block under check. `inputs` are [tokens, d_model]; if `tolerance` is None, it follows from the dtype.

    `kernels` are compared with float64; `against` is the model whose weights are the reference, if any; `split` is the
    run over several processes, one of which is this process. `computes` is the format that the judged kernel declares,
    such as `fp8-rowwise`, if it computes with fewer bits than the dtype has; otherwise empty.
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

    def judge(self, check: str, dtype: torch.dtype | None = None, tokens: int = 1) -> "Judge":
        """Return a check's judge, with the tolerance of the block's dtype, or of `dtype`. `tokens` is the number of
        tokens over which a weight's gradient is summed."""
        spec, scores = self.layer.spec, self._scores() if dtype is None else None
        dtype = dtype or self.dtype
        allowed = tolerance_for(dtype, max(spec.d_model, spec.d_ff, spec.shared_width, tokens), scores)
        allowed = max(allowed, declared_tolerance(self.computes)[0]) if self.computes else allowed
        return Judge(check, allowed if self.tolerance is None else self.tolerance, dtype)

    def _scores(self) -> torch.dtype | None:
        fixed = any(isinstance(step.op, Route) and step.op.score_dtype == "fp32" for step in self.steps)
        return torch.float32 if fixed else None

    def generator(self) -> torch.Generator:
        """Return a random number generator, separate from the generators of the weights and the input."""
        return torch.Generator().manual_seed(self.seed + 1)

    @property
    def tokens(self) -> int:
        """The number of tokens in the input."""
        return next(iter(self.inputs.values())).shape[0]

    @cached_property
    def ffn(self) -> tuple[Step, ...]:
        """The steps of the FFN in eval mode, as passed to kernels."""
        return kernel_steps(self.steps)

    @cached_property
    def ffn_weights(self) -> dict[str, Tensor]:
        """The weights that the steps in `ffn` use."""
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
        """The dense FFN on which statements about dense FFNs are checked."""
        for step in self.ffn:
            if isinstance(step.op, Experts):
                weights = step.op.of_one(self.weights, 0)
                return DenseFFN(step.op.program, weights, self._within(step.inputs[0]), "expert 0")
        return DenseFFN(self.ffn, self.ffn_weights, self.x, "the FFN")

    def _within(self, name: str) -> Tensor:
        """Run the FFN and return the tensor with this name: its input or an intermediate tensor."""
        events = execute(self.ffn, self.ffn_weights, {self.entry: self.x})
        return self.x if name == self.entry else next(e.tensor for e in events if e.name == name)


CONVENTIONS = {
    "relative_error": "max|a - b| / max|b| over the whole tensor, where b is the reference; null if b is all 0",
    "ulps": "the largest |a - b|, in units in the last place of the reference's value at that index, in the dtype of"
    " the computation; null if that value is 0",
    "tolerance": "for relative_error: 4 × (eps + eps_sum × √width). width is the larger of d_model and d_ff; eps is the"
    " dtype's, because each step rounds its result; eps_sum is the eps of the sums, in float32 for 16-bit dtypes"
    " (the rounding errors of a sum of n products grow as √n). It is at least float32's if a router scores in"
    " float32",
}


@dataclass(frozen=True)
class Judge:
    """A builder of the result rows of one check; `ulps` are counted in `dtype`."""

    check: str
    tolerance: float
    dtype: torch.dtype

    def equal(
        self,
        subject: str,
        output: Tensor,
        reference: Tensor,
        note: str = "",
        what: str = "its output",
        floor: float = 0.0,
    ) -> CheckRow:
        """Return a row that passes if `output` equals `reference` within the tolerance; a NaN or Inf fails.

        `what` names the tensor; the relative error is relative to at least `floor`.
        """
        if output.shape != reference.shape:
            return self.fails(subject, f"shape {list(output.shape)}, expected {list(reference.shape)}")
        for whose, tensor in (("the reference", reference), (what, output)):
            if not tensor.isfinite().all():
                return self.fails(subject, _joined(f"{whose} has {not_finite(tensor)}", note))
        row = self.figure(subject, output, reference, note, floor)
        within = row.max_error == 0 or (row.relative_error is not None and row.relative_error <= self.tolerance)
        return replace(row, tolerance=self.tolerance, passed=within)

    def figure(self, subject: str, output: Tensor, reference: Tensor, note: str = "", floor: float = 0.0) -> CheckRow:
        """Return the distance between two tensors of the same shape, without a verdict."""
        largest, relative, ulps = errors(output, reference, self.dtype, floor)
        return CheckRow(self.check, subject, largest, relative, ulps, note=note)

    def fails(self, subject: str, why: str) -> CheckRow:
        """Return a failed row without figures."""
        return CheckRow(self.check, subject, tolerance=self.tolerance, passed=False, note=why)

    def skips(self, subject: str, why: str) -> CheckRow:
        """Return a row for a check that does not apply here; `why` is its note."""
        return CheckRow(self.check, subject, note=why)


def errors(
    output: Tensor, reference: Tensor, dtype: torch.dtype, floor: float = 0.0
) -> tuple[float, float | None, float | None]:
    """Return (max_error, relative_error, ulps) as in CONVENTIONS, the relative error to at least `floor`; NaN if a
    value is finite in one tensor only."""
    apart = gap(output, reference)
    if apart.unlike:
        return math.nan, math.nan, math.nan
    if apart.at < 0:
        return 0.0, 0.0, 0.0
    size = max(apart.size, floor)
    return apart.largest, apart.largest / size if size else None, apart.ulps(dtype)


def not_finite(tensor: Tensor) -> str:
    """Return text such as `3 NaN` or `1 NaN and 2 Inf`; an empty string if all values are finite."""
    return in_words(*statistics.not_finite(tensor))


def _joined(*texts: str) -> str:
    return "; ".join(text for text in texts if text)
