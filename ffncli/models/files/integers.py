"""Unpack integers of 2 to 8 bits in int32 words with scales (GPTQ, AWQ, compressed-tensors) to rows of float32.

A value is (integer - zero) × scale; the inputs of a group share a zero and a scale.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, TypeAlias

from ffncli.errors import shown
from ffncli.models.files.checkpoint import PLAIN, ByteLocation
from ffncli.models.files.rows import OpenFiles, Packed, ScaleGrid, StoredTensor, columns_of, numbers, rows_of

if TYPE_CHECKING:
    from torch import Tensor

_AWQ_ORDER = {4: (0, 4, 1, 5, 2, 6, 3, 7), 8: (0, 2, 1, 3)}  # column of a word → the integer's position in the word
_LESS_ONE = ("gptq", "auto_round:auto_gptq", "auto_round:gptq")  # formats that store zero - 1

# (files, matrix, start, stop) → the zeros of these rows of a matrix [out, in], as [stop - start, groups]; an int if all
# are equal.
_Zeros: TypeAlias = "Callable[[OpenFiles, int, int, int], Tensor | int]"
_Group: TypeAlias = "Callable[[OpenFiles, int], Tensor | int]"  # a matrix → each input's group, or the group size


def unpacked(words: Tensor, bits: int, count: int) -> Tensor:
    """Unpack `count` integers of int32 words [n, words] to [n, count], starting at the lowest bits."""
    import torch

    mask = (1 << bits) - 1
    # integers are packed densely and may cross word boundaries; in older files of compressed-tensors, none crosses a
    # boundary (3 bits: ten integers per word), so there are more words than dense packing needs
    if 32 % bits == 0 or words.shape[1] > -(-count * bits // 32):
        shifts = torch.arange(0, 32 - bits + 1, bits, dtype=torch.int32)
        return ((words.unsqueeze(-1) >> shifts) & mask).flatten(1)[:, :count]
    raw = torch.nn.functional.pad(words.flatten().view(torch.uint8).view(len(words), -1), (0, 1)).int()
    at = torch.arange(count) * bits
    return ((raw[:, at // 8] | raw[:, at // 8 + 1] << 8) >> (at % 8).int()) & mask


def _scaled(values: Tensor, zeros: Tensor | int, scales: Tensor, group: Tensor | int) -> Tensor:
    """Compute (integer - zero) × scale in float32. `group` is the number of adjacent inputs that share a column of
    `zeros` and `scales`, or the column of each input."""
    # exact in float32 for 16-bit scales: rounding to their dtype gives the same values as the formats' libraries
    if isinstance(group, int):
        one = zeros if isinstance(zeros, int) else zeros.unsqueeze(-1)
        return (values.reshape(len(values), -1, group) - one).float().mul_(scales.unsqueeze(-1)).flatten(1)
    return (values - (zeros if isinstance(zeros, int) else zeros[:, group])).float().mul_(scales[:, group])


# --- compressed-tensors -----------------------------------------------------------------------------------------------


def compressed(packed: Packed) -> StoredTensor:
    """Read words along each row, [..., out, in·bits/32], with scales [..., out, groups] or fewer. Zeros [...,
    out·bits/32, groups] are packed along the columns. Integers and zeros are stored plus 2^(bits - 1), which cancels
    out."""
    bits, shape, name = packed.means.bits, packed.shape, packed.base + "_scale"
    place = packed.place(packed.means.anchor)
    grid = ScaleGrid(_floats(packed, name), name, shape)
    _check_stated_shape(packed)
    read, zeros = rows_of(place, shape), _compressed_zeros(packed, grid.counts[1])
    group = _group_of(packed, packed.base + "_g_idx", grid.counts[1], grid.blocks[1])

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        import torch

        matrix, first = divmod(start, shape[-2])
        scales, zero = grid.of(files, start, stop), zeros(files, matrix, first, first + stop - start)
        index = group(files, matrix)
        values = unpacked(read(files, start, stop).view(torch.int32), bits, shape[-1])
        return _scaled(values, zero, scales, index)

    return StoredTensor(place, shape, decode)


def _check_stated_shape(packed: Packed) -> None:
    """Compare the values of `weight_shape`, which are the logical shape, with the shapes in the headers."""
    import torch

    name = packed.base + "_shape"
    if name not in packed.tensors:
        return
    place = packed.place(name)
    dtype = {"I64": torch.int64, "I32": torch.int32}.get(place.info.dtype)
    if dtype is None or place.info.bytes > 64:
        raise packed.wrong(name, f"is {place.info.dtype} {shown(list(place.info.shape))}, should be a shape")
    with OpenFiles() as files:
        stated = files.read(place.path, place.start, place.info.bytes).view(dtype).flatten().tolist()
    if stated != list(packed.shape[-len(stated) :]):
        raise packed.wrong(name, f"specifies {shown(stated)}, but the tensors have {list(packed.shape)}")


def _compressed_zeros(packed: Packed, groups: int) -> _Zeros:
    """Return the zero points; for a symmetric quantizer, all of them are 2^(bits - 1)."""
    import torch

    name, bits, shape = packed.base + "_zero_point", packed.means.bits, packed.shape
    if name not in packed.tensors and not _asymmetric(packed):
        return lambda files, matrix, start, stop: 1 << (bits - 1)
    place = _words(packed, name, (*shape[:-2], -(-shape[-2] * bits // 32), groups))
    read = rows_of(place, place.info.shape)

    def zeros(files: OpenFiles, matrix: int, start: int, stop: int) -> Tensor:
        low, high = _whole_words(start, stop, bits, place.info.shape[-2])
        at = matrix * place.info.shape[-2]
        words = read(files, at + low, at + high).view(torch.int32).t().contiguous()
        integers = unpacked(words, bits, stop - start // 32 * 32)
        return integers[:, start % 32 :].t().contiguous()

    return zeros


def _asymmetric(packed: Packed) -> bool:
    """Return whether every group of modules in the config has zeros."""
    groups = packed.config.get("config_groups", {})
    weights = [group.get("weights") for group in groups.values() if isinstance(group, dict)]
    return bool(weights) and all(isinstance(one, dict) and one.get("symmetric") is False for one in weights)


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def gptq(packed: Packed) -> StoredTensor:
    """Read `qweight` [..., in·bits/32, out], with words along the inputs; `scales` [..., groups, out]; `qzeros` [...,
    groups, out·bits/32], with words along the outputs; `g_idx` [in], each input's group if the inputs were sorted."""
    import torch

    bits, shape, stem = packed.means.bits, packed.shape, packed.means.anchor.removesuffix("qweight")
    place, scales, group = packed.place(packed.means.anchor), *_groups(packed, stem)
    zeros = _gptq_zeros(packed, stem, scales.info.shape[-2])

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        matrix, first = divmod(start, shape[-2])
        last = first + stop - start
        index, zero = group(files, matrix), zeros(files, matrix, first, last)
        factors = numbers(columns_of(scales, matrix, files, first, last), scales, stem + "scales").t()
        words = columns_of(place, matrix, files, first, last).view(torch.int32).t().contiguous()
        return _scaled(unpacked(words, bits, shape[-1]), zero, factors, index)

    return StoredTensor(place, shape, decode)


def awq(packed: Packed) -> StoredTensor:
    """Read `qweight` [..., in, out·bits/32] and `qzeros` [..., groups, out·bits/32], with words along the outputs and
    integers in AWQ's order; `scales` [..., groups, out]."""
    bits, shape, stem = packed.means.bits, packed.shape, packed.means.anchor.removesuffix("qweight")
    if bits not in _AWQ_ORDER:
        raise packed.wrong(packed.means.anchor, f"is packed as {packed.means.format}, whose order is not known")
    _check_version(packed)
    place, scales, group = packed.place(packed.means.anchor), *_groups(packed, stem)
    zeros: ByteLocation | None = None
    if stem + "qzeros" in packed.tensors or packed.config.values.get("zero_point") is not False:
        zeros = _words(packed, stem + "qzeros", (*shape[:-2], scales.info.shape[-2], shape[-2] * bits // 32))

    def decode(files: OpenFiles, start: int, stop: int) -> Tensor:
        matrix, first = divmod(start, shape[-2])
        last = first + stop - start
        index = group(files, matrix)
        zero = 1 << (bits - 1) if zeros is None else _in_order(zeros, matrix, files, first, last, bits)
        factors = numbers(columns_of(scales, matrix, files, first, last), scales, stem + "scales").t()
        return _scaled(_in_order(place, matrix, files, first, last, bits), zero, factors, index)

    return StoredTensor(place, shape, decode)


def _in_order(place: ByteLocation, matrix: int, files: OpenFiles, start: int, stop: int, bits: int) -> Tensor:
    """Return the outputs [start, stop) of an AWQ tensor, as [stop - start, rows of the tensor]."""
    import torch

    each = 32 // bits
    words = columns_of(place, matrix, files, start // each, -(-stop // each)).view(torch.int32)
    shifts = bits * torch.tensor(_AWQ_ORDER[bits], dtype=torch.int32)
    columns = ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)
    return columns[:, start % each : start % each + stop - start].t().contiguous()


def _check_version(packed: Packed) -> None:
    """Raise FFNError for AWQ's other layouts (`gemv`, `marlin`), whose tensors have the same names."""
    for field in ("version", "checkpoint_format"):
        stated = packed.config.text(field, "gemm")
        if packed.config.text("quant_method", "awq") == "awq" and stated.lower() != "gemm":
            what = f"is packed as awq, {field} {shown(stated)}, which is not supported here"
            raise packed.wrong(
                packed.means.anchor, what, "ffn params counts it; of AWQ's formats, only gemm is unpacked"
            )


def _gptq_zeros(packed: Packed, stem: str, groups: int) -> _Zeros:
    """Return the zeros. Formats before gptq_v2 store zero - 1, with the 1 subtracted from whole words.

    With `sym` in the config, all zeros must be 2^(bits - 1) in either format, since some writers name the wrong format.
    """
    import torch

    name, bits, shape, config = stem + "qzeros", packed.means.bits, packed.shape, packed.config
    middle, symmetric = 1 << (bits - 1), config.values.get("sym") is True
    if name not in packed.tensors and symmetric:
        return lambda files, matrix, start, stop: middle
    place = _words(packed, name, (*shape[:-2], groups, -(-shape[-2] * bits // 32)))
    form = config.text("packing_format|checkpoint_format", "gptq")
    if form not in (*_LESS_ONE, "gptq_v2") and not (symmetric and form.startswith("auto_round")):
        what = f"is packed as {packed.means.format} in the format {shown(form)}, which is not supported here"
        raise packed.wrong(packed.means.anchor, what, "ffn params counts it; gptq and gptq_v2 are unpacked")
    ones = _ones(bits)

    def zeros(files: OpenFiles, matrix: int, start: int, stop: int) -> Tensor | int:
        low, high = _whole_words(start, stop, bits, place.info.shape[-1])
        words = columns_of(place, matrix, files, low, high).view(torch.int32)
        # adding to whole words undoes the subtraction exactly, including borrows across integers
        more = words + ones.repeat(-(-words.shape[1] // bits))[: words.shape[1]]
        ways = (more, words) if symmetric or form in _LESS_ONE else (words,)
        both = [unpacked(way, bits, stop - start // 32 * 32)[:, start % 32 :] for way in ways]
        if not symmetric:
            return both[0].t().contiguous()
        if not any((way == middle).all() for way in both):
            raise packed.wrong(name, f"has zeros other than {middle}, but quantization_config says sym")
        return middle

    return zeros


def _ones(bits: int) -> Tensor:
    """Return 32 adjacent integers of value 1, as int32 words [bits]."""
    import torch

    whole = sum(1 << bits * at for at in range(32))
    return torch.frombuffer(bytearray(whole.to_bytes(4 * bits, "little")), dtype=torch.int32)


def _groups(packed: Packed, stem: str) -> tuple[ByteLocation, _Group]:
    """Return the scales and the group of each input, from the tensors and the config."""
    scales, shape, stated = _floats(packed, stem + "scales"), packed.shape, packed.config.values.get("group_size")
    groups, inputs = scales.info.shape[-2], shape[-1]
    if scales.info.shape != (*shape[:-2], groups, shape[-2]):
        raise packed.wrong(stem + "scales", f"of shape {shown(list(scales.info.shape))} does not fit {list(shape)}")
    sizes = [stated] if type(stated) is int and stated > 0 else []
    sizes += [inputs // groups] if inputs % groups == 0 else []
    size = next((size for size in sizes if -(-inputs // size) == groups), None)
    index = packed.tensors.get(stem + "g_idx")
    if index is None or 0 in index.shape:
        if packed.config.values.get("desc_act") is True:
            raise packed.wrong(packed.means.anchor, "needs the tensor g_idx: quantization_config says desc_act")
        if size is None:
            raise packed.wrong(stem + "scales", f"has {groups} groups for {inputs} inputs, and group_size is not known")
    return scales, _group_of(packed, stem + "g_idx", groups, size or inputs)


# --- groups and words -------------------------------------------------------------------------------------------------


def _group_of(packed: Packed, name: str, groups: int, size: int) -> _Group:
    """Return a function from a matrix to the group of each input: `size` adjacent inputs share a group, unless the
    tensor `name` gives other groups."""
    import torch

    inputs = packed.shape[-1]
    adjacent = torch.arange(inputs) // size if inputs % size else size
    if name not in packed.tensors or 0 in packed.tensors[name].shape:
        return lambda files, matrix: adjacent
    place = packed.place(name)
    dtype, count = {"I32": torch.int32, "I64": torch.int64}.get(place.info.dtype), prod(place.info.shape)
    if dtype is None or count not in (inputs, prod(packed.shape[:-2]) * inputs):
        what = f"is {place.info.dtype} {shown(list(place.info.shape))}, should be the group of each of {inputs} inputs"
        raise packed.wrong(name, what)
    width = inputs * dtype.itemsize

    def read(files: OpenFiles, matrix: int) -> Tensor | int:
        at = matrix * width if count > inputs else 0
        index = files.read(place.path, place.start + at, width).view(dtype).long()
        if (index == -1).all():  # compressed-tensors' value for an unused index
            return adjacent
        if int(index.min()) < 0 or int(index.max()) >= groups:
            raise packed.wrong(name, f"refers to groups {index.min()} to {index.max()}, but there are {groups}")
        return index.clone()

    return read


def _floats(packed: Packed, name: str) -> ByteLocation:
    """Return a tensor of plain floats without empty axes."""
    place = packed.place(name)
    if place.info.dtype not in PLAIN or 0 in place.info.shape:
        raise packed.wrong(name, f"has scales of type {place.info.dtype} {shown(list(place.info.shape))}")
    return place


def _words(packed: Packed, name: str, shape: tuple[int, ...]) -> ByteLocation:
    """Return a tensor of int32 words with this shape."""
    place = packed.place(name)
    if place.info.dtype != "I32" or place.info.shape != shape:
        kind = f"is {place.info.dtype} {shown(list(place.info.shape))}"
        raise packed.wrong(name, f"{kind}, should be I32 {list(shape)}")
    return place


def _whole_words(start: int, stop: int, bits: int, most: int) -> tuple[int, int]:
    """Return the words that contain integers [start, stop), beginning at a multiple of 32 integers, where a word
    starts."""
    return start // 32 * bits, min(-(-stop * bits // 32), most)
