"""Read stored tensors as rows of plain floats; errors name formats that are not supported.

A tensor is identified by its logical name, which is its name when unpacked: `X.weight` for FP8 values and their scales,
`X` for MXFP4's `X_blocks` and `X_scales`. No rows are read before they are requested. Values are computed in float32,
as the formats define them: 8-bit values with scales, one value per byte (FP8, MXFP8, int8), and packed floats of 4 and
6 bits with scales (MXFP4 and MXFP6 of OCP Microscaling Formats 1.0, NVFP4). Packed integers are in `integers.py`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any

from ffncli.block.formats import float_values
from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.checkpoint import PLAIN, ByteLocation, Checkpoint
from ffncli.models.files.integers import awq, compressed, gptq
from ffncli.models.files.packing import gguf_scale, logical, scale_name
from ffncli.models.files.rows import (
    FLOAT8,
    POWERS,
    OpenFiles,
    Packed,
    ScaleGrid,
    StoredTensor,
    numbers,
    rows_of,
    torch_dtype,
)
from ffncli.models.files.strict_json import Fields

if TYPE_CHECKING:
    from torch import Tensor


_INTEGERS = {"I64": "int64", "I32": "int32", "I16": "int16"}
_HINT = "ffn params counts it; to trace it, save it dequantized, or give an FP8, FP4, GPTQ, AWQ or GGUF version"


def in_place(packed: Packed) -> StoredTensor:
    """Read (value - zero) × scale, with one scale per tensor, row or block. `logical` has checked that the shapes
    match.

    The scales are called weight_scale_inv by DeepSeek-V3 and weight_scale by compressed-tensors. Only
    compressed-tensors has zeros: int8, in the shape of the scales.
    """
    anchor = packed.means.anchor
    place, name = packed.place(anchor), scale_name(anchor, packed.tensors)
    assert name is not None  # this format is recognised by its scales
    shape, stated = place.info.shape, packed.config.values.get("weight_block_size")
    scale = ScaleGrid(packed.place(name), name, shape, stated)
    zero = _zeros(packed, name, shape, stated)
    dtype = torch_dtype(place, FLOAT8.get(place.info.dtype, "int8"))
    read = rows_of(place, shape)

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        factors = scale.of(files, start, stop)  # read before the values, since both are read into the same buffer
        zeros = None if zero is None else zero.spread(zero.of(files, start, stop), scale.columns)
        values = read(files, start, stop).view(dtype).float()
        return scale.times(values if zeros is None else values.sub_(zeros), factors)

    return StoredTensor(place, shape, decode)


def mxfp4(packed: Packed) -> StoredTensor:
    """Read two E2M1 values per byte, the low half first, and a power of two for every 32 values of a row.

    gpt-oss's `X_blocks` [experts, out, in / 32, 16] are unpacked to [experts, out, in]. Its bfloat16 checkpoints, and
    blocks unpacked by transformers, are transposed.
    """
    return _small(packed, _fp4, 32, POWERS)


def mxfp6(packed: Packed) -> StoredTensor:
    """Read four E2M3 values in three bytes, lowest bits first, and a power of two per 32 values of a row."""
    return _small(packed, _fp6, 32, POWERS)


def nvfp4(packed: Packed) -> StoredTensor:
    """Read two E2M1 values per byte, an E4M3 scale for every 16 values of a row, and one float for the tensor or for
    each expert.

    ModelOpt's `weight_scale_2` multiplies the scales; compressed-tensors' `weight_global_scale` divides them.
    """
    base = packed.base
    name = packed.first(base + "_scale_2", base + "_weight_scale_2", base + "_global_scale") or base + "_scale_2"
    place, matrices = packed.place(name), prod(packed.shape[:-2])
    if place.info.dtype not in PLAIN or prod(place.info.shape) not in (1, matrices):
        kind = f"is {place.info.dtype} {shown(list(place.info.shape))}"
        raise packed.wrong(name, f"{kind}; NVFP4 requires one float for the tensor or one per matrix")

    def combine(files: OpenFiles, scales: Tensor, matrix: int) -> Tensor:
        whole = numbers(files.read(place.path, place.start, place.info.bytes), place, name)
        one = whole[matrix if len(whole) > 1 else 0]
        # rounded to float32 before the multiplication with values, as in both libraries
        return scales / one if name.endswith("_global_scale") else scales * one

    return _small(packed, _fp4, 16, ("F8_E4M3",), combine)


_READERS: Mapping[str, Callable[[Packed], StoredTensor]] = {  # keyed by the first word of the format's name
    "fp8": in_place, "mxfp8": in_place, "mxfp4": mxfp4, "mxfp6": mxfp6, "nvfp4": nvfp4, "gptq": gptq, "awq": awq,
    "compressed": lambda packed: compressed(packed) if packed.means.bits else in_place(packed),
}  # fmt: skip
# Endings of tensors, in the module or next to it, that scale the inputs of a packed matrix.
_OF_INPUTS = (".pre_quant_scale", "._act_pre_scale")
_OF_ACTIVATIONS = ("act.scales", "gelu_impl.scales")


def stored(checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None = None) -> StoredTensor:
    """Return the stored tensor with this logical name; `quantization` is the config's quantization_config.

    Raises FFNError with exit code 2 if a tensor is missing, is packed in an unsupported way, lacks its scales, or has
    pieces that do not fit together; with exit code 3 if this torch or gguf library does not support a format.
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
    """Return the tensor with a `shape` that differs only in axes of size one; packed rows do not change."""
    if tensor.place.info.dtype in PLAIN and tensor.shape[-1:] != shape[-1:]:
        return _plain(tensor.place, shape)
    return replace(tensor, shape=shape)


def _packed(checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None) -> Packed:
    """Return the packed tensor with this logical name. A dtype alone may not determine the meaning of its values."""
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
    """Raise FFNError if the quantizer also changes the inputs, since the weights alone would then give different
    results."""
    checkpoint, module = packed.checkpoint, name.removesuffix(".weight")
    around = module.rpartition(".")[0]
    names = (*(module + ending for ending in _OF_INPUTS), *(f"{around}.{ending}" for ending in _OF_ACTIVATIONS))
    if factor := next((name for name in names if name in checkpoint.files), None):
        raise _refused(checkpoint, factor, f"scales inputs of {shown(name, 120)}, which is not supported here")
    if packed.config.values.get("transform_config"):
        raise _refused(checkpoint, packed.means.anchor, "is rotated by quantization_config's transform_config")


def _possible_pieces(checkpoint: Checkpoint, name: str) -> list[str]:
    """List the tensors that may be pieces of `name`: tensors in its module, and tensors whose names extend it."""
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
    """Read a float dtype in which torch can compute."""
    dtype, read = torch_dtype(place, PLAIN[place.info.dtype]), rows_of(place, shape)
    return StoredTensor(place, shape, lambda files, start, stop: read(files, start, stop).view(dtype))


def integers(checkpoint: Checkpoint, name: str) -> Tensor:
    """Read a whole tensor of integers as int64."""
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
    """Decode a row's blocks with the gguf library, and apply the scale that llama.cpp applies after the matmul."""
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
            with numpy.errstate(all="ignore"):  # non-finite values are counted later
                values = torch.from_numpy(dequantize(read(files, start, stop).numpy(), kind))
        except NotImplementedError:
            what = f"{shown_path(place.path)}: the gguf library does not unpack {kind.name}"
            raise FFNError(what, "a newer version may: pip install -U gguf", ExitCode.ENVIRONMENT) from None
        return values if factor is None else values * factor

    return StoredTensor(place, shape, decode)


def _gguf_scale(checkpoint: Checkpoint, name: str, matrices: int) -> Callable[[OpenFiles, int], Tensor | None]:
    """Return a function from a matrix's index to its scale (NVFP4, BitNet); all matrices may share one scale. If the
    file has no scales, the function returns None."""
    scale = gguf_scale(name, checkpoint.files)
    if scale is None:
        return lambda files, matrix: None
    place = checkpoint.place(scale)
    if place.info.dtype not in PLAIN or prod(place.info.shape) not in (1, matrices):
        what = f"{shown_path(place.path)}: tensor {shown(scale, 120)} is {place.info.dtype} {list(place.info.shape)}"
        raise FFNError(what, f"expected one float, or one for each of the {matrices} matrices of {shown(name, 120)}")

    def read(files: OpenFiles, matrix: int) -> Tensor:
        factors = numbers(files.read(place.path, place.start, place.info.bytes), place, scale)
        return factors[matrix if len(factors) > 1 else 0]

    return read


def _zeros(packed: Packed, scales: str, shape: tuple[int, ...], stated: Any) -> ScaleGrid | None:
    """Return the zeros of an asymmetric quantizer; None if there are no zeros."""
    name = packed.means.anchor + "_zero_point"
    if name not in packed.tensors:
        return None
    place, like = packed.place(name), packed.tensors[scales]
    if place.info.dtype != "I8" or place.info.shape != like.shape:
        kind = f"is {place.info.dtype} {list(place.info.shape)}"
        raise packed.wrong(name, f"{kind}; zeros are I8 in the shape of the scales, {list(like.shape)}")
    return ScaleGrid(place, name, shape, stated)


_FP4, _FP6 = float_values(2, 1), float_values(2, 3)  # E2M1, E2M3
_Combine = Callable[[OpenFiles, "Tensor", int], "Tensor"]  # (files, scales of rows, their matrix) → factors


def _small(
    packed: Packed, unpack: Callable[[Tensor], Tensor], size: int, dtypes: tuple[str, ...],
    combine: _Combine = lambda files, scales, matrix: scales,
) -> StoredTensor:  # fmt: skip
    """Read values with a scale for every `size` adjacent values of a row, or of a column if transposed."""
    place, shape, name = packed.place(packed.means.anchor), packed.shape, _scales(packed)
    scales = packed.place(name)
    if scales.info.dtype not in dtypes:
        form = packed.means.format.upper()
        raise packed.wrong(
            name, f"has scales of type {scales.info.dtype}", f"{form} stores them as {' or '.join(dtypes)}"
        )
    upright = place.info.shape[-1] == shape[-1]
    grid = ScaleGrid(scales, name, shape, [size, 1] if upright else [1, size])
    read, height = rows_of(place, place.info.shape if upright else shape), shape[-2]

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        matrix, first = divmod(start, height)
        factors = combine(files, grid.of(files, start, stop), matrix)
        if not upright:
            return grid.times(unpack(read(files, start, stop)), factors)
        pairs, skipped = matrix * height // 2, first % 2
        raw = read(files, pairs + first // 2, pairs + (first + stop - start + 1) // 2)
        values = _pairs()[raw.long()].transpose(1, 2).reshape(-1, raw.shape[1])
        return values[skipped : skipped + stop - start].mul_(factors)

    return StoredTensor(place, shape, decode)


def _scales(packed: Packed) -> str:
    """Return the name of the tensor with the scales."""
    anchor = packed.means.anchor
    name = anchor[:-6] + "scales" if anchor.endswith("blocks") else scale_name(packed.base, packed.tensors)
    assert name is not None  # this format is recognised by its scales
    return name


def _fp4(raw: Tensor) -> Tensor:
    return _pairs()[raw.long()].view(len(raw), -1)


def _fp6(raw: Tensor) -> Tensor:
    import torch

    words = (raw.view(len(raw), -1, 3).int() << torch.tensor([0, 8, 16], dtype=torch.int32)).sum(-1)
    codes = (words.unsqueeze(-1) >> torch.tensor([0, 6, 12, 18])) & 63
    return _sixes()[codes].view(len(raw), -1)


@cache
def _pairs() -> Tensor:
    """Return a table of the two values in each byte, [256, 2]."""
    import torch

    return torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], dtype=torch.float32)


@cache
def _sixes() -> Tensor:
    """Return a table of the value of each code, [64]; the highest bit is the sign."""
    import torch

    return torch.tensor(_FP6, dtype=torch.float32)
