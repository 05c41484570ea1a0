"""numpy: products by numpy's BLAS, with weights stored as [in, out]; torch's functions between them. Forward only.

pip's numpy brings OpenBLAS, which reads a matrix faster in that order. Tensors and arrays are views of each other.
torch computes in one thread: its others would spin, waiting for more work, on cores that OpenBLAS's threads need.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels import inplace
from ffncli.kernels.between import Weights
from ffncli.kernels.kernel import Computes, Params, Steps, register
from ffncli.kernels.pattern import refuses_all_but_dense
from ffncli.kernels.widened import widened, widened_weights


def multiplies(dtype: torch.dtype) -> bool:
    """Whether numpy's BLAS does: it has no 16-bit floats."""
    return dtype in (torch.float64, torch.float32)


def matmul(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [tokens, in] · weight [in, out], written to `out` by numpy."""
    np.matmul(x.numpy(), weight.numpy(), out=out.numpy())
    return out


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Matrices [out, in] as [in, out]; the rest unchanged, in step order."""
    tensors = (weights[name] for name in parameters(steps))
    return tuple(t.detach().T.contiguous() if t.dim() == 2 else t.detach() for t in tensors)


@register(
    "numpy", prepare=widened_weights(prepare, multiplies), needs=("cpu",), refuses=refuses_all_but_dense, trains=False
)
@widened(multiplies)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """As `inplace`, with numpy's products."""
    names, buffers = tuple(parameters(steps)), inplace.Buffers()

    def product(name: str, x: Tensor, w: Weights) -> Tensor:
        weight, bias = w[f"{name}.weight"], w.get(f"{name}.bias")
        out = matmul(x, weight, buffers.of(name, x, weight.shape[1]))
        return out if bias is None else out.add_(bias)

    block = inplace.computing(steps, product)

    def run(x: Tensor, params: Params) -> Tensor:
        threads = torch.get_num_threads()
        if threads > 1:
            torch.set_num_threads(1)
        try:
            return block(x, dict(zip(names, params, strict=True)))
        finally:
            if threads > 1:
                torch.set_num_threads(threads)

    return run
