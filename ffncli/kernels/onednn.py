"""onednn, onednn_packed: weights are reordered once into oneDNN's blocked layout, so that calls need no reordering.

F.linear multiplies float32 with MKL, and lets oneDNN reorder 16-bit weights in every call. torch.compile also reorders
weights once if it may freeze them, but only for 16-bit dtypes; for float32 it still uses MKL. If the processor cannot
multiply 16-bit numbers, these kernels compute in float32. Forward only.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels import packed
from ffncli.kernels.dense import Weights, body_of, refuses_all_but_dense
from ffncli.kernels.kernel import REGISTERED, Computes, Params, Steps, canonical, register
from ffncli.kernels.per_weights import widened, widened_weights

DTYPES = ("fp32", "bf16", "fp16")
_TOKENS = 128  # the number of tokens for which oneDNN chooses the layout; any number can be computed with it
_NOTHING: tuple[str, list[float], str] = ("none", [], "")
# The operations that oneDNN can apply while writing a product: function name, constants, variant.
_WHILE_WRITING: Mapping[str, tuple[str, list[float], str]] = {
    "identity": _NOTHING,
    "relu": ("relu", [], ""),
    "sigmoid": ("sigmoid", [], ""),
    "silu": ("swish", [], ""),
    "gelu": ("gelu", [], "none"),
    "gelu_tanh": ("gelu", [], "tanh"),
    "leaky_relu": ("leaky_relu", [0.01], ""),
}


def multiplies(dtype: torch.dtype) -> bool:
    """Return True if oneDNN multiplies in this dtype on this processor."""
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32 or (dtype == torch.float16 and bool(torch.ops.mkldnn._is_mkldnn_fp16_supported()))


def available(device: str) -> bool:
    """Return True if `linear` works on this device."""
    return not REGISTERED["onednn"].missing(device)


def nbytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, whether it is in oneDNN's layout or not."""
    return int(torch.ops.mkldnn._nbytes(tensor)) if tensor.is_mkldnn else tensor.nbytes


def _reordered(names: Iterable[str], tensors: Params) -> Params:
    """Convert the matrices among the tensors to oneDNN's layout; leave all other tensors unchanged."""
    matrices, reorder = ("gate.weight", "up.weight", "down.weight"), torch.ops.mkldnn._reorder_linear_weight
    return tuple(
        reorder(tensor, _TOKENS) if name in matrices else tensor for name, tensor in zip(names, tensors, strict=True)
    )


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Convert each matrix to oneDNN's layout, in step order."""
    return _reordered(parameters(steps), canonical(steps, weights))


def prepare_packed(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Join gate and up to one matrix, then convert all matrices to oneDNN's layout."""
    return _reordered(packed.names(steps), packed.prepare(steps, weights))


@register(
    "onednn",
    "with weights that oneDNN reorders once into blocks; it applies the activation and multiplies by the "
    "gate while it writes a matrix product",
    prepare=widened_weights(prepare, multiplies), needs=("cpu", "onednn"), refuses=refuses_all_but_dense,
    trains=False, dtypes=DTYPES,
)  # fmt: skip
@widened(multiplies)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute two or three products; oneDNN applies the activation and multiplies by the gate while writing them."""
    body = body_of(steps)
    shape, is_gated, norm = body.shape, body.shape.gated, body.norm
    writes = _WHILE_WRITING.get(shape.act.function)
    if writes is None or not shape.act.unlimited or shape.lift or shape.gate_scale != 1:
        return body.nested(linear)
    first, first_bias = body.gate if is_gated else body.up
    (up, up_bias), (down, down_bias) = body.up, body.down
    product, multiplied = torch.ops.mkldnn._linear_pointwise, torch.ops.mkldnn._linear_pointwise.binary

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        hidden = product(x, p[first], p[first_bias], *writes)
        if is_gated:
            hidden = multiplied(x, hidden, p[up], p[up_bias], "mul")
        return linear(norm(hidden, p), p[down], p[down_bias])

    return run


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias for a reordered weight."""
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, *_NOTHING)
    return out


@register(
    "onednn_packed",
    "as packed, with weights reordered by oneDNN",
    prepare=widened_weights(prepare_packed, multiplies), needs=("cpu", "onednn"),
    refuses=packed.refuses, trains=False, dtypes=DTYPES,
)  # fmt: skip
@widened(multiplies)
def build_packed(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the kernel `packed` with oneDNN's products."""
    return packed.computing(steps, linear)
