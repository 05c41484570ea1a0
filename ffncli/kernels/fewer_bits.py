"""Kernels that compute in fewer bits than their inputs have, and declare it. Forward only.

fp8: products of 8-bit factors (e4m3); each row of x, of the hidden values and of the weights has its own scale. Weights
are quantized once, x and the hidden values in every call. On a GPU the sums may have fewer bits than float32 (fast
accumulation); a CPU without such products emulates them, which is slower.

int8, int4: weights have fewer bits; x and all intermediates stay in the block's dtype; torch provides the products.
With few tokens, most of the time is spent reading the weights, which need only a half or a quarter of the bytes.
"""

from collections.abc import Callable, Mapping
from typing import TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from ffncli.block.steps import parameters
from ffncli.kernels.dense import Weights, body_of, plus, refuses_all_but_dense, refuses_odd_widths
from ffncli.kernels.kernel import Computes, Params, Steps, register

_MATRICES = ("gate.weight", "up.weight", "down.weight")
_DTYPES = ("bf16", "fp16", "fp32")

# --- fp8 --------------------------------------------------------------------------------------------------------------

_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return (x in 8 bits, a float32 scale per row); their product approximates x. Rows lie along the last axis."""
    wide = x.float()
    # A row of zeros would have the scale 0, and 0 / 0 is NaN.
    scale = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).to(_FORMAT), scale


def prepare_fp8(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Return two quantized matrices, first gate stacked above up, then down, each followed by its scales [1, out]; then
    all other weights, unchanged, in step order."""
    inward = [weights[name] for name in _MATRICES[:2] if name in weights]
    pairs = [quantized(matrix) for matrix in (torch.cat(inward), weights["down.weight"])]
    return (*(t for matrix, scale in pairs for t in (matrix, scale.T)), *(weights[name] for name in _others(steps)))


def _others(steps: Steps) -> list[str]:
    return [name for name in parameters(steps) if name not in _MATRICES]


@register(
    "fp8",
    "with 8-bit factors (e4m3) and a scale for each row, quantized in every call; widths must be "
    "multiples of 16; emulated slowly on a CPU",
    prepare=prepare_fp8, needs=("sm_89",), trains=False, dtypes=("fp32", "bf16", "fp16"), computes="fp8-rowwise",
    refuses=lambda steps: refuses_all_but_dense(steps) or refuses_odd_widths(steps, 16),  # for a GPU's 8-bit products,
)  # fmt: skip
def build_fp8(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the steps: quantize, product, activation and gate, quantize, product."""
    body = body_of(steps, ["inward", "inward scale", "down", "down scale", *_others(steps)])
    is_gated, (_, gate_bias), (_, up_bias), (_, down_bias) = body.shape.gated, body.gate, body.up, body.down
    made = torch.bfloat16 if device.startswith("cuda") else dtype  # the only output dtype that all such GPUs support

    def product(x: Tensor, matrix: Tensor, scale: Tensor) -> Tensor:
        rows, by_row = quantized(x)
        return functional.scaled_mm(
            rows, matrix.T, by_row, ScalingType.RowWise, scale, ScalingType.RowWise, output_dtype=made,
            use_fast_accum=True,
        ).to(dtype)  # fmt: skip

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        inward = product(x, p[0], p[1])
        gate, up = inward.chunk(2, -1) if is_gated else (None, inward)
        hidden = body.hidden(None if gate is None else plus(gate, p[gate_bias]), plus(up, p[up_bias]), p=p)
        del inward, gate, up  # their memory is free for the next product
        return plus(product(hidden, p[2], p[3]), p[down_bias])

    return run


# --- int8, int4 -------------------------------------------------------------------------------------------------------

GROUP = 32  # consecutive weights of a row that share a scale and a zero in int4
_MULTIPLE = 32  # both widths must be multiples of this: torch's products read vectors of weights without checking

Pair: TypeAlias = tuple[Tensor, Tensor]
Quantizes: TypeAlias = Callable[[Tensor], Pair]
Multiplies: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]


def refuses_weight_only(steps: Steps) -> str | None:
    """Return why these kernels cannot compute a block: they need a dense block of suitable widths."""
    return refuses_all_but_dense(steps) or refuses_odd_widths(steps, _MULTIPLE)


def to_int8(weight: Tensor) -> Pair:
    """Return (integers from −127 to 127 [out, in], one scale per row [out]): weight ≈ integer · scale."""
    # Rounded to the dtype first: the integers must fit the scale that the product will use.
    scale = (weight.float().abs().amax(1).clamp(min=1e-30) / 127).to(weight.dtype)
    return (weight.float() / scale.float()[:, None]).round().clamp(-127, 127).to(torch.int8), scale


def to_int4(weight: Tensor) -> Pair:
    """Return (integers from 0 to 15, packed as torch's product expects them; scale and zero per group [in / 32, out,
    2]): weight ≈ (integer − 8) · scale + zero."""
    groups = weight.float().reshape(len(weight), -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp(min=1e-30) / 15
    integers = ((groups - low) / scale).round().clamp(0, 15).to(torch.int32).flatten(1)
    # torch's product subtracts 8 from each integer, so the zero moves up by 8 steps.
    pairs = torch.cat([scale, low + 8 * scale], -1).transpose(0, 1)
    packed: Tensor = torch.ops.aten._convert_weight_to_int4pack_for_cpu(integers, 2)
    return packed, pairs.to(weight.dtype).contiguous()


def preparing(quantize: Quantizes) -> Callable[[Steps, Mapping[str, Tensor]], Params]:
    """Return the `prepare` of a kernel that stores each matrix as two tensors and all other weights unchanged, in step
    order."""

    def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
        parts = [quantize(weights[n]) if n in _MATRICES else (weights[n],) for n in parameters(steps)]
        return tuple(tensor for part in parts for tensor in part)

    return prepare


def computing(steps: Steps, multiply: Multiplies) -> Computes:
    """Build the block with products computed by `multiply(x, integers, scales)`."""
    names = [key for n in parameters(steps) for key in ((n, f"{n} scale") if n in _MATRICES else (n,))]
    return body_of(steps, names).composed(
        lambda weight, bias: lambda x, p: plus(multiply(x, p[weight], p[weight + 1]), p[bias])
    )


@register(
    "int8",
    "with 8-bit weights and a scale for each row",
    prepare=preparing(to_int8), needs=("cpu",), refuses=refuses_weight_only, trains=False, dtypes=_DTYPES,
    computes="int8-weights",
)  # fmt: skip
def build_int8(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the block with 8-bit weights and one scale per row of a matrix."""
    return computing(steps, torch.ops.aten._weight_int8pack_mm)


@register(
    "int4",
    "with 4-bit weights, and a scale and a zero point for every 32 weights of a row",
    prepare=preparing(to_int4), needs=("cpu",), refuses=refuses_weight_only, trains=False, dtypes=_DTYPES,
    computes="int4-weights",
)  # fmt: skip
def build_int4(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the block with 4-bit weights; 32 consecutive weights of a row share a scale and a zero."""

    def multiply(x: Tensor, integers: Tensor, pairs: Tensor) -> Tensor:
        out: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, integers, GROUP, pairs)
        return out

    return computing(steps, multiply)
