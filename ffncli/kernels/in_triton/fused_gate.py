"""fused_gate: the products of gate and up, and all between them, in one Triton kernel; down is torch's product.

A program computes one tile of gate and of up from one tile of x, so that neither is written out. What this can save at
most is the column `fusion_saving_max`; above some 2048 tokens × 4096 expect it to lose to `packed`, whose product is
the vendor's. In training gate and up are kept, and the backward pass computes their gradients and hidden once more in
one elementwise kernel, between torch's products. Its speed has not been measured on any GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Dense, dense
from ffncli.kernels.in_triton import hidden as unit
from ffncli.kernels.in_triton.hidden import BLOCK, Products, constants, launcher
from ffncli.kernels.kernel import Computes, Params, Steps, register


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: a norm before down would need a backward pass here."""
    shape = dense(steps)
    norm = "a norm before down is not written here" if shape and shape.sub_norm else None
    return unit.refuses(steps) or norm


@register("fused_gate", needs=("triton",), refuses=refuses, compiles=True)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """down(act(gate(x)) · up(x)); Triton compiles at the first call, and again for one that needs gradients."""
    shape = dense(steps)
    assert shape is not None
    block = FusedGate(tuple(parameters(steps)), shape.gated, launcher(shape, dtype), backward_launcher(shape))

    def run(x: Tensor, params: Params) -> Tensor:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *params)):
            out: Tensor = _Trained.apply(block, x, *params)  # type: ignore[no-untyped-call]
            return out
        return block.output(x, params, None)

    return run


@dataclass(frozen=True)
class FusedGate:
    """A block's parameters by name, and its two launchers."""

    names: tuple[str, ...]
    gated: bool
    hidden: Callable[[Tensor, dict[str, Tensor], Products | None], Tensor]
    backward: Callable[[Products, Tensor], tuple[Tensor, Tensor, Tensor]]

    def output(self, x: Tensor, params: Params, products: Products | None) -> Tensor:
        """The block's output; `products`, if any, take gate and up."""
        w = dict(zip(self.names, params, strict=True))
        return functional.linear(self.hidden(x, w, products), w["down.weight"], w.get("down.bias"))

    def gradients(self, d_out: Tensor, x: Tensor, products: Products, params: Params) -> list[Callable[[], Tensor]]:
        """Those of x and of each parameter, as functions that compute them."""
        w = dict(zip(self.names, params, strict=True))
        d_gate, d_up, hidden = self.backward(products, d_out @ w["down.weight"])
        sides = {"gate": (d_gate, x), "up": (d_up, x), "down": (d_out, hidden)}

        def of(name: str) -> Tensor:
            left, right = sides[name.partition(".")[0]]
            return left.sum(0) if name.endswith(".bias") else left.T @ right

        def of_x() -> Tensor:
            d_x = d_up @ w["up.weight"]
            return d_x.addmm_(d_gate, w["gate.weight"]) if self.gated else d_x

        return [of_x, *(partial(of, name) for name in self.names)]


class _Trained(torch.autograd.Function):
    """The block with its backward pass; keeps x, gate and up."""

    @staticmethod
    def forward(ctx: Any, block: FusedGate, x: Tensor, *params: Tensor) -> Tensor:
        gate = x.new_empty(x.shape[0], params[block.names.index("up.weight")].shape[0])
        products = (gate, torch.empty_like(gate) if block.gated else gate)
        ctx.block = block
        ctx.save_for_backward(x, *products, *params)
        return block.output(x, params, products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, *params = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad
        of = ctx.block.gradients(d_out, x, (gate, up), tuple(params))
        return (None, *(compute() if need else None for compute, need in zip(of, needed, strict=True)))


def backward_launcher(shape: Dense) -> Callable[[Products, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """f((gate, up), d_hidden) → their gradients and hidden, all [tokens, d_ff] and contiguous.

    In a plain block gate and up are one tensor, and so are their gradients.
    """
    from ffncli.kernels.in_triton.launched import act_backward_kernel

    fixed = constants(shape)

    def launch(products: Products, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = products
        d_gate, hidden = torch.empty_like(gate), torch.empty_like(gate)
        d_up = torch.empty_like(up) if shape.gated else d_gate
        tokens, columns = gate.shape
        act_backward_kernel[(tokens, -(-columns // BLOCK))](
            gate, up, d_hidden, d_gate, d_up, hidden, columns, **fixed, WIDE=gate.dtype == torch.float64, BLOCK=BLOCK
        )
        return d_gate, d_up, hidden

    return launch
