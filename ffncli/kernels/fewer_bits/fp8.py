"""fp8: products of 8-bit factors (e4m3), each row of x, of the hidden numbers and of the weights with its own scale.

Weights are quantized once, x and the hidden numbers in every call. Forward only. On a GPU the products may add up in
fewer bits than float32 has (fast accumulation); a CPU without such products emulates them, and takes longer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import ScalingType

from ffncli.block.steps import parameters
from ffncli.kernels.dense import between, dense, normed, refuses_all_but_dense, refuses_odd_widths
from ffncli.kernels.kernel import Computes, Params, Steps, register

_FORMAT = torch.float8_e4m3fn
_LARGEST = torch.finfo(_FORMAT).max
_MATRICES = ("gate.weight", "up.weight", "down.weight")
_MULTIPLE = 16  # of both widths: what a GPU's products need


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: it needs a dense one whose widths a GPU's products take."""
    return refuses_all_but_dense(steps) or refuses_odd_widths(steps, _MULTIPLE)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """(x in 8 bits, the scale of every row, float32): their product is x again. The last axis of x is a row."""
    wide = x.float()
    scale = (wide.abs().amax(-1, keepdim=True) / _LARGEST).clamp(min=torch.finfo(torch.float32).tiny)
    return (wide / scale).to(_FORMAT), scale


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """gate above up, and down, each followed by its scales [1, out]; then everything else unchanged, in step order."""
    inward = [weights[name] for name in _MATRICES[:2] if name in weights]
    pairs = [quantized(matrix) for matrix in (torch.cat(inward), weights["down.weight"])]
    return (*(t for matrix, scale in pairs for t in (matrix, scale.T)), *(weights[name] for name in _others(steps)))


def _others(steps: Steps) -> list[str]:
    return [name for name in parameters(steps) if name not in _MATRICES]


@register(
    "fp8", prepare=prepare, needs=("sm_89",), refuses=refuses, trains=False, dtypes=("fp32", "bf16", "fp16"),
    computes="fp8-rowwise",
)  # fmt: skip
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Quantize, product, activation and gate, quantize, product."""
    shape, names = dense(steps), _others(steps)
    assert shape is not None
    middle = between(shape)
    made = torch.bfloat16 if device.startswith("cuda") else dtype  # all that every such GPU gives

    def product(x: Tensor, matrix: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        rows, by_row = quantized(x)
        out = functional.scaled_mm(
            rows, matrix.T, by_row, ScalingType.RowWise, scale, ScalingType.RowWise, output_dtype=made,
            use_fast_accum=True,
        ).to(dtype)  # fmt: skip
        return out if bias is None else out + bias

    def run(x: Tensor, params: Params) -> Tensor:
        w = dict(zip(names, params[4:], strict=True))
        inward = product(x, params[0], params[1], None)
        gate, up = inward.chunk(2, -1) if shape.gated else (None, inward)
        gate = gate if gate is None or "gate.bias" not in w else gate + w["gate.bias"]
        up = up if "up.bias" not in w else up + w["up.bias"]
        return product(normed(shape, middle(gate, up, w), w), params[2], params[3], w.get("down.bias"))

    return run
