"""Quantized modules of a safetensors checkpoint: logical parameters and stored bytes, from names and shapes alone.

Only the packed values of a quantized matrix are parameters; scales, zeros and indices are bookkeeping. Tensors outside
any packed matrix (biases, norms, modules that were not quantized) stay as they are. Nothing depends on digits in names,
so expert numbers may be replaced by a sign.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any

from ffncli.errors import FFNError, shown
from ffncli.models.files.fields import Fields
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.packing import PACKED_DTYPES, Anchor, Matrix, reader

_KNOWN = "gptq, awq, fp8, mxfp8, mxfp4, nvfp4, bitsandbytes, compressed-tensors"


@dataclass(frozen=True)
class Logical:
    """One logical tensor: torch's shape ([out, in]; None if only the number of values is known), parameters,
    bytes of all its pieces in the file, format (`gptq-4bit`, `fp8-block128`; a plain tensor's dtype code).

    `anchor` is the stored tensor that represents it: the packed values, or the plain tensor itself; `bits` are those
    of a packed integer.
    """

    shape: tuple[int, ...] | None
    params: int
    bytes: int
    format: str
    anchor: str = field(default="", compare=False)
    bits: int = field(default=0, compare=False)


def logical(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None, where: str
) -> dict[str, Logical]:
    """Stored tensors → logical tensors, in the same order.

    A packed matrix becomes one entry `X.weight` (`X` if experts share a parameter without that ending), at the place
    of its packed values. All pieces of a matrix must be passed together; other parts of the checkpoint may be left out.
    `where` names the checkpoint in errors. Raises FFNError naming the tensor if shapes contradict each other or the
    config, or if values are packed in an unknown way.
    """
    matrices, pieces = _matrices(tensors, Fields(quantization or {}, where))
    out: dict[str, Logical] = {}
    for name, info in tensors.items():
        if name in matrices:
            matrix = matrices[name]
            stored = info.bytes + sum(tensors[piece].bytes for piece in matrix.pieces)
            key, entry = matrix.name, Logical(matrix.shape, matrix.params, stored, matrix.format, name, matrix.bits)
        elif name in pieces:
            continue
        else:
            _check_plain(name, info, quantization, where)
            key, entry = name, Logical(info.shape, prod(info.shape), info.bytes, info.dtype, name)
        if key in out:
            raise FFNError(f"{where}: tensor {shown(key, 120)} is duplicated, packed and plain or in two packings")
        out[key] = entry
    return out


def _matrices(tensors: Mapping[str, TensorInfo], config: Fields) -> tuple[dict[str, Matrix], Collection[str]]:
    """(anchor's name → its matrix, the names of all anchors and pieces). FFNError for a piece of two matrices."""
    matrices: dict[str, Matrix] = {}
    owner: dict[str, str] = {}
    for name, info in tensors.items():
        read = reader(name, info, tensors)
        if read is None:
            continue
        matrices[name] = matrix = read(Anchor(name, info, tensors, config))
        for piece in (name, *matrix.pieces):
            if owner.setdefault(piece, name) != name:
                both = f"{shown(name, 120)} and {shown(owner[piece], 120)}"
                raise FFNError(f"{config.where}: tensor {shown(piece, 120)} belongs to both {both}")
    return matrices, owner.keys()


def _check_plain(name: str, info: TensorInfo, quantization: Mapping[str, Any] | None, where: str) -> None:
    """Unexplained integers in a quantized checkpoint are packed in an unknown way: counting them would be wrong.

    Masks that GPT-2 and GPT-NeoX store as `bias` are not weights.
    """
    if info.dtype == "U8" and len(info.shape) > 2 and name.endswith(("_blocks", ".blocks")):
        scales = f"{where}: tensor {shown(name[:-6] + 'scales', 120)} is missing"
        raise FFNError(scales, f"{shown(name, 120)} cannot be read without it")
    if quantization is None or info.dtype not in PACKED_DTYPES or len(info.shape) < 2 or name.endswith("bias"):
        return
    method = quantization.get("quant_method")
    raise FFNError(
        f"{where}: tensor {shown(name, 120)} ({info.dtype} {shown(list(info.shape))}) is packed in an unknown way",
        f"quant_method is {shown(method)}; known are {_KNOWN}",
    )
