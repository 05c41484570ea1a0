"""Floats of 4 and 6 bits under scales: MXFP4, MXFP6 (OCP Microscaling Formats 1.0) and NVFP4, as rows of float32."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from typing import TYPE_CHECKING

from ffncli.errors import shown
from ffncli.models.files.bytes import OpenFiles
from ffncli.models.files.checkpoint import PLAIN
from ffncli.models.files.packing import scale_name
from ffncli.models.files.rows import POWERS, Packed, ScaleGrid, StoredTensor, numbers, rows_of

if TYPE_CHECKING:
    from torch import Tensor

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # E2M1
_FP6 = [m / 8 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(3) for m in range(8)]  # E2M3, its positive half

_Combine = Callable[[OpenFiles, "Tensor", int], "Tensor"]  # (scales of some rows, their matrix) → what multiplies them


def mxfp4(packed: Packed) -> StoredTensor:
    """Two E2M1 values a byte, the low one first, a power of two per 32 of a row.

    gpt-oss's `X_blocks` [experts, out, in / 32, 16] are [experts, out, in]; its bfloat16 checkpoints, and the blocks as
    transformers unpacks them, are the transpose.
    """
    return _small(packed, _fp4, 32, POWERS)


def mxfp6(packed: Packed) -> StoredTensor:
    """Four E2M3 values in three bytes, the first in the lowest bits, a power of two per 32 of a row."""
    return _small(packed, _fp6, 32, POWERS)


def nvfp4(packed: Packed) -> StoredTensor:
    """Two E2M1 values a byte, an E4M3 scale for 16 of a row, and a float for the tensor or for each expert.

    ModelOpt's `weight_scale_2` multiplies the scales, compressed-tensors' `weight_global_scale` divides them; as there,
    the result is rounded to float32 before it multiplies a value.
    """
    base = packed.base
    name = packed.first(base + "_scale_2", base + "_weight_scale_2", base + "_global_scale") or base + "_scale_2"
    place, matrices = packed.place(name), prod(packed.shape[:-2])
    if place.info.dtype not in PLAIN or prod(place.info.shape) not in (1, matrices):
        kind = f"is {place.info.dtype} {shown(list(place.info.shape))}"
        raise packed.wrong(name, f"{kind}; NVFP4 has one float for the tensor, or one for each of its matrices")

    def combine(files: OpenFiles, scales: Tensor, matrix: int) -> Tensor:
        whole = numbers(files.read(place.path, place.start, place.info.bytes), place, name)
        one = whole[matrix if len(whole) > 1 else 0]
        return scales / one if name.endswith("_global_scale") else scales * one

    return _small(packed, _fp4, 16, ("F8_E4M3",), combine)


def _small(
    packed: Packed, unpack: Callable[[Tensor], Tensor], size: int, dtypes: tuple[str, ...],
    combine: _Combine = lambda files, scales, matrix: scales,
) -> StoredTensor:  # fmt: skip
    """Values under a scale for `size` adjacent ones, along rows, or along columns where the matrix is transposed."""
    place, shape, name = packed.place(packed.means.anchor), packed.shape, _scales(packed)
    scales = packed.place(name)
    if scales.info.dtype not in dtypes:
        form = packed.means.format.upper()
        raise packed.wrong(name, f"holds scales as {scales.info.dtype}", f"{form} has them as {' or '.join(dtypes)}")
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
    """The name of the scales."""
    anchor = packed.means.anchor
    name = anchor[:-6] + "scales" if anchor.endswith("blocks") else scale_name(packed.base, packed.tensors)
    assert name is not None  # the format was recognised by them
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
    """Byte → its two values, [256, 2]."""
    import torch

    return torch.tensor([(_FP4[byte & 15], _FP4[byte >> 4]) for byte in range(256)], dtype=torch.float32)


@cache
def _sixes() -> Tensor:
    """Code → its value, [64]; the sixth bit is the sign."""
    import torch

    return torch.tensor([*_FP6, *(-value for value in _FP6)], dtype=torch.float32)
