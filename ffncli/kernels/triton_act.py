"""triton_act: eager's products, and everything between them in one Triton kernel, which reads gate and up once.

Forward only. It needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1), which runs it on a CPU as Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import Activation, parameters
from ffncli.kernels.between import normed
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.pattern import Dense, dense, refuses_all_but_dense

FUNCTIONS = ("identity", "relu", "relu2", "sigmoid", "silu", "quick_gelu", "gelu_tanh", "gelu")
BLOCK = 1024  # columns of one program: 8 elements for each of its 128 threads
_UNCHANGED = Activation("identity")


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: it needs a dense one whose functions are written in Triton."""
    shape = dense(steps)
    if shape is None:
        return refuses_all_but_dense(steps)
    ops = (shape.act, shape.lift or _UNCHANGED)
    if any(op.soft_cap is not None for op in ops):
        return "a soft cap is not written in Triton here"
    if any(op.most is not None for op in ops):
        return "a limit after the activation function is not written in Triton here"
    missing = next((op.function for op in ops if op.function not in FUNCTIONS), None)
    return missing and f"{missing} is not written in Triton here"


@register("triton_act", needs=("triton",), refuses=refuses, trains=False, compiles=True)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """down(act(gate(x)) · up(x)); Triton compiles at the first call, for the dtype and the divisors of sizes by 16."""
    shape, names = dense(steps), tuple(parameters(steps))
    assert shape is not None
    middle = launcher(shape)

    def run(x: Tensor, params: Params) -> Tensor:
        w = dict(zip(names, params, strict=True))
        up = functional.linear(x, w["up.weight"], w.get("up.bias"))
        gate = functional.linear(x, w["gate.weight"], w.get("gate.bias")) if shape.gated else up
        hidden = middle(gate, up, torch.empty_like(up))
        return functional.linear(normed(shape, hidden, w), w["down.weight"], w.get("down.bias"))

    return run


def launcher(shape: Dense) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """f(gate, up, out): writes what lies between the products to `out` [tokens, d_ff], contiguous, and returns it.

    `gate` and `up` have that shape and any strides; in a plain block both are the same tensor.
    """
    from ffncli.kernels.triton_functions import act_kernel

    fixed = constants(shape)

    def launch(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
        tokens, columns = out.shape
        grid = (tokens, -(-columns // BLOCK))
        wide = out.dtype == torch.float64
        act_kernel[grid](gate, up, out, columns, *gate.stride(), *up.stride(), **fixed, WIDE=wide, BLOCK=BLOCK)
        return out

    return launch


def constants(shape: Dense) -> dict[str, Any]:
    """The Triton kernel's compile-time arguments for a block, but for its dtype and BLOCK."""
    act, lift = shape.act, shape.lift or _UNCHANGED
    return {
        "GATED": shape.gated, "SCALE": float(shape.gate_scale),
        "ACT": act.function, "LOW": act.low, "HIGH": act.high, "PLUS": float(act.plus),
        "LIFT": lift.function, "LIFT_LOW": lift.low, "LIFT_HIGH": lift.high, "LIFT_PLUS": float(lift.plus),
    }  # fmt: skip
