"""batched: every token gets a copy of its experts' matrices, and one batched product computes all.

For few tokens: the copies are top_k times the matrices of an expert for each token. Nothing reads what the router
chose, so a GPU never waits for the host. Forward only: a backward pass would keep all copies.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffncli.kernels.between import Weights
from ffncli.kernels.experts.stacked import Made, prepare, refuses, stacked_mixture
from ffncli.kernels.kernel import Computes, Steps, register
from ffncli.kernels.routing import Summed

MOST_TOKENS = 64  # worth timing
MOST_BYTES = 1 << 28  # of copied matrices at a time: more tokens are computed one part after the other


@register("batched", prepare=prepare, refuses=refuses, trains=False, most_tokens=MOST_TOKENS)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Copy the matrices, batched product, activation and gate, batched product, weigh, add."""
    return stacked_mixture(steps, _summed)


def _summed(made: Made, weigh_output: bool) -> Summed:
    def summed(x: Tensor, chosen: Tensor, share: Tensor, w: Weights) -> Tensor:
        top_k = chosen.shape[1]
        most = max(1, MOST_BYTES // (top_k * w["inward.weight"][0].nbytes))  # tokens
        parts = zip(*(torch.split(t, most) for t in (x, chosen, share)), strict=True)
        return torch.cat([part_of(rows, experts, weights, w) for rows, experts, weights in parts])

    def part_of(x: Tensor, chosen: Tensor, share: Tensor, w: Weights) -> Tensor:
        expert, weight = chosen.flatten(), share.flatten()[:, None]
        received = x.repeat_interleave(chosen.shape[1], 0)

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return torch.bmm(matrices.index_select(0, expert), rows[..., None])[..., 0]

        out = made(received if weigh_output else received * weight, expert, w, product)
        out = out * weight if weigh_output else out
        return out.view(*chosen.shape, -1).sum(1)

    return summed
