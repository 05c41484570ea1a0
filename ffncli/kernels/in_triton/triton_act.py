"""triton_act: eager's products, and everything between them in one Triton kernel, which reads gate and up once.

Forward only. It needs a GPU, or Triton's interpreter (TRITON_INTERPRET=1), which runs it on a CPU as Python.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Dense, dense, normed
from ffncli.kernels.in_triton.hidden import BLOCK, constants, refuses
from ffncli.kernels.kernel import Computes, Params, Steps, register


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
    from ffncli.kernels.in_triton.launched import act_kernel

    fixed = constants(shape)

    def launch(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
        tokens, columns = out.shape
        grid = (tokens, -(-columns // BLOCK))
        wide = out.dtype == torch.float64
        act_kernel[grid](gate, up, out, columns, *gate.stride(), *up.stride(), **fixed, WIDE=wide, BLOCK=BLOCK)
        return out

    return launch
