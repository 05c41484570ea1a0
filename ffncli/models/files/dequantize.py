"""Stored tensors as rows of plain floats: what packs each format's matrices; other formats are refused by name.

A tensor is identified by its logical name, the name it would have unpacked: `X.weight` for FP8 values and their scales,
`X` for MXFP4's `X_blocks` and `X_scales`. Nothing is read before its rows are requested. Values are computed in
float32, as the formats define them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.bytes import OpenFiles
from ffncli.models.files.checkpoint import PLAIN, ByteLocation, Checkpoint
from ffncli.models.files.fields import Fields
from ffncli.models.files.integers import awq, compressed, gptq
from ffncli.models.files.packing import gguf_scale
from ffncli.models.files.quantized import logical
from ffncli.models.files.rows import FLOAT8, Packed, StoredTensor, numbers, rows_of, torch_dtype
from ffncli.models.files.scaled import in_place
from ffncli.models.files.small_floats import mxfp4, mxfp6, nvfp4

if TYPE_CHECKING:
    from torch import Tensor

_INTEGERS = {"I64": "int64", "I32": "int32", "I16": "int16"}
_HINT = "ffn params counts it; to trace it, save it dequantized, or give an FP8, FP4, GPTQ, AWQ or GGUF version"
_READERS: Mapping[str, Callable[[Packed], StoredTensor]] = {  # by the first word of the format's name
    "fp8": in_place, "mxfp8": in_place, "mxfp4": mxfp4, "mxfp6": mxfp6, "nvfp4": nvfp4, "gptq": gptq, "awq": awq,
    "compressed": lambda packed: compressed(packed) if packed.means.bits else in_place(packed),
}  # fmt: skip
# What changes the inputs of a packed matrix, by the ending of its name in the module or next to it.
_OF_INPUTS = (".pre_quant_scale", "._act_pre_scale")
_OF_ACTIVATIONS = ("act.scales", "gelu_impl.scales")


def stored(checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None = None) -> StoredTensor:
    """The tensor of a logical name; `quantization` is the config's quantization_config.

    Raises FFNError for a tensor that is missing, is packed in an unsupported way, lacks its scales, or has pieces that
    do not fit each other; and (exit 3) for a format that this torch or gguf library does not have.
    """
    if name in checkpoint.files:
        info, scaled = checkpoint.info(name), checkpoint.gguf and gguf_scale(name, checkpoint.files) is not None
        if info.dtype in PLAIN and not scaled:
            return _plain(checkpoint.place(name), info.shape)
        if checkpoint.gguf:
            return _gguf(checkpoint, name)
    packed = _packed(checkpoint, name, quantization)
    read = _READERS.get(packed.means.format.partition("-")[0])
    if read is None or packed.means.shape is None:
        raise _refused(
            checkpoint, packed.means.anchor, f"is packed as {packed.means.format}, which is not supported here"
        )
    _check_inputs(packed, name)
    return read(packed)


def shaped(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """The same tensor with its axes of size one elsewhere; packed rows do not change."""
    if tensor.place.info.dtype in PLAIN and tensor.shape[-1:] != shape[-1:]:
        return _plain(tensor.place, shape)
    return replace(tensor, shape=shape)


def _packed(checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None) -> Packed:
    """The packed tensor of that logical name. FFNError if its dtype alone does not say what its values are."""
    tensors = {piece: checkpoint.info(piece) for piece in _possible_pieces(checkpoint, name)}
    means = logical(tensors, quantization, checkpoint.where).get(name)
    if means is None:
        raise FFNError(f"{checkpoint.where}: tensor {shown(name, 120)} is missing")
    if means.format in FLOAT8:
        what = f"{shown_path(checkpoint.path(name))}: tensor {shown(f'{name}_scale_inv', 120)} is missing"
        raise FFNError(what, f"{shown(name, 120)} is {means.format} and cannot be read without its scales")
    if means.anchor == name and means.format == tensors[name].dtype:
        raise _refused(checkpoint, name, f"is stored as {means.format}, and nothing describes how to read its values")
    return Packed(checkpoint, means, tensors, Fields(quantization or {}, checkpoint.where))


def _check_inputs(packed: Packed, name: str) -> None:
    """FFNError if the quantizer changes the inputs too: the unpacked weights alone would compute something else."""
    checkpoint, module = packed.checkpoint, name.removesuffix(".weight")
    around = module.rpartition(".")[0]
    names = (*(module + ending for ending in _OF_INPUTS), *(f"{around}.{ending}" for ending in _OF_ACTIVATIONS))
    if factor := next((name for name in names if name in checkpoint.files), None):
        raise _refused(checkpoint, factor, f"scales inputs of {shown(name, 120)}, which is not supported here")
    if packed.config.values.get("transform_config"):
        raise _refused(checkpoint, packed.means.anchor, "is rotated by quantization_config's transform_config")


def _possible_pieces(checkpoint: Checkpoint, name: str) -> list[str]:
    """The tensors that may be pieces of `name`: those of its module, and those whose names extend it."""
    stem = name.removesuffix(".weight")
    names = checkpoint.sorted_names
    at, pieces = bisect_left(names, stem), []
    while at < len(names) and names[at].startswith(stem):
        if names[at][len(stem) : len(stem) + 1] in ("", ".", "_"):
            pieces.append(names[at])
        at += 1
    return pieces


def _refused(checkpoint: Checkpoint, name: str, why: str) -> FFNError:
    return FFNError(f"{shown_path(checkpoint.path(name))}: tensor {shown(name, 120)} {why}", _HINT)


# --- plain values -----------------------------------------------------------------------------------------------------


def _plain(place: ByteLocation, shape: tuple[int, ...]) -> StoredTensor:
    """Values of a float dtype that torch computes with."""
    dtype, read = torch_dtype(place, PLAIN[place.info.dtype]), rows_of(place, shape)
    return StoredTensor(place, shape, lambda files, start, stop: read(files, start, stop).view(dtype))


def integers(checkpoint: Checkpoint, name: str) -> Tensor:
    """A whole tensor of integers, as int64. Raises FFNError for one of another dtype."""
    import torch

    place = checkpoint.place(name)
    if place.info.dtype not in _INTEGERS:
        raise FFNError(f"{shown_path(place.path)}: tensor {shown(name, 120)} is {place.info.dtype}, expected integers")
    with OpenFiles() as files:
        raw = files.read(place.path, place.start, place.info.bytes)
        plain = raw.view(torch_dtype(place, _INTEGERS[place.info.dtype]))
        return plain.reshape(place.info.shape).to(torch.int64, copy=True)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _gguf(checkpoint: Checkpoint, name: str) -> StoredTensor:
    """A row's blocks, decoded by the gguf library, times the scale that llama.cpp multiplies the product by."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    place = checkpoint.place(name)
    kind, read, shape = GGMLQuantizationType[place.info.dtype], rows_of(place, place.info.shape), place.info.shape
    scale = _gguf_scale(checkpoint, name, prod(shape[:-2]))

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        import numpy
        import torch

        factor = scale(files, start // shape[-2] if len(shape) > 1 else 0)
        try:
            with numpy.errstate(all="ignore"):  # values that are not finite are counted later
                values = torch.from_numpy(dequantize(read(files, start, stop).numpy(), kind))
        except NotImplementedError:
            what = f"{shown_path(place.path)}: the gguf library does not unpack {kind.name}"
            raise FFNError(what, "a newer one may: pip install -U gguf", ExitCode.ENVIRONMENT) from None
        return values if factor is None else values * factor

    return StoredTensor(place, shape, decode)


def _gguf_scale(checkpoint: Checkpoint, name: str, matrices: int) -> Callable[[OpenFiles, int], Tensor | None]:
    """A matrix → its scale, one float or one for each expert (NVFP4, BitNet); None without."""
    scale = gguf_scale(name, checkpoint.files)
    if scale is None:
        return lambda files, matrix: None
    place = checkpoint.place(scale)
    if place.info.dtype not in PLAIN or prod(place.info.shape) not in (1, matrices):
        what = f"{shown_path(place.path)}: tensor {shown(scale, 120)} is {place.info.dtype} {list(place.info.shape)}"
        raise FFNError(what, f"one float, or one for each of the {matrices} matrices of {shown(name, 120)}, is read")

    def read(files: OpenFiles, matrix: int) -> Tensor:
        factors = numbers(files.read(place.path, place.start, place.info.bytes), place, scale)
        return factors[matrix if len(factors) > 1 else 0]

    return read
