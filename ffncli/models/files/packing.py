"""Find the quantized modules of a safetensors checkpoint: logical parameters and stored bytes, from names and shapes
alone.

A quantizer packs a matrix into several tensors. One of these tensors, the anchor, contains the packed values; its name
and dtype identify the format. The other tensors (scales, zeros, indices) are found by the anchor's name and do not
count as parameters. Tensors outside any packed matrix (biases, norms, modules that were not quantized) are kept
unchanged. No rule depends on digits in names, so expert numbers may be replaced by `#`. Sources: the writers' output
(AutoGPTQ, AutoAWQ, bitsandbytes, compressed-tensors, torchao, ModelOpt) and the readers in transformers' integrations.
"""

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

from ffncli.errors import FFNError, shown
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.strict_json import Fields

Shape: TypeAlias = tuple[int, ...]
_KNOWN = "gptq, awq, fp8, mxfp8, mxfp4, nvfp4, bitsandbytes, compressed-tensors, mlx"


@dataclass(frozen=True)
class LogicalTensor:
    """One logical tensor: torch's shape ([out, in]; None if only the number of values is known), parameters, bytes of
    all its pieces in the file, and format (`gptq-4bit`, `fp8-block128`; a plain tensor's dtype code).

    `anchor` is the stored tensor that represents it, which has the packed values or is the plain tensor itself;
    `pieces` are the other stored tensors that belong to it. `bits` is the width of a packed integer.
    """

    shape: Shape | None
    params: int
    bytes: int
    format: str
    name: str = field(default="", compare=False)
    anchor: str = field(default="", compare=False)
    bits: int = field(default=0, compare=False)
    pieces: tuple[str, ...] = field(default=(), compare=False)


def logical(
    tensors: Mapping[str, TensorInfo], quantization: Mapping[str, Any] | None, where: str
) -> dict[str, LogicalTensor]:
    """Convert stored tensors to logical tensors, in the same order.

    A packed matrix becomes one entry `X.weight` (`X` if experts share a parameter without that ending), at the position
    of its packed values. All pieces of a matrix must be passed together; other parts of the checkpoint may be omitted.
    `where` names the checkpoint in errors. Raises FFNError for shapes that contradict each other or the config, and for
    unknown packings.
    """
    config = Fields(quantization or {}, where)
    packed: dict[str, LogicalTensor] = {}
    owner: dict[str, str] = {}  # anchors and pieces → the anchor that they belong to
    for name, info in tensors.items():
        if read := reader(name, info, tensors):
            packed[name] = read(Anchor(name, info, tensors, config))
            for piece in (name, *packed[name].pieces):
                if owner.setdefault(piece, name) != name:
                    both = f"{shown(name, 120)} and {shown(owner[piece], 120)}"
                    raise FFNError(f"{where}: tensor {shown(piece, 120)} belongs to both {both}")
    out: dict[str, LogicalTensor] = {}
    for name, info in tensors.items():
        if name in packed:
            entry = packed[name]
        elif name in owner:
            continue
        else:
            _check_plain(name, info, quantization, where)
            entry = LogicalTensor(info.shape, prod(info.shape), info.bytes, info.dtype, name, name)
        if entry.name in out:
            twice = shown(entry.name, 120)
            raise FFNError(f"{where}: tensor {twice} is duplicated, packed and plain or in two packings")
        out[entry.name] = entry
    return out


def _check_plain(name: str, info: TensorInfo, quantization: Mapping[str, Any] | None, where: str) -> None:
    """Raise FFNError for unexplained integers in a quantized checkpoint: they are packed in an unknown way, so that
    counting them would be wrong. Masks that GPT-2 and GPT-NeoX store as `bias` are ignored."""
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


_FLOAT8 = {"F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ"}
PACKED_DTYPES = {"U8", "I8", "I16", "U16", "I32", "U32"}
_GPTQ_BITS = (2, 3, 4, 5, 6, 7, 8)
_GGML = re.compile(r"(I|T|)Q\d.*|(MX|NV)FP4")
_MICROSCALED = {8: ("nvfp4", 16), 16: ("mxfp4", 32), 24: ("mxfp6", 32)}  # bytes per scale: (format, values)
_WEIGHT_PIECES = (  # `X.weight_scale` for `X.weight`, `X_scale` for the experts' `X`
    "_scale_inv _scale _scale_2 _global_scale _zero_point _g_idx _shape _input_scale _input_scale_2 _activation_scale "
    "_weight_scale _weight_scale_2"
)
_MODULE_PIECES = (
    ".scale .input_scale .input_scale_ub .input_zero_point .input_global_scale .activation_scale .output_scale "
    ".k_scale .v_scale .q_scale .qscale_weight .qscale_act"
)


@dataclass(frozen=True)
class Anchor:
    """A tensor of packed values, with all other tensors and the config's `quantization_config`."""

    name: str
    info: TensorInfo
    tensors: Mapping[str, TensorInfo]
    config: Fields

    def pieces(self, base: str, endings: str) -> tuple[str, ...]:
        """Return the tensors named `base` + ending that exist."""
        return tuple(name for ending in endings.split() if (name := base + ending) in self.tensors)

    def packs(
        self, name: str, shape: Shape | None, form: str, pieces: tuple[str, ...], bits: int = 0, params: int = 0
    ) -> LogicalTensor:
        """Build the matrix from packed values and other `pieces`; `params` counts its values if no shape is known."""
        stored = self.info.bytes + sum(self.tensors[piece].bytes for piece in pieces)
        number = params if shape is None else prod(shape)
        return LogicalTensor(shape, number, stored, form, name, self.name, bits, pieces)

    def wrong(self, what: str) -> FFNError:
        """Build the error for shapes that contradict each other or the config."""
        kind = f"{self.info.dtype} {shown(list(self.info.shape))}"
        return FFNError(f"{self.config.where}: tensor {shown(self.name, 120)} ({kind}) {what}")

    def matrix(self) -> tuple[int, int]:
        """Return the last two sizes of the shape, which must be at least 1."""
        if len(self.info.shape) < 2 or min(self.info.shape) < 1:
            raise self.wrong("is not a matrix of packed values")
        return self.info.shape[-2], self.info.shape[-1]

    def piece(self, name: str, rank: int) -> TensorInfo | None:
        """Return a piece; None if it does not exist. Raises FFNError unless it has `rank` axes, none of them empty."""
        info = self.tensors.get(name)
        if info is not None and (len(info.shape) != rank or min(info.shape) < 1):
            raise self.wrong(f"does not fit {shown(name, 120)} of shape {shown(list(info.shape))}")
        return info


# --- GPTQ and AWQ -----------------------------------------------------------------------------------------------------


def _qweight(anchor: Anchor) -> LogicalTensor:
    """Read GPTQ or AWQ. GPTQ packs 32/bits values of a column into an int32 (qweight [in·bits/32, out]); AWQ packs
    values of a row ([in, out·bits/32]). In both, scales are [groups, out], which distinguishes the two."""
    stem = anchor.name.removesuffix(".qweight")
    rows, columns = anchor.matrix()
    scales = anchor.piece(stem + ".scales", len(anchor.info.shape))
    if anchor.info.dtype != "I32":
        raise anchor.wrong("should hold int32 words")
    if scales is not None:
        awq = scales.shape[-1] != columns
    else:
        awq = anchor.config.text("quant_method", "") == "awq"
    method = "awq" if awq else "gptq"
    if awq:
        bits = _bits(anchor, columns, scales.shape[-1] if scales else None, method)
        sizes = (_values(anchor, columns, bits), rows)
    else:
        bits = _bits(anchor, rows, _gptq_inputs(anchor, stem, columns), method)
        sizes = (columns, _values(anchor, rows, bits))
    if scales is not None:
        _check_groups(anchor, stem + ".scales", scales.shape[-2], sizes[1])
    shape = (*anchor.info.shape[:-2], *sizes)
    pieces = anchor.pieces(stem, ".scales .qzeros .g_idx")
    return anchor.packs(stem + ".weight", shape, f"{method}-{bits}bit", pieces, bits)


def _gptq_inputs(anchor: Anchor, stem: str, outputs: int) -> int | None:
    """Return the input width: the length of g_idx, or else the width that follows from qzeros [groups, out·bits/32]."""
    index = anchor.tensors.get(stem + ".g_idx")
    if index is not None and index.shape[-1:] not in ((), (0,)):
        return index.shape[-1]
    zeros = anchor.piece(stem + ".qzeros", len(anchor.info.shape))
    if zeros is None:
        return None
    bits, rest = divmod(32 * zeros.shape[-1], outputs)
    return None if rest or not bits else 32 * anchor.info.shape[-2] // bits


def _bits(anchor: Anchor, words: int, values: int | None, method: str) -> int:
    """Return the bits per value of `values` values in `words` int32 words; if `values` is None, use the config's bits.
    Raises FFNError if the config contradicts the sizes."""
    stated: int | None = anchor.config.integer("bits|w_bit", None, 1, 32)
    if values is None:
        if stated not in _GPTQ_BITS:
            raise anchor.wrong("has no scales, g_idx or bits in quantization_config that show how wide its values are")
        return stated
    bits, rest = divmod(32 * words, values)
    if rest or bits not in _GPTQ_BITS:
        raise anchor.wrong(f"cannot hold {values} values in {words} words along that axis")
    # GPTQModel and AutoRound may set bits for single modules; then only the shapes decide
    per_module = any(anchor.config.values.get(key) for key in ("dynamic", "extra_config"))
    if stated not in (None, bits) and not per_module:
        raise anchor.wrong(f"has {bits}-bit values, but quantization_config says bits {stated} ({method})")
    return bits


def _values(anchor: Anchor, words: int, bits: int) -> int:
    """Return the number of values packed in `words` words of 32 bits; 32 values of 3 bits share 3 words."""
    values, rest = divmod(32 * words, bits)
    if rest:
        raise anchor.wrong(f"cannot be whole {bits}-bit values")
    return values


def _check_groups(anchor: Anchor, name: str, groups: int, inputs: int) -> None:
    """Check that all groups have the same number of inputs, except that the last group may be smaller."""
    size = -(-inputs // groups)
    if groups > inputs or -(-inputs // size) != groups:
        raise anchor.wrong(f"has {inputs} inputs, but {shown(name, 120)} has {groups} groups")


# --- scaled 8-bit values ----------------------------------------------------------------------------------------------


def scale_name(name: str, tensors: Mapping[str, TensorInfo]) -> str | None:
    """Return the name of a tensor's scales: DeepSeek-V3's `weight_scale_inv`, the usual `weight_scale`, DeepSeek-V4's
    `scale`, Mistral-Large-4's `qscale_weight`, or `X_weight_scale` for ModelOpt's experts in one parameter."""
    names = [name + "_scale_inv", name + "_scale", name + "_weight_scale"]
    if name.endswith(".weight"):
        names += [name.removesuffix("weight") + "scale", name.removesuffix("weight") + "qscale_weight"]
    return next((scale for scale in names if scale in tensors), None)


def _pieces(anchor: Anchor, base: str) -> tuple[str, ...]:
    """Return the pieces of a matrix `base`: tensors under its name and, if it is a module's weight, in its module."""
    module = anchor.pieces(base.removesuffix(".weight"), _MODULE_PIECES) if base.endswith(".weight") else ()
    return anchor.pieces(base, _WEIGHT_PIECES) + module


def _float8(anchor: Anchor) -> LogicalTensor:
    """Read FP8 values in place, with a scale for the tensor, for each channel, or for each block (DeepSeek-V3:
    128×128).

    If there is a power of two for every 32 values of a row, the format is MXFP8.
    """
    shape, scale = anchor.info.shape, anchor.tensors[scale_name(anchor.name, anchor.tensors) or ""]
    form = "fp8" + _blocks(anchor)
    if scale.dtype in ("F8_E8M0", "U8") and scale.shape and shape == (*scale.shape[:-1], 32 * scale.shape[-1]):
        form = "mxfp8"
    return anchor.packs(anchor.name, shape, form, _pieces(anchor, anchor.name))


def _int8(anchor: Anchor) -> LogicalTensor:
    """Read int8 values in place (compressed-tensors), or two FP4 values per byte with E8M0 scales (DeepSeek-V4)."""
    scale = anchor.tensors[scale_name(anchor.name, anchor.tensors) or ""]
    if scale.dtype in ("F8_E8M0", "U8"):
        return _microscaled(anchor)
    _blocks(anchor)
    return anchor.packs(anchor.name, anchor.info.shape, "compressed-int8", _pieces(anchor, anchor.name))


def _blocks(anchor: Anchor) -> str:
    """Return the ending of the format's name: empty for a scale per tensor or channel, `-block128` for a scale per
    block.

    Along each axis, blocks have equal size, except that the last block may be smaller; the config states the size as
    weight_block_size.
    """
    name = scale_name(anchor.name, anchor.tensors) or ""
    shape, scales = anchor.info.shape, anchor.tensors[name].shape
    scales = (*scales, *(1,) * (len(shape) - len(scales)))  # one scale for each row, or for each expert
    if len(scales) != len(shape) or 0 in (*shape, *scales):
        raise anchor.wrong(f"does not fit {shown(name, 120)} of shape {shown(list(scales))}")
    blocks = [-(-size // count) for size, count in zip(shape, scales, strict=True)]
    stated = _block_size(anchor) if scales[-1] > 1 and len(shape) > 1 else ()
    blocks[len(blocks) - len(stated) :] = stated
    if any(-(-size // block) != count for size, block, count in zip(shape, blocks, scales, strict=True)):
        raise anchor.wrong(f"does not fit {shown(name, 120)} of shape {shown(list(scales))}, a scale for each block")
    if scales[-1] == 1 or blocks[-1] == 1:
        return ""
    return "-block" + "x".join(str(size) for size in dict.fromkeys(stated))


def _block_size(anchor: Anchor) -> tuple[int, ...]:
    """Return the config's weight_block_size, [rows, columns]; empty if the config has none."""
    sizes = anchor.config.get("weight_block_size", None)
    if sizes is None:
        return ()
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(s) is not int or s < 1 for s in sizes):
        raise anchor.config.wrong("weight_block_size", sizes, "two whole numbers")
    return tuple(sizes)


# --- smaller values, several to a byte --------------------------------------------------------------------------------


def _mxfp4(anchor: Anchor) -> LogicalTensor:
    """Read gpt-oss's MXFP4: blocks [..., rows, columns/32, 16], two values a byte, scales [..., rows, columns/32]."""
    scales = anchor.tensors[anchor.name[:-6] + "scales"].shape
    if len(scales) < 2 or anchor.info.shape != (*scales, 16):
        raise anchor.wrong(f"should be 16 bytes for each of the scales {shown(list(scales))}")
    shape = (*scales[:-1], scales[-1] * 32)
    return anchor.packs(anchor.name[:-7], shape, "mxfp4", (anchor.name[:-6] + "scales",))


def _uint8(anchor: Anchor) -> LogicalTensor:
    """Read FP4 weights in pairs (ModelOpt), or BitNet's ternary weights, four rows of which share a byte."""
    if anchor.config.get("quant_method", None) != "bitnet":
        return _microscaled(anchor)
    rows, columns = anchor.matrix()
    return anchor.packs(anchor.name, (4 * rows, columns), "bitnet", _pieces(anchor, anchor.name))


def _packed(anchor: Anchor) -> LogicalTensor:
    """Read compressed-tensors: integers in int32 words along each row, or FP4 and FP6 in bytes."""
    base = anchor.name.removesuffix("_packed")
    if anchor.pieces(base.removesuffix("weight"), "meta"):
        raise anchor.wrong("is packed in the 2:4 sparse format marlin-24, which is not supported")
    if anchor.info.dtype == "U8":
        return _microscaled(anchor)
    rows, words = anchor.matrix()
    if anchor.info.dtype != "I32":
        raise anchor.wrong("should hold int32 words or bytes")
    scale = anchor.tensors.get(base + "_scale")
    if scale is not None and prod(scale.shape) != 1:
        scale = anchor.piece(base + "_scale", len(anchor.info.shape))
    groups = (1, *scale.shape)[-1] if scale else None
    ways = {(bits, _row(words, groups, bits, size)) for bits, size in _integer_weights(anchor)}
    fitting = {way for way in ways if way[1]}
    if len(fitting) != 1:
        scales = f"{groups or 'no'}  scales per row" + (
            " fit no config_groups" if not fitting else " fit several widths"
        )
        raise anchor.wrong(f"and {scales} of quantization_config")
    bits, columns = fitting.pop()
    shape = (*anchor.info.shape[:-2], rows, columns)
    return anchor.packs(base, shape, f"compressed-int{bits}", _pieces(anchor, base), bits)


def _row(words: int, groups: int | None, bits: int, size: int | None) -> int:
    """Return the number of `bits`-bit values in a row of int32 words; 0 if the sizes contradict each other."""
    if groups is None or size is None:
        # the last word is counted as full, since the exact width is in weight_shape's values, which no header contains
        return 32 * words // bits if groups in (None, 1) else 0
    values = groups * size
    # before dense packing, writers left the spare bits of each word empty (3 bits: ten values per word)
    return values if words in (-(-values * bits // 32), -(-values // (32 // bits))) else 0


def _integer_weights(anchor: Anchor) -> list[tuple[int, int | None]]:
    """Return (bits, group size or None) of each group of modules in the config."""
    groups = anchor.config.get("config_groups", {})
    if not isinstance(groups, dict):
        raise anchor.config.wrong("config_groups", groups, "an object")
    out = []
    for group in list(groups.values())[:1000]:
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            fields = Fields(weights, f"{anchor.config.where}: config_groups")
            size = fields.integer("group_size", None, -1)
            out.append((fields.integer("num_bits", 8, 1, 32), size if size and size > 0 else None))
    return out


def _microscaled(anchor: Anchor) -> LogicalTensor:
    """Read bytes [out, in/2] with a scale for every 16 (NVFP4) or 32 (MXFP4) values of a row; MXFP6 has 4 values in 3
    bytes.

    ModelOpt's Llama-4 has [in/2, out] with scales [in/16, out]: its matrices are transposed and packed along `in`.
    """
    base = anchor.name.removesuffix("_packed")
    name = scale_name(base, anchor.tensors)
    _, columns = anchor.matrix()
    scales = anchor.piece(name, len(anchor.info.shape)) if name else None
    if scales is None:
        raise anchor.wrong("has no scales that show how its bytes are packed")
    upright = scales.shape[-1] == columns
    axis, sizes = (-2, (8, 16)) if upright else (-1, (*_MICROSCALED,))
    size, rest = divmod(anchor.info.shape[axis], scales.shape[axis])
    if rest or size not in sizes or scales.shape != _with(anchor.info.shape, axis, scales.shape[axis]):
        raise anchor.wrong(f"does not fit {shown(name, 120)} of shape {shown(list(scales.shape))}")
    form, values = _MICROSCALED[size]
    shape = _with(anchor.info.shape, axis, scales.shape[axis] * values)
    return anchor.packs(base, shape, form, _pieces(anchor, base))


def _with(shape: tuple[int, ...], axis: int, size: int) -> tuple[int, ...]:
    """Return the shape with another size along one axis, which is counted from the end."""
    return (*shape[:axis], size, *shape[len(shape) + axis + 1 :])


# --- bitsandbytes and torchao -----------------------------------------------------------------------------------------


def _bitsandbytes_4bit(anchor: Anchor) -> LogicalTensor:
    """Read two values per byte, flattened, in any dtype; the shape is in the values of quant_state.

    absmax has one value per block of values. If the number of values is odd, one value too many is counted.
    """
    params, blocks = 2 * anchor.info.bytes, prod(anchor.tensors[anchor.name + ".absmax"].shape)
    if not any(blocks == -(-params // size) for size in (32, 64, 128, 256, 512, 1024, 2048, 4096)):
        raise anchor.wrong(f"holds {params} values, but its absmax has {blocks} blocks")
    states = {form: anchor.pieces(anchor.name, f".quant_state.bitsandbytes__{form}") for form in ("nf4", "fp4")}
    form = next((form for form, there in states.items() if there), "4bit")
    pieces = anchor.pieces(anchor.name, ".absmax .quant_map .nested_absmax .nested_quant_map")
    return anchor.packs(anchor.name, None, f"bnb-{form}", (*pieces, *states["nf4"], *states["fp4"]), params=params)


def _bitsandbytes_8bit(anchor: Anchor) -> LogicalTensor:
    """Read int8 values in place; SCB has one scale for each row."""
    rows, columns = anchor.matrix()
    stem = anchor.name.removesuffix(".weight")
    if prod(anchor.tensors[stem + ".SCB"].shape) != rows:
        raise anchor.wrong(f"does not fit {shown(stem + '.SCB', 120)}, which should have one scale per row")
    return anchor.packs(anchor.name, (rows, columns), "bnb-int8", anchor.pieces(stem, ".SCB .weight_format"))


def _torchao(anchor: Anchor) -> LogicalTensor:
    """Read `X._weight_qdata`: 8-bit values in place, or 4-bit pairs in an order that depends on the kernel."""
    stem, _, last = anchor.name.removesuffix("_qdata").rpartition("._")
    pieces = anchor.pieces(f"{stem}._{last}", "_scale _zero_point _scale_and_zero _per_tensor_scale _act_pre_scale")
    if anchor.info.dtype in _FLOAT8 or anchor.info.dtype == "I8":
        form = "torchao-int8" if anchor.info.dtype == "I8" else "torchao-fp8"
        return anchor.packs(f"{stem}.{last}", anchor.info.shape, form, pieces)
    return anchor.packs(f"{stem}.{last}", None, "torchao-int4", pieces, params=2 * anchor.info.bytes)


def _mlx(anchor: Anchor) -> LogicalTensor:
    """Read MLX: values packed along each row into uint32 words, a scale for each group and, in its affine mode, a bias.

    The config states the group size, and bits that only hold for modules without an entry of their own.
    """
    stem = anchor.name.removesuffix("weight")
    rows, words = anchor.matrix()
    scales = anchor.piece(stem + "scales", len(anchor.info.shape))
    assert scales is not None
    mine = anchor.config.values.get(stem.removesuffix("."))
    size = (mine if isinstance(mine, Mapping) else anchor.config.values).get("group_size", 64)
    affine = stem + "biases" in anchor.tensors
    if type(size) is not int or size < 1 or scales.shape[-2] != rows:
        raise anchor.wrong(f"does not fit {shown(stem + 'scales', 120)} of shape {shown(list(scales.shape))}")
    columns = scales.shape[-1] * size
    bits, rest = divmod(32 * words, columns)
    if rest or bits not in _GPTQ_BITS:
        raise anchor.wrong(f"cannot hold {scales.shape[-1]} groups of {size} values in {words} words")
    form = f"mlx-{bits}bit" if affine else {(4, 16): "nvfp4", (4, 32): "mxfp4"}.get((bits, size), "mxfp8")
    pieces = anchor.pieces(stem, "scales biases")
    return anchor.packs(anchor.name, (*anchor.info.shape[:-1], columns), form, pieces, bits)


# --- GGUF -------------------------------------------------------------------------------------------------------------


def gguf_scale(name: str, tensors: Collection[str]) -> str | None:
    """Return the scale's name, `X.scale`, of a GGUF file's `X.weight`; llama.cpp scales the matrix product."""
    stem = name.removesuffix("weight")
    names = (stem + "scale", name + ".scale") if stem != name else ()
    return next((one for one in names if one in tensors), None)


def _ggml(anchor: Anchor) -> LogicalTensor:
    """Read the blocks of a GGUF file whose scales are separate tensors."""
    stem = anchor.name.removesuffix("weight")
    pieces = (*anchor.pieces(stem, "scale input_scale"), *anchor.pieces(anchor.name, ".scale .input_scale"))
    return anchor.packs(anchor.name, anchor.info.shape, anchor.info.dtype, pieces)


# --- which tensor is an anchor ----------------------------------------------------------------------------------------

_BY_ENDING = {".qweight": _qweight, "_packed": _packed, "_qdata": _torchao}
_BY_SCALE = {**dict.fromkeys(_FLOAT8, _float8), "I8": _int8, "U8": _uint8}


def reader(name: str, info: TensorInfo, tensors: Mapping[str, TensorInfo]) -> Callable[[Anchor], LogicalTensor] | None:
    """Return the reader for the tensor's packed values; None for a plain tensor or a piece of another tensor."""
    if name + ".absmax" in tensors:  # checked first, since bitsandbytes may store its bytes as any dtype
        return _bitsandbytes_4bit
    if _GGML.fullmatch(info.dtype):
        return _ggml if gguf_scale(name, tensors) else None
    if info.dtype not in PACKED_DTYPES and info.dtype not in _FLOAT8:
        return None
    if read := next((read for ending, read in _BY_ENDING.items() if name.endswith(ending)), None):
        return read
    if info.dtype == "U32" and name.endswith("weight") and name.removesuffix("weight") + "scales" in tensors:
        return _mlx
    if name.endswith(("_blocks", ".blocks")) and info.dtype == "U8":
        return _mxfp4 if name[:-6] + "scales" in tensors else None
    if name.endswith(".weight") and info.dtype == "I8" and name.removesuffix("weight") + "SCB" in tensors:
        return _bitsandbytes_8bit
    return _BY_SCALE.get(info.dtype) if scale_name(name, tensors) else None
