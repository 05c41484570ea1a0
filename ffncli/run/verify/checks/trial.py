"""A kernel on trial before the referee: its block, its inputs, its calls and their references."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Route, Step
from ffncli.errors import FFNError
from ffncli.options.shared import Pass
from ffncli.run.engine.reference import in_float64, near_kinks, steady_tokens
from ffncli.run.measure.gap import gap
from ffncli.run.user.hosted import HostedKernel, KernelFailure, same_bits
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow, Judge

# At most 8 token counts, with one that the user gives: by default, torch.compile creates 8 graphs of a function.
_COUNTS, _FEW_COUNTS = (1, 2, 3, 5, 17, 64, 127), (1, 2, 5, 17)
_LARGE = 50_000_000  # above this many parameters, run fewer tokens
_REDRAWS = 64
# The token counts drawn for a certificate: how many, and the limits of the largest, in tokens and in parameters
# times tokens.
_FURTHER, _MOST_DRAWN, _MOST_WORK = 3, 2048, 2**31


def counts_to_try(ffn: Sequence[Step], tokens: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the token counts on which a kernel of these steps is tried, ascending; `tokens` are more of them."""
    counts = _FEW_COUNTS if cost(ffn).params > _LARGE else _COUNTS
    return tuple(sorted({*counts, *tokens}))


@dataclass(frozen=True)
class KernelTrial:
    """A kernel that its host has loaded for `block`, and the requirements for this kernel.

    `generator` draws all inputs. If `batch_invariant` is set, batch invariance is demanded, not only reported. `passes`
    is what is judged: a backward pass may be left out, or demanded; None: it is judged if the kernel has one. `tokens`
    are more token counts to try.
    """

    host: HostedKernel
    block: CheckedBlock
    generator: torch.Generator
    batch_invariant: bool = False
    passes: Pass | None = None
    tokens: tuple[int, ...] = ()

    def judge(self, check: str) -> Judge:
        """Return the judge of a check on this block."""
        return self.block.judge(check)

    @property
    def spec(self) -> FFNSpec:
        """The block's dimensions."""
        return self.block.layer.spec

    @cached_property
    def token_counts(self) -> tuple[int, ...]:
        """The token counts of the calls, ascending."""
        return counts_to_try(self.block.ffn, self.tokens)

    @property
    def most_tokens(self) -> int:
        """The largest token count."""
        return self.token_counts[-1]

    @property
    def further_counts(self) -> tuple[int, ...]:
        """Larger token counts that nobody can know before: they follow from the trial's seed. Equally likely in the
        logarithm."""
        generator = torch.Generator().manual_seed(self.generator.initial_seed() + 1)
        limit = max(2 * self.most_tokens, min(_MOST_DRAWN, _MOST_WORK // max(1, cost(self.block.ffn).params)))
        shares = torch.rand(_FURTHER, generator=generator, dtype=torch.float64).tolist()
        return tuple(round(self.most_tokens * (limit / self.most_tokens) ** share) + 1 for share in shares)

    @cached_property
    def routed(self) -> bool:
        """Whether a router chooses experts."""
        return any(isinstance(step.op, Route) for step in self.block.ffn)

    def declared(self) -> KernelTrial:
        """Return this trial with the number format, if any, that the loaded kernel declares."""
        return replace(self, block=replace(self.block, computes=self.host.computes))

    def load(self) -> str | None:
        """Load the kernel for this block in its host; return the reason if the kernel refuses the block, else None."""
        block, room = self.block, max(self.further_counts)
        return self.host.load(self.spec, block.ffn, block.ffn_weights, block.dtype, room, self.passes != "forward")

    @cached_property
    def without_backward(self) -> str:
        """The reason why no backward pass of the loaded kernel is judged; empty if it is judged. A kernel that raises
        has none: users see that. It is called twice, because the graph of a kernel that keeps its buffers may only fail
        in the second pass."""
        if self.passes == "forward":
            return "only the forward pass is judged"
        if not self.host.trains:
            return "the kernel has a forward pass only"
        x = self.draw(1)
        try:
            given = [self.host.gradients(x, torch.ones_like(x), self.trained) for _ in range(2)]
        except KernelFailure as failure:
            if failure.gone:
                raise
            return f"the kernel has a forward pass only: {failure}"
        return "" if None not in given else "the kernel has a forward pass only: its output requires no gradient"

    @cached_property
    def trained(self) -> tuple[str, ...]:
        """The names of all tensors that have a gradient, in the order in which a backward pass computes them."""
        weights = self.block.ffn_weights
        return (*(name for name in reversed(weights) if weights[name].is_floating_point()), "x")

    def draw(self, tokens: int, scale: float = 1.0, smooth: bool = False) -> Tensor:
        """Draw tokens [tokens, d_model] whose experts don't depend on rounding and, with `smooth`, whose slopes don't;
        raise FFNError if there are too few."""
        kept: list[Tensor] = []
        count = 0
        for _ in range(_REDRAWS):
            x = scale * torch.randn(tokens, self.spec.d_model, generator=self.generator, dtype=torch.float64)
            x = x.to(self.block.dtype)
            inputs = {self.block.entry: x}
            steady = steady_tokens(self.block.ffn, self.block.ffn_weights, inputs, x.dtype)[0]
            for near in near_kinks(self.block.ffn, self.block.ffn_weights, inputs) if smooth else ():
                steady[near] = False
            kept.append(x[steady])
            count += int(steady.sum())
            if count >= tokens:
                return torch.cat(kept)[:tokens]
        raise FFNError("rounding decides which experts the tokens go to", "no kernel can be judged on these weights")

    def reference(self, x: Tensor) -> Tensor:
        """Return the steps' output in float64 for the same weights and input."""
        return in_float64(self.block.ffn, self.block.ffn_weights, {self.block.entry: x})[0]

    def call(self, x: Tensor, place: int = 0) -> Tensor:
        """Call the kernel on `x`, copied into the buffer with index `place`."""
        return self.host.call(x, place)

    def with_block(
        self, ffn: Sequence[Step], weights: Mapping[str, Tensor], spec: FFNSpec | None = None
    ) -> KernelTrial:
        """Return a trial of the same kernel on another block; the kernel is not loaded for it yet."""
        layer = self.block.layer if spec is None else replace(self.block.layer, spec=spec)
        block = replace(self.block, layer=layer, steps=tuple(ffn), weights=weights, inputs={})
        return replace(self, block=block)


def equal_bits(check: str, subject: str, output: Tensor, other: Tensor, note: str = "") -> CheckRow:
    """Return a row that passes if two outputs are equal bit by bit; its errors are the distance between them."""
    if same_bits(output, other):
        return CheckRow(check, subject, 0.0, 0.0, 0.0, 0.0, True, note)
    apart = gap(output, other)
    odd = "; ".join(filter(None, (note, "one of the two is NaN or Inf" if apart.unlike else "")))
    return CheckRow(check, subject, apart.largest, apart.relative, apart.ulps(output.dtype), 0.0, False, odd)


def reported(trial: KernelTrial, row: CheckRow) -> CheckRow:
    """Return the row; unless batch invariance is demanded, it does not count as failed."""
    return row if row.passed or trial.batch_invariant else replace(row, passed=None)
