"""numpy, mkl: the kernel `inplace` with another BLAS's products. Forward only.

numpy: numpy's BLAS computes the products, with weights stored as [in, out]. The numpy wheels for Linux and Windows
include OpenBLAS, which reads a matrix faster in that order. Tensors and arrays share memory.

mkl: MKL packs the float32 weights once, whereas F.linear lets MKL pack them in every call. MKL packs weights for a
certain number of tokens, so the first call with each number of tokens packs them.
"""

from collections.abc import Mapping

import numpy as np
import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels import inplace
from ffncli.kernels.dense import Part, Weights, refuses_all_but_dense
from ffncli.kernels.kernel import REGISTERED, Build, Computes, Params, Steps, register
from ffncli.kernels.per_weights import PerWeights, aliases, widened, widened_weights


def numpy_multiplies(dtype: torch.dtype) -> bool:
    """Return True if numpy's BLAS multiplies in this dtype: it has no 16-bit floats."""
    return dtype in (torch.float64, torch.float32)


def numpy_matmul(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """Write x [tokens, in] · weight [in, out] to `out` with numpy, ignoring its warnings about infinities and NaN."""
    with np.errstate(all="ignore"):
        np.matmul(x.numpy(), weight.numpy(), out=out.numpy())
    return out


def on_one_thread(build: Build) -> Build:
    """Decorate a `build` so that torch computes only in the calling thread while the built function runs."""

    def built(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        compute = build(steps, device, dtype)
        openmp = [library for library in ThreadpoolController().lib_controllers if library.user_api == "openmp"]

        def run(x: Tensor, params: Params) -> Tensor:
            if torch.get_num_threads() == 1:
                return compute(x, params)
            before = [library.num_threads for library in openmp]
            try:
                # torch's other threads would spin, waiting for work, on cores that the BLAS's threads need. This sets
                # OpenMP's number of threads for this thread only; torch.set_num_threads would change the whole process.
                for library in openmp:
                    library.set_num_threads(1)
                return compute(x, params)
            finally:
                for library, threads in zip(openmp, before, strict=True):
                    library.set_num_threads(threads)

        return run

    return built


def prepare_numpy(steps: Steps, weights: Mapping[str, Tensor]) -> Params:
    """Transpose matrices from [out, in] to [in, out]; leave all other weights unchanged, in step order."""
    return tuple(t.T.contiguous() if t.dim() == 2 else t for t in aliases(steps, weights))


@register(
    "numpy",
    "with numpy's BLAS (OpenBLAS in pip's numpy for Linux and Windows), and weights stored as [in, out]",
    prepare=widened_weights(prepare_numpy, numpy_multiplies),
    needs=("cpu",),
    refuses=refuses_all_but_dense,
    trains=False,
    keeps="output",
)
@on_one_thread
@widened(numpy_multiplies)
def build_numpy(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the kernel `inplace` with numpy's products."""

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
        numpy_matmul(x, weight, out)
        return out if bias is None else out.add_(bias)

    return inplace.in_buffers(steps, multiply)


def mkl_multiplies(device: str, dtype: torch.dtype) -> bool:
    """Return True if `mkl_packed` and `mkl_linear` work on that device in that dtype."""
    return dtype == torch.float32 and not REGISTERED["mkl"].missing(device)


def mkl_packed(weight: Tensor, tokens: int) -> Tensor:
    """Pack the matrix [out, in] in MKL's layout for `tokens` tokens."""
    out: Tensor = torch.ops.mkl._mkl_reorder_linear_weight(weight, tokens)
    return out


def mkl_linear(x: Tensor, weight: Tensor, plain: Tensor, bias: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias, where `weight` is packed for len(x) tokens and `plain` is the same matrix unpacked."""
    out: Tensor = torch.ops.mkl._mkl_linear(x, weight, plain, bias, len(x))
    return out


@register(
    "mkl",
    "with weights that MKL packs once for the case's number of tokens",
    prepare=aliases, needs=("cpu", "mkl"), refuses=refuses_all_but_dense, trains=False, dtypes=("fp32",),
    per_weights=True,
)  # fmt: skip
def build_mkl(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Build the kernel `inplace` with packed weights, and without its buffers."""
    packed = len(parameters(steps)) + 1  # the place of the first packed weight

    def pack(x: Tensor, params: Params) -> Weights:
        return tuple(mkl_packed(tensor, len(x)) if tensor.dim() == 2 else None for tensor in params)

    def product(weight: int, bias: int) -> Part:
        return lambda x, p: mkl_linear(x, p[packed + weight], p[weight], p[bias])

    matrices, compute = PerWeights(pack), inplace.computing(steps, product)

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None, *matrices.get(x, params))
        return compute(x, p)

    return run
