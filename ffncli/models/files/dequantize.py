"""Stored tensors as rows of plain floats: FP8 with scales, MXFP4, GGUF's formats; other formats are refused by name.

A tensor is identified by its logical name, the name it would have unpacked: `X.weight` for FP8 values and their scales,
`X` for MXFP4's `X_blocks` and `X_scales`. Nothing is read before its rows are requested. Values are computed in
float32, as the formats define them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from math import ldexp, nan, prod
from typing import TYPE_CHECKING, Any

from ffncli.errors import ExitCode, FFNError, shown, shown_path
from ffncli.models.files.bytes import OpenFiles
from ffncli.models.files.checkpoint import PLAIN, ByteLocation, Checkpoint
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.packing import scale_name
from ffncli.models.files.quantized import Logical, logical

if TYPE_CHECKING:
    from torch import Tensor

_PLAIN = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_INTEGERS = {"I64": "int64", "I32": "int32", "I16": "int16"}
_FLOAT8 = {
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # OCP MX, E2M1
_HINT = "ffn params counts it; to trace it, save it dequantized, or give an FP8, MXFP4 or GGUF version"


Decode = Callable[[OpenFiles, int, int], "Tensor"]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that can be read: its logical shape, and `decode`, which returns the values of some of its rows.

    Rows are those of the whole tensor, [..., columns] seen as one matrix. `decode(files, start, stop)` returns plain
    floats [stop - start, columns], valid until the next read; all rows must be of one matrix of the last two axes.
    """

    place: ByteLocation
    shape: tuple[int, ...]
    decode: Decode = field(repr=False)


def stored(checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None = None) -> StoredTensor:
    """The tensor of a logical name; `quantization` is the config's quantization_config.

    Raises FFNError for a tensor that is missing, is packed in an unsupported way, lacks its scales, or has pieces that
    do not fit each other; and (exit 3) for a format that this torch or gguf library does not have.
    """
    if name in checkpoint.files:
        info = checkpoint.info(name)
        if info.dtype in PLAIN:
            return _plain(checkpoint.place(name), info.shape)
        if checkpoint.gguf:
            return _gguf(checkpoint.place(name))
    means, tensors = _packed(checkpoint, name, quantization)
    if means.format.startswith("fp8") and means.shape is not None:
        return _float8(checkpoint, means, tensors, quantization)
    if means.format == "mxfp4" and means.shape is not None:
        return _mxfp4(checkpoint, means, tensors)
    raise _refused(checkpoint, means.anchor, f"is packed as {means.format}, which is not supported here")


def shaped(tensor: StoredTensor, shape: tuple[int, ...]) -> StoredTensor:
    """The same tensor with its axes of size one elsewhere; packed rows do not change."""
    if tensor.place.info.dtype in PLAIN:
        return _plain(tensor.place, shape)
    return replace(tensor, shape=shape)


def _packed(
    checkpoint: Checkpoint, name: str, quantization: Mapping[str, Any] | None
) -> tuple[Logical, dict[str, TensorInfo]]:
    """The logical tensor of a packed one, and the stored tensors that it may consist of."""
    tensors = {piece: checkpoint.info(piece) for piece in _possible_pieces(checkpoint, name)}
    means = logical(tensors, quantization, checkpoint.where).get(name)
    if means is None:
        raise FFNError(f"{checkpoint.where}: tensor {shown(name, 120)} is missing")
    if means.format in _FLOAT8:
        what = f"{shown_path(checkpoint.path(name))}: tensor {shown(f'{name}_scale_inv', 120)} is missing"
        raise FFNError(what, f"{shown(name, 120)} is {means.format} and cannot be read without its scales")
    if means.anchor == name and means.format == tensors[name].dtype:
        raise _refused(checkpoint, name, f"is stored as {means.format}, and nothing describes how to read its values")
    return means, tensors


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


def _dtype(place: ByteLocation, name: str) -> Any:
    """torch's dtype of that name; FFNError if this torch has none."""
    import torch

    dtype = getattr(torch, name, None)
    if dtype is None:
        what = (
            f"{shown_path(place.path)} holds {place.info.dtype} values, which torch {torch.__version__} does not have"
        )
        raise FFNError(what, "a newer torch may: pip install -U torch", ExitCode.ENVIRONMENT)
    return dtype


def _rows(place: ByteLocation, shape: tuple[int, ...]) -> Decode:
    """A reader of raw rows: uint8 [stop - start, bytes of a row], where the tensor's bytes are the rows of `shape`."""
    total = prod(shape[:-1])
    width = place.info.bytes // total if total else 0

    def read(files: OpenFiles, start: int, stop: int) -> Tensor:
        raw = files.read(place.path, place.start + start * width, (stop - start) * width)
        return raw.view(stop - start, width)

    return read


def _plain(place: ByteLocation, shape: tuple[int, ...]) -> StoredTensor:
    """Values of a float dtype that torch computes with."""
    dtype, read = _dtype(place, _PLAIN[place.info.dtype]), _rows(place, shape)
    return StoredTensor(place, shape, lambda files, start, stop: read(files, start, stop).view(dtype))


def integers(checkpoint: Checkpoint, name: str) -> Tensor:
    """A whole tensor of integers, as int64. Raises FFNError for one of another dtype."""
    import torch

    place = checkpoint.place(name)
    if place.info.dtype not in _INTEGERS:
        raise FFNError(f"{shown_path(place.path)}: tensor {shown(name, 120)} is {place.info.dtype}, expected integers")
    with OpenFiles() as files:
        raw = files.read(place.path, place.start, place.info.bytes)
        return raw.view(_dtype(place, _INTEGERS[place.info.dtype])).reshape(place.info.shape).to(torch.int64, copy=True)


# --- FP8 --------------------------------------------------------------------------------------------------------------


def _float8(
    checkpoint: Checkpoint, means: Logical, tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None
) -> StoredTensor:
    """value × scale; one scale per tensor, row or block. `logical` has checked that the shapes fit.

    DeepSeek-V3 calls the factor weight_scale_inv, compressed-tensors weight_scale.
    """
    place, name = checkpoint.place(means.anchor), scale_name(means.anchor, tensors)
    assert name is not None
    shape = place.info.shape
    scale = _Scale(checkpoint.place(name), name, shape, (quantization or {}).get("weight_block_size"))
    dtype, read = _dtype(place, _FLOAT8[place.info.dtype]), _rows(place, shape)

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        factor = scale.of(files, start, stop)  # first: it may be read too
        return read(files, start, stop).view(dtype).float().mul_(factor)

    return StoredTensor(place, shape, decode)


class _Scale:
    """The scales of a tensor: `blocks` says how many rows and columns share one."""

    def __init__(self, place: ByteLocation, name: str, shape: tuple[int, ...], stated: Any) -> None:
        self.place, self.name, self.columns = place, name, (1, *shape)[-1]
        counts = (*place.info.shape, *(1,) * (len(shape) - len(place.info.shape)))
        sizes, self.counts = (1, 1, *shape)[-2:], (1, 1, *counts)[-2:]
        self.height = sizes[0]
        self.lead = prod(counts[:-2])
        if self.lead not in (1, prod(shape[:-2])):
            raise self._wrong("are not one set for each matrix")
        ways = [tuple(stated)] if _block_of_two(stated) else []
        ways += [(128, 128), tuple(size / count for size, count in zip(sizes, self.counts, strict=True))]
        fits = (way for way in ways if way == tuple(map(int, way)) and self.counts == _counts(sizes, way))
        self.blocks = next(fits, None)
        if self.blocks is None:
            raise self._wrong(f"do not divide {list(sizes)} into equal blocks, and there is no weight_block_size")
        self._values: Tensor | None = None

    def _wrong(self, what: str) -> FFNError:
        label = f"{shown_path(self.place.path)}: tensor {shown(self.name, 120)}"
        return FFNError(f"{label}: scales of shape {list(self.place.info.shape)} {what}")

    def of(self, files: OpenFiles, start: int, stop: int) -> Tensor:
        """The factors of some rows: float32 [stop - start, columns], or [stop - start, 1] if a row shares one."""
        import torch

        if self._values is None:
            self._values = _factors(files, self.place, self.name).view(self.lead, *self.counts)
        assert self.blocks is not None
        rows, columns = map(int, self.blocks)
        matrix, first = divmod(start, self.height)
        inside = torch.arange(first, first + stop - start)
        chosen = self._values[matrix if self.lead > 1 else 0][inside // rows]
        return chosen if chosen.shape[1] == 1 else chosen.repeat_interleave(columns, 1)[:, : self.columns]


def _block_of_two(stated: Any) -> bool:
    """Whether a config's weight_block_size is [rows, columns]; anything else is ignored."""
    return isinstance(stated, list) and len(stated) == 2 and all(type(n) is int and n > 0 for n in stated)


def _counts(sizes: tuple[int, ...], blocks: tuple[float, ...]) -> tuple[int, ...]:
    return tuple(-(-size // int(block)) for size, block in zip(sizes, blocks, strict=True))


def _factors(files: OpenFiles, place: ByteLocation, name: str) -> Tensor:
    """All scales of a tensor as float32, flat. E8M0 is an exponent alone, with 255 for NaN."""
    raw = files.read(place.path, place.start, place.info.bytes)
    if place.info.dtype in ("F8_E8M0", "U8"):
        return _powers()[raw.long()]
    if place.info.dtype not in _PLAIN:
        what = f"{shown_path(place.path)}: tensor {shown(name, 120)} holds scales as {place.info.dtype}"
        raise FFNError(what, "plain floats and E8M0 are read")
    return raw.view(_dtype(place, _PLAIN[place.info.dtype])).float().clone()


@cache
def _powers() -> Tensor:
    """E8M0: byte b is 2^(b - 127), and 255 is NaN (OCP Microscaling Formats 1.0, 5.4.1). Exact in float32."""
    import torch

    return torch.tensor([ldexp(1.0, byte - 127) for byte in range(255)] + [nan], dtype=torch.float32)


# --- MXFP4 ------------------------------------------------------------------------------------------------------------


def _mxfp4(checkpoint: Checkpoint, means: Logical, tensors: Mapping[str, TensorInfo]) -> StoredTensor:
    """Two E2M1 values a byte, the low one first, a power of two per 32 of a row (OCP Microscaling Formats 1.0).

    gpt-oss's `X_blocks` [experts, out, in / 32, 16] are [experts, out, in]; its bfloat16 checkpoints, and the blocks as
    transformers unpacks them, are the transpose.
    """
    place = checkpoint.place(means.anchor)
    name = (
        means.anchor[:-6] + "scales"
        if means.anchor.endswith("blocks")
        else scale_name(means.anchor.removesuffix("_packed"), tensors)
    )
    assert name is not None
    assert means.shape is not None
    scales, shape = checkpoint.place(name), means.shape
    if scales.info.dtype not in ("F8_E8M0", "U8"):
        what = f"{shown_path(scales.path)}: tensor {shown(name, 120)} holds scales as {scales.info.dtype}"
        raise FFNError(what, "MXFP4 scales are bytes")
    read, read_scales = _rows(place, shape), _rows(scales, shape)

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        powers = _powers()[read_scales(files, start, stop).long()]
        pairs = _pairs()[read(files, start, stop).long()]
        return pairs.view(stop - start, -1, 32).mul_(powers.unsqueeze(-1)).view(stop - start, -1)

    return StoredTensor(place, shape, decode)


@cache
def _pairs() -> Tensor:
    """Byte → its two values, [256, 2]."""
    import torch

    return torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], dtype=torch.float32)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def _gguf(place: ByteLocation) -> StoredTensor:
    """A row's blocks, decoded by the gguf library."""
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    kind, read, shape = GGMLQuantizationType[place.info.dtype], _rows(place, place.info.shape), place.info.shape

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        import numpy
        import torch

        try:
            with numpy.errstate(all="ignore"):  # values that are not finite are counted later
                return torch.from_numpy(dequantize(read(files, start, stop).numpy(), kind))
        except NotImplementedError:
            what = f"{shown_path(place.path)}: the gguf library does not unpack {kind.name}"
            raise FFNError(what, "a newer one may: pip install -U gguf", ExitCode.ENVIRONMENT) from None

    return StoredTensor(place, shape, decode)
