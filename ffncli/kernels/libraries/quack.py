"""quack: the MLP of quack-kernels, which computes gate, up and what is between them in one product (CuTe DSL)."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import torch
from torch import Tensor

from ffncli.kernels.dense import dense, refuses_odd_widths
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.libraries.liger import refuses_all_but_gated

FUNCTIONS = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu", "sigmoid": "glu"}  # its names of the units
_MULTIPLE = 8  # of both widths


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block."""
    return refuses_all_but_gated(steps, FUNCTIONS) or refuses_odd_widths(steps, _MULTIPLE)


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """(gate above up, [2 · d_ff, d_model]; down)."""
    return torch.cat([weights["gate.weight"], weights["up.weight"]]), weights["down.weight"]


@register(
    "quack", prepare=prepare, needs=("cuda", "sm_90", "quack"), refuses=refuses, compiles=True, dtypes=("bf16", "fp16")
)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Its function on the packed weights. It tries tile sizes at the first call."""
    shape = dense(steps)
    assert shape is not None
    mlp, unit = import_module("quack.mlp").mlp_func, FUNCTIONS[shape.act.function]

    def run(x: Tensor, params: Params) -> Tensor:
        inward, down = params
        out: Tensor = mlp(x, inward, down, unit, concat_layout=True)
        return out

    return run
