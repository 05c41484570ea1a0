"""gemv: one token, for which a product is a matrix times a vector: torch.compile makes one loop of the multiplying and
the summing, which streams the weights once. The libraries' products are made for matrices, and read slower.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels import eager
from ffncli.kernels.compiled import graph
from ffncli.kernels.dense import Weights, between, dense, normed, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, register


@register("gemv", needs=("cpu", "compiler"), refuses=refuses_all_but_dense, trains=False, compiles=True, most_tokens=1)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """The block of one token, compiled; more tokens are computed as eager does."""
    shape, names = dense(steps), tuple(parameters(steps))
    assert shape is not None
    middle, wide = between(shape), torch.promote_types(dtype, torch.float32)

    def product(name: str, x: Tensor, w: Weights) -> Tensor:
        y = (w[f"{name}.weight"].to(wide) * x).sum(-1)
        bias = w.get(f"{name}.bias")
        return y if bias is None else y + bias

    def one(x: Tensor, params: Params) -> Tensor:
        pairs = zip(names, params, strict=True)
        w = {name: tensor if tensor.dim() == 2 else tensor.to(wide) for name, tensor in pairs}
        token = x[0].to(wide)
        gate = product("gate", token, w) if shape.gated else None
        hidden = normed(shape, middle(gate, product("up", token, w), w), w)
        return product("down", hidden, w)[None].to(x.dtype)

    of_one, of_many = graph(one, device), eager.build(steps, device, dtype)

    def run(x: Tensor, params: Params) -> Tensor:
        return of_one(x, params) if len(x) == 1 else of_many(x, params)

    return run
