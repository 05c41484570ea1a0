"""liger_act: eager's products, and liger-kernel's SiLUMul or GELUMul for what lies between them."""

from __future__ import annotations

from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.between import normed
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.libraries.gated_units import refuses_all_but_gated
from ffncli.kernels.pattern import dense

FUNCTIONS = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}
_refuses = partial(refuses_all_but_gated, functions=FUNCTIONS, products=False)


@register("liger_act", needs=("cuda", "liger_kernel"), refuses=_refuses, compiles=True, dtypes=("fp32", "bf16", "fp16"))
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """down(SiLUMul(gate(x), up(x)))."""
    shape, names = dense(steps), tuple(parameters(steps))
    assert shape is not None
    middle = getattr(import_module("liger_kernel.ops"), FUNCTIONS[shape.act.function]).apply

    def run(x: Tensor, params: Params) -> Tensor:
        w = dict(zip(names, params, strict=True))
        gate = functional.linear(x, w["gate.weight"], w.get("gate.bias"))
        up = functional.linear(x, w["up.weight"], w.get("up.bias"))
        return functional.linear(normed(shape, middle(gate, up), w), w["down.weight"], w.get("down.bias"))

    return run
