"""liger: LigerMLP of liger-kernel, which computes gate, up and what is between them in one Triton kernel."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor

from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.libraries.gated_units import refuses_all_but_gated

_refuses = partial(refuses_all_but_gated, functions=("silu",))


@register(
    "liger", needs=("cuda", "sm_90", "liger_kernel"), refuses=_refuses, compiles=True, dtypes=("fp32", "bf16", "fp16")
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Its function on the block's gate, up and down. It tries tile sizes at the first call."""
    mlp = import_module("liger_kernel.ops").LigerMLPFunction.apply

    def run(x: Tensor, params: Params) -> Tensor:
        out: Tensor = mlp(x[None], *params)[0]  # it takes [batch, tokens, d_model]
        return out

    return run
