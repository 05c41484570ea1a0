"""int8, int4: weights in fewer bits; x and what is computed in the block's dtype; by products that torch has itself.

For few tokens the time is that of reading the weights, which are half or a quarter as many bytes. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels.dense import between, dense, normed, refuses_all_but_dense, refuses_odd_widths
from ffncli.kernels.kernel import Computes, Params, Steps, register

GROUP = 32  # weights of a row that share a scale and a zero in int4
_WIDTH = 32  # both widths are a multiple of it: torch's products read vectors of weights, and check nothing
_MATRICES = ("gate.weight", "up.weight", "down.weight")
_DTYPES = ("bf16", "fp16", "fp32")

Pair: TypeAlias = tuple[Tensor, Tensor]
Quantizes: TypeAlias = Callable[[Tensor], Pair]
Multiplies: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: it needs a dense one of suitable widths."""
    return refuses_all_but_dense(steps) or refuses_odd_widths(steps, _WIDTH)


def to_int8(weight: Tensor) -> Pair:
    """(integers of −127 to 127 [out, in], one scale per row [out]): weight ≈ integer · scale."""
    scale = (weight.float().abs().amax(1).clamp(min=1e-30) / 127).to(weight.dtype)
    return (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def to_int4(weight: Tensor) -> Pair:
    """(integers of 0 to 15, packed as torch's product wants them; scale and zero of each group [in / 32, out, 2]):
    weight ≈ (integer − 8) · scale + zero."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-30) / 15
    integers = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).flatten(1)
    pairs = torch.cat([scale, low + 8 * scale], -1).transpose(0, 1)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 2)
    return packed, pairs.to(weight.dtype).contiguous()


def preparing(quantize: Quantizes) -> Callable[[Steps, Mapping[str, Tensor]], Params]:
    """`prepare` of a kernel: each matrix as two tensors, the rest unchanged, in step order."""

    def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        parts = [quantize(weights[n]) if n in _MATRICES else (weights[n],) for n in parameters(steps)]
        return tuple(tensor for part in parts for tensor in part)

    return prepare


def computing(steps: Steps, multiply: Multiplies) -> Computes:
    """The block, whose products are `multiply(x, integers, scales)`."""
    shape, names = dense(steps), list(parameters(steps))
    assert shape is not None
    middle = between(shape)
    keys = [key for name in names for key in ((name, f"{name} scale") if name in _MATRICES else (name,))]

    def run(x: Tensor, params: Params) -> Tensor:
        w = dict(zip(keys, params, strict=True))

        def product(name: str, x: Tensor) -> Tensor:
            y, bias = multiply(x, w[f"{name}.weight"], w[f"{name}.weight scale"]), w.get(f"{name}.bias")
            return y if bias is None else y + bias

        hidden = middle(product("gate", x) if shape.gated else None, product("up", x), w)
        return product("down", normed(shape, hidden, w))

    return run


@register(
    "int8", prepare=preparing(to_int8), needs=("cpu",), refuses=refuses, trains=False, dtypes=_DTYPES,
    computes="int8-weights",
)  # fmt: skip
def build_int8(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Weights in 8 bits, a scale for each row of a matrix."""
    return computing(steps, torch.ops.aten._weight_int8pack_mm)


@register(
    "int4", prepare=preparing(to_int4), needs=("cpu",), refuses=refuses, trains=False, dtypes=_DTYPES,
    computes="int4-weights",
)  # fmt: skip
def build_int4(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Weights in 4 bits, a scale and a zero for 32 of a row."""

    def multiply(x: Tensor, integers: Tensor, pairs: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, integers, GROUP, pairs)
        return out

    return computing(steps, multiply)
