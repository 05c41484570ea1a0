"""One kernel before the referee: the block, the process that calls the kernel, and what several checks share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ffncli.block.cost import cost
from ffncli.block.dtypes import find
from ffncli.block.recipe import FFNSpec
from ffncli.block.steps import Route, Step
from ffncli.errors import FFNError
from ffncli.run.engine.reference import in_float64, steady_tokens
from ffncli.run.measure.gap import gap
from ffncli.run.user.hosted import HostedKernel, same_bits
from ffncli.run.verify.checks.case import CheckedBlock, CheckRow, Judge

# At most 8 counts: torch.compile makes a graph for each, and stops at 8.
_COUNTS, _FEW_COUNTS = (1, 2, 3, 5, 17, 64, 127), (1, 2, 5, 17)
_LARGE = 50_000_000  # parameters from which few tokens are run
_REDRAWS = 64


@dataclass(frozen=True)
class KernelTrial:
    """A kernel that its host has loaded for `block`, and what is demanded of it.

    `generator` draws all inputs. `batch_invariant`: demanded, not only reported.
    """

    host: HostedKernel
    block: CheckedBlock
    generator: torch.Generator
    batch_invariant: bool = False

    def judge(self, check: str) -> Judge:
        """What counts as equal to the reference."""
        return self.block.judge(check)

    @property
    def spec(self) -> FFNSpec:
        """The block's dimensions."""
        return self.block.layer.spec

    @cached_property
    def token_counts(self) -> tuple[int, ...]:
        """The numbers of tokens of all calls, ascending."""
        return _FEW_COUNTS if cost(self.block.ffn).params > _LARGE else _COUNTS

    @property
    def most_tokens(self) -> int:
        """The largest of them."""
        return self.token_counts[-1]

    @cached_property
    def routed(self) -> bool:
        """Whether a router chooses experts."""
        return any(isinstance(step.op, Route) for step in self.block.ffn)

    def declared(self) -> KernelTrial:
        """This trial with the bounds of the format that the loaded kernel declares, if it does."""
        return replace(self, block=replace(self.block, computes=self.host.computes))

    def load(self) -> str | None:
        """Have the host load the kernel for this block; why it refuses, or None."""
        block = self.block
        return self.host.load(self.spec, block.ffn, block.ffn_weights, block.dtype, self.most_tokens)

    def draw(self, tokens: int, scale: float = 1.0) -> Tensor:
        """Random tokens [tokens, d_model]; rounding does not decide to which experts they go.

        Raises FFNError for weights with which it decides for nearly every token.
        """
        kept: list[Tensor] = []
        count = 0
        for _ in range(_REDRAWS):
            x = scale * torch.randn(tokens, self.spec.d_model, generator=self.generator, dtype=torch.float64)
            x = x.to(self.block.dtype)
            steady = steady_tokens(self.block.ffn, self.block.ffn_weights, {self.block.entry: x}, x.dtype)[0]
            kept.append(x[steady])
            count += int(steady.sum())
            if count >= tokens:
                return torch.cat(kept)[:tokens]
        raise FFNError("rounding decides to which experts tokens go", "no kernel can be judged on these weights")

    def reference(self, x: Tensor) -> Tensor:
        """The output in float64 from the same numbers."""
        return in_float64(self.block.ffn, self.block.ffn_weights, {self.block.entry: x})[0]

    def call(self, x: Tensor, place: int = 0) -> Tensor:
        """The kernel's output. Raises KernelFailure."""
        return self.host.call(x, place)

    def with_block(
        self, ffn: Sequence[Step], weights: Mapping[str, Tensor], spec: FFNSpec | None = None
    ) -> KernelTrial:
        """A trial of the same kernel on another block, not loaded yet."""
        layer = self.block.layer if spec is None else replace(self.block.layer, spec=spec)
        block = replace(self.block, layer=layer, steps=tuple(ffn), weights=weights, inputs={})
        return replace(self, block=block)


def equal_bits(check: str, subject: str, output: Tensor, other: Tensor, note: str = "") -> CheckRow:
    """A row that passes where two outputs are equal bit by bit; its errors say how far they are apart."""
    if same_bits(output, other):
        return CheckRow(check, subject, 0.0, 0.0, 0.0, 0.0, True, note)
    apart = gap(output, other)
    odd = "; ".join(filter(None, (note, "one of the two is NaN or Inf" if apart.unlike else "")))
    return CheckRow(check, subject, apart.largest, apart.relative, apart.ulps(output.dtype), 0.0, False, odd)


def counted_tokens(count: int) -> str:
    """`1 token`, `17 tokens`."""
    return "1 token" if count == 1 else f"{count} tokens"


def dtype_name(dtype: torch.dtype) -> str:
    """Our name of torch's dtype: `fp32`."""
    row = find(str(dtype))
    return row.name if row else str(dtype)
