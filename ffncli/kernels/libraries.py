"""Kernels from other packages, imported when a kernel is built; a kernel is skipped if its package is not installed,
and the reason is reported.

liger: LigerMLP of liger-kernel, one Triton kernel that computes gate, up and all operations before down. liger_act: the
products as in eager, with liger-kernel's SiLUMul or GELUMul between them. quack: the MLP of quack-kernels, which
computes gate, up and the activation in one product (CuTe DSL).

All of them compute gated units, without the limits and scales that some models add.
"""

from collections.abc import Collection, Mapping
from functools import partial
from importlib import import_module

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Weights, body_of, dense, refuses_all_but_dense, refuses_odd_widths
from ffncli.kernels.kernel import Computes, Params, Steps, register


def refuses_all_but_gated(steps: Steps, functions: Collection[str], products: bool = True) -> str | None:
    """Return why a library's gated unit, which supports these functions, cannot compute the block; `products` is True
    if the unit also computes the products."""
    shape = dense(steps)
    if shape is None:
        return refuses_all_but_dense(steps)
    if not shape.gated:
        return "cannot compute a plain block"
    if shape.act.function not in functions:
        return f"cannot compute {shape.act.function}, only {' and '.join(functions)}"
    if not shape.act.unlimited or shape.lift or shape.gate_scale != 1:
        return "cannot compute a limited or scaled gate"
    if products and shape.sub_norm:
        return "cannot compute a norm inside the block"
    if products and any(name.endswith(".bias") for name in parameters(steps)):
        return "cannot compute biases"
    return None


_DTYPES = ("fp32", "bf16", "fp16")
_refuses_liger = partial(refuses_all_but_gated, functions=("silu",))


@register(
    "liger",
    "by LigerMLP of the package liger-kernel: SwiGLU without biases",
    needs=("cuda", "sm_90", "liger_kernel"),
    refuses=_refuses_liger,
    compiles=True,
    dtypes=_DTYPES,
)
def build_liger(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Call LigerMLP on the block's gate, up and down. The first call tries several tile sizes."""
    mlp = import_module("liger_kernel.ops").LigerMLPFunction.apply

    def run(x: Tensor, params: Params) -> Tensor:
        out: Tensor = mlp(x[None], *params)[0]  # the function expects [batch, tokens, d_model]
        return out

    return run


OF_ACT = {"silu": "LigerSiLUMulFunction", "gelu_tanh": "LigerGELUMulFunction"}
_refuses_liger_act = partial(refuses_all_but_gated, functions=OF_ACT, products=False)


@register(
    "liger_act",
    "with eager's matrix products, and SiLUMul or GELUMul of liger-kernel between them",
    needs=("cuda", "liger_kernel"),
    refuses=_refuses_liger_act,
    compiles=True,
    dtypes=_DTYPES,
)
def build_liger_act(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute down(SiLUMul(gate(x), up(x)))."""
    body, linear = body_of(steps), functional.linear
    middle = getattr(import_module("liger_kernel.ops"), OF_ACT[body.shape.act.function]).apply
    (gate, gate_bias), (up, up_bias), (down, down_bias) = body.gate, body.up, body.down

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        hidden = middle(linear(x, p[gate], p[gate_bias]), linear(x, p[up], p[up_bias]))
        return linear(body.norm(hidden, p), p[down], p[down_bias])

    return run


QUACK_UNITS = {"silu": "swiglu", "gelu_tanh": "geglu", "relu": "reglu", "sigmoid": "glu"}  # quack's names for the units


def prepare_quack(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return (gate above up, [2 · d_ff, d_model]; down)."""
    return torch.cat([weights["gate.weight"], weights["up.weight"]]), weights["down.weight"]


@register(
    "quack",
    "by the MLP of the package quack-kernels: SwiGLU, GEGLU (tanh), ReGLU or GLU without biases",
    prepare=prepare_quack,
    needs=("cuda", "sm_90", "quack"),
    refuses=lambda steps: refuses_all_but_gated(steps, QUACK_UNITS) or refuses_odd_widths(steps, 8),
    compiles=True,
    dtypes=("bf16", "fp16"),
)
def build_quack(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Call quack's MLP on the packed weights. The first call tries several tile sizes."""
    mlp, unit = import_module("quack.mlp").mlp_func, QUACK_UNITS[body_of(steps).shape.act.function]

    def run(x: Tensor, params: Params) -> Tensor:
        inward, down = params
        out: Tensor = mlp(x, inward, down, unit, concat_layout=True)
        return out

    return run
