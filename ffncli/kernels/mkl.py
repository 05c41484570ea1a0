"""mkl: float32 weights packed once by MKL, which F.linear has it do in every call.

MKL packs for one number of tokens, so it is done at the first call with that number. Forward only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels import inplace
from ffncli.kernels.dense import Weights, refuses_all_but_dense
from ffncli.kernels.kernel import REGISTERED, Computes, Params, Steps, register
from ffncli.kernels.per_weights import PerWeights, aliases


def multiplies(device: str, dtype: torch.dtype) -> bool:
    """Whether `packed` and `linear` work there in that dtype."""
    return dtype == torch.float32 and not REGISTERED["mkl"].missing(device)


def packed(weight: Tensor, tokens: int) -> Tensor:
    """The matrix [out, in] in MKL's layout for so many tokens."""
    out: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, tokens)
    return out


def linear(x: Tensor, weight: Tensor, plain: Tensor, bias: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, with a matrix packed for len(x) tokens; `plain` is the same as it was."""
    out: Tensor = torch.ops.mkl._mkl_linear(x, weight, plain, bias, len(x))
    return out


@register(
    "mkl", prepare=aliases, needs=("cpu", "mkl"), refuses=refuses_all_but_dense, trains=False, dtypes=("fp32",),
    per_weights=True,
)  # fmt: skip
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """As `inplace`, with packed weights and without its buffers."""
    names = tuple(parameters(steps))

    def pack(x: Tensor, params: Params) -> Weights:
        pairs = zip(names, params, strict=True)
        return {f"{name}.packed": packed(tensor, len(x)) for name, tensor in pairs if tensor.dim() == 2}

    def product(name: str, x: Tensor, w: Weights) -> Tensor:
        weight = f"{name}.weight"
        return linear(x, w[f"{weight}.packed"], w[weight], w.get(f"{name}.bias"))

    matrices, block = PerWeights(pack), inplace.computing(steps, product)

    def run(x: Tensor, params: Params) -> Tensor:
        return block(x, {**dict(zip(names, params, strict=True)), **matrices.get(x, params)})

    return run
