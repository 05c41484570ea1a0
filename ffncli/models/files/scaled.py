"""Values of 8 bits in place under scales: FP8, MXFP8 and int8, as rows of float32."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ffncli.models.files.bytes import OpenFiles
from ffncli.models.files.packing import scale_name
from ffncli.models.files.rows import FLOAT8, Packed, ScaleGrid, StoredTensor, rows_of, torch_dtype

if TYPE_CHECKING:
    from torch import Tensor


def in_place(packed: Packed) -> StoredTensor:
    """(value - zero) × scale; one scale per tensor, row or block. `logical` has checked that the shapes fit.

    DeepSeek-V3 calls the factor weight_scale_inv, compressed-tensors weight_scale, which alone has zeros: int8, in the
    shape of the scales.
    """
    anchor = packed.means.anchor
    place, name = packed.place(anchor), scale_name(anchor, packed.tensors)
    assert name is not None  # the format was recognised by them
    shape, stated = place.info.shape, packed.config.values.get("weight_block_size")
    scale = ScaleGrid(packed.place(name), name, shape, stated)
    zero = _zeros(packed, name, shape, stated)
    dtype = torch_dtype(place, FLOAT8.get(place.info.dtype, "int8"))
    read = rows_of(place, shape)

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        factors = scale.of(files, start, stop)  # first: it is read into the same buffer
        zeros = None if zero is None else zero.spread(zero.of(files, start, stop), scale.columns)
        values = read(files, start, stop).view(dtype).float()
        return scale.times(values if zeros is None else values.sub_(zeros), factors)

    return StoredTensor(place, shape, decode)


def _zeros(packed: Packed, scales: str, shape: tuple[int, ...], stated: Any) -> ScaleGrid | None:
    """The zeros of an asymmetric quantizer, None if there are none."""
    name = packed.means.anchor + "_zero_point"
    if name not in packed.tensors:
        return None
    place, like = packed.place(name), packed.tensors[scales]
    if place.info.dtype != "I8" or place.info.shape != like.shape:
        kind = f"is {place.info.dtype} {list(place.info.shape)}"
        raise packed.wrong(name, f"{kind}; zeros are I8 in the shape of the scales, {list(like.shape)}")
    return ScaleGrid(place, name, shape, stated)
