"""grouped: a mixture's tokens sorted by expert, and one grouped product for each matrix of all experts.

What the router chose is not read here. torch has one kernel for such a product in bf16 on GPUs of compute capability
9.0 or more; elsewhere, and in other dtypes, it loops over the experts itself, for which a GPU waits for the host.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.kernels.between import Weights
from ffncli.kernels.experts.stacked import Made, prepare, refuses, stacked_mixture
from ffncli.kernels.kernel import Computes, Steps, register
from ffncli.kernels.routing import Summed


@register("grouped", prepare=prepare, refuses=refuses, dtypes=("fp32", "bf16", "fp16"))
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Sort, grouped product, activation and gate, grouped product, weigh, add."""
    return stacked_mixture(steps, partial(_summed, ordered=device.startswith("cuda")))


def _summed(made: Made, weigh_output: bool, ordered: bool) -> Summed:
    """`ordered`: add a token's outputs in the order of its choices. On a GPU index_add adds in any order, and its last
    bits differ from call to call; on a CPU it is the faster way."""

    def summed(x: Tensor, chosen: Tensor, share: Tensor, w: Weights) -> Tensor:
        top_k, entries = chosen.shape[1], w["inward.weight"].shape[0]
        expert, order = chosen.flatten().sort(stable=True)
        token, weight = order // top_k, share.flatten().index_select(0, order)[:, None]
        numbers = torch.arange(entries, device=x.device)
        ends = torch.searchsorted(expert, numbers, right=True, out_int32=True)  # of each expert's rows

        def product(rows: Tensor, matrices: Tensor) -> Tensor:
            return functional.grouped_mm(rows, matrices.mT, offs=ends)

        received = x.index_select(0, token)
        out = made(received if weigh_output else received * weight, expert, w, product)
        out = out * weight if weigh_output else out
        if not ordered:
            return torch.zeros_like(x).index_add_(0, token, out)
        return torch.empty_like(out).index_copy_(0, order, out).view(*chosen.shape, -1).sum(1)

    return summed
