"""numpy: products by numpy's BLAS, with weights stored as [in, out]; torch's functions between them. Forward only.

pip's numpy brings OpenBLAS for Linux and Windows, which reads a matrix faster in that order. Tensors and arrays are
views of each other.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels import inplace
from ffncli.kernels.dense import Weights, refuses_all_but_dense
from ffncli.kernels.kernel import Build, Computes, Params, Steps, register
from ffncli.kernels.per_weights import widened, widened_weights


def multiplies(dtype: torch.dtype) -> bool:
    """Whether numpy's BLAS does: it has no 16-bit floats."""
    return dtype in (torch.float64, torch.float32)


def matmul(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [tokens, in] · weight [in, out], written to `out` by numpy, which says nothing of infinities."""
    with np.errstate(all="ignore"):
        np.matmul(x.numpy(), weight.numpy(), out=out.numpy())
    return out


def on_one_thread(build: Build) -> Build:
    """Decorates a `build`: torch computes in the calling thread alone while its function runs.

    Its other threads would spin, waiting for more work, on cores that the threads of numpy's BLAS need. What is set is
    OpenMP's number for this thread: `torch.set_num_threads` would set that of the process.
    """

    def built(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        compute = build(steps, device, dtype)
        openmp = [library for library in ThreadpoolController().lib_controllers if library.user_api == "openmp"]

        def run(x: Tensor, params: Params) -> Tensor:
            if torch.get_num_threads() == 1:
                return compute(x, params)
            before = [library.num_threads for library in openmp]
            try:
                for library in openmp:
                    library.set_num_threads(1)
                return compute(x, params)
            finally:
                for library, threads in zip(openmp, before, strict=True):
                    library.set_num_threads(threads)

        return run

    return built


def prepare(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Matrices [out, in] as [in, out]; the rest unchanged, in step order."""
    tensors = (weights[name].detach() for name in parameters(steps))
    return tuple(t.T.contiguous() if t.dim() == 2 else t for t in tensors)


@register(
    "numpy", prepare=widened_weights(prepare, multiplies), needs=("cpu",), refuses=refuses_all_but_dense, trains=False
)
@on_one_thread
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
        return block(x, dict(zip(names, params, strict=True)))

    return run
