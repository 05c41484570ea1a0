"""The size of parameters in a number format.

A stored format (q4_0, fp8 ...) packs the projection matrices, which map between d_model (or the latent width of
experts) and d_ff, along their rows: d_model for up and gate, d_ff for down. Everything else (biases, norms, the router,
a shared expert's gate, the projections to a latent width and back, learned activation parameters) keeps the format's
`other_bytes`: 4 in ggml's formats (llama.cpp writes vectors and routers as F32), 2 in the others (checkpoints keep them
in bf16).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from ffncli.block.dtypes import DType
from ffncli.block.steps import Axis, Experts, Step, of_norm
from ffncli.errors import FFNError

CONVENTIONS: Mapping[str, str] = {
    "weight_bytes": "plain formats: parameters × width; a stored format packs the projection matrices, scales"
    " included, and keeps every other parameter at 4 bytes (ggml's) or 2 (the others); scales of whole tensors,"
    " rows or tiles of fp8, int8 and nvfp4 and all scales of int4 are not counted",
}


def weight_bytes(steps: Sequence[Step], dtype: DType, stack: tuple[Axis, ...] = ()) -> int:
    """Bytes of the FFN's parameters without norms; `stack` are leading axes of each tensor (the experts).

    Raises FFNError if a row does not divide into blocks.
    """
    total = 0
    for step in steps:
        if isinstance(step.op, Experts):
            total += weight_bytes(step.op.program, dtype, (*stack, step.op.experts))
        elif not of_norm(step):
            total += sum(parameter_bytes(n, (*stack, *axes), dtype) for n, axes in step.parameters().items())
    return total


def parameter_bytes(name: str, axes: Sequence[Axis], dtype: DType) -> int:
    """Bytes of one parameter tensor. Raises FFNError, naming it, if its rows do not divide into blocks."""
    sizes = [axis.size for axis in axes]
    if dtype.computable:
        return prod(sizes) * dtype.block_bytes
    if not is_projection(axes):
        return prod(sizes) * dtype.other_bytes
    try:
        return dtype.matrix_bytes(sizes)
    except FFNError as error:
        raise FFNError(f"{name}: {error.message}", error.hint) from None


def is_projection(axes: Sequence[Axis]) -> bool:
    """Whether a parameter is a matrix between d_model, or a latent width, and d_ff, or a stack of them.

    A stored format packs these.
    """
    names = {axis.name for axis in axes}
    return "d_ff" in names and bool(names & {"d_model", "latent"})
