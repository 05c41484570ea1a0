"""The bytes of a quantised model's weights, from its config alone: `quantization_config` says how matrices are stored.

A matrix takes the bytes of the tensors that the format's library writes for it: packed values, the scales and zeros of
groups, rows and tiles, and GPTQ's order of columns. Not counted are the numbers that a matrix has once, whatever its
size (the scale of a whole tensor, a shape, a table of code values). Sources: the writers' output (AutoGPTQ, AutoAWQ,
AutoRound, bitsandbytes, compressed-tensors, ModelOpt, torchao, MLX) and the configs of published models.
"""

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property
from math import ceil, prod
from typing import Any

from ffncli.block import dtypes
from ffncli.block.dtypes import DType
from ffncli.block.steps import Axis, Experts, Linear, Step, of_norm
from ffncli.errors import FFNError, shown
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import LayerParams, Model, NonFFN, Resolved


@dataclass(frozen=True)
class Packing:
    """How a matrix [rows, columns] is stored: `bits` per value; a scale of `scale_bytes` and a zero of `zero_bits` for
    each group of `group` values of a row (0: for the row), or a scale for each `tile` (rows, columns).

    `column_bytes` is stored once per column. In a `flat` format, groups continue across the ends of rows; `nested`
    groups share a second scale of four bytes. `everywhere`: embeddings, head and router are packed, too.
    """

    name: str
    bits: int
    group: int = 0
    scale_bytes: float = 0
    zero_bits: int = 0
    tile: tuple[int, int] | None = None
    column_bytes: int = 0
    flat: bool = False
    nested: int = 0
    everywhere: bool = False

    def matrix_bytes(self, rows: int, columns: int) -> int:
        """Return the bytes of a matrix."""
        if self.tile:
            scales = -(-rows // self.tile[0]) * -(-columns // self.tile[1])
        elif self.flat:
            scales = -(-rows * columns // self.group)
        else:
            scales = rows * -(-columns // (self.group or columns))
        total = ceil(rows * columns * self.bits / 8) + ceil(scales * (self.scale_bytes + self.zero_bits / 8))
        return total + columns * self.column_bytes + (4 * -(-scales // self.nested) if self.nested else 0)


class UnknownPacking(FFNError):
    """The error for a quantization_config whose bytes are unknown; the message names what is unknown."""


_MANY = 100  # with more plain rules than this, looking up a name's parts is faster than searching for each rule


@dataclass(frozen=True)
class Scheme:
    """How a model's matrices are stored: by the first of `rules`, (pattern, packing), whose pattern a module's name
    matches, else by `default`; None: not packed.

    A pattern is `re:` and a regular expression, a name with wildcards, or whole components of a name (`mlp.gate` is not
    part of `mlp.gate_proj`). `head`: the head is packed, too, unless a rule leaves it out; `usual_only`: besides
    attention and FFNs, it depends on the library's version which modules are packed.
    """

    default: Packing | None
    rules: tuple[tuple[str, Packing | None], ...] = ()
    head: bool = False
    usual_only: bool = False

    def of(self, names: Sequence[str]) -> Packing | None:
        """Return the packing of a module that may have any of these names."""
        if len(self._plain) > _MANY:
            hits = [self._plain[part] for name in names for part in _parts(name) if part in self._plain]
        else:
            text = "." + "..".join(names) + "."  # one search for each rule, instead of one for each part of each name
            hits = [at for part, at in self._plain.items() if f".{part}." in text]
        first = min(hits, default=len(self.rules))
        wild = (at for at, matches in self.patterns if at < first and any(map(matches, names)))
        at = next(wild, first)
        return self.rules[at][1] if at < len(self.rules) else self.default

    def in_layer(self, layer: int, names: Sequence[str]) -> Packing | None:
        """Return the packing of a layer's module that may have any of these names in it."""
        alike = layer if self._numbered else 10 ** (len(str(layer)) - 1)  # a pattern without digits sees their number
        key = (alike, *names)
        if key not in self._in_layers:
            self._in_layers[key] = self.of([f"{at}.{alike}.{name}" for at in _LAYERS for name in names])
        return self._in_layers[key]

    @cached_property
    def _in_layers(self) -> dict[tuple[object, ...], Packing | None]:
        return {}

    @cached_property
    def _numbered(self) -> bool:
        return any(character.isdigit() for pattern, _ in self.rules for character in pattern)

    @property
    def beyond_experts(self) -> bool:
        """Return whether modules other than routed experts may be packed."""
        return bool(self.default) or any(packing and "experts" not in name for name, packing in self.rules)

    @cached_property
    def _plain(self) -> dict[str, int]:
        """The positions of the rules without wildcards: there may be one for every expert."""
        return {
            pattern.removesuffix(".weight"): at
            for at, (pattern, _) in reversed([*enumerate(self.rules)])
            if not pattern.startswith("re:") and "*" not in pattern
        }

    @cached_property
    def patterns(self) -> list[tuple[int, Callable[[str], object]]]:
        """The positions of the other rules, each with a function that matches a name."""
        return [
            (at, _matcher(pattern))
            for at, (pattern, _) in enumerate(self.rules)
            if pattern.startswith("re:") or "*" in pattern
        ]


def _parts(name: str) -> Iterator[str]:
    """Yield every run of adjacent components of a name."""
    words = name.split(".")
    for start in range(len(words)):
        for end in range(start + 1, len(words) + 1):
            yield ".".join(words[start:end])


_MOST_REPEATS = 6


def _matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that matches a name; a wildcard's pattern may also name a module around it.

    Raises re.error for a pattern that is none, or that repeats a group or repeats often, which could take for ever.
    """
    if pattern.startswith("re:"):
        if re.search(r"\)[*+{]", pattern) or len(re.findall(r"[*+{]", pattern)) > _MOST_REPEATS:
            raise re.error("repeats too much")
        return re.compile(pattern[3:]).match
    around = translate("*" + pattern.removesuffix(".*") + ".*")
    return re.compile(f"(?:{translate(pattern)}|{around})").match


# --- what a quantization_config says ----------------------------------------------------------------------------------


def scheme_of(quantization: Mapping[str, Any], where: str) -> Scheme:
    """Read a quantization_config, or MLX's `quantization`. Raises UnknownPacking for what it does not determine."""
    config = Fields(quantization, f"{where}: quantization_config")
    method = str(quantization.get("quant_method") or "").lower().replace("-", "_")
    if not method and ("quant_algo" in quantization or "quantized_layers" in quantization):
        method = "modelopt"
    if not method and "bits" in quantization:
        method = "mlx"
    if not method and set(quantization) == {"expert_dtype"}:
        return Scheme(None, _of_experts(config))
    read = _METHODS.get(method)
    if read is None:
        raise _unknown(config, f"quant_method {shown(quantization.get('quant_method'))}")
    scheme = read(config)
    kept = tuple((name, None) for name in _left_out(config))
    # transformers leaves the head out by itself only if the config lists no modules to leave out
    listed = any(isinstance(config.values.get(key), list) for key in _NOT_PACKED.split("|"))
    head = scheme.head or (listed and not scheme.usual_only)
    return replace(scheme, rules=(*_of_experts(config), *kept, *scheme.rules), head=head)


def _unknown(config: Fields, what: str) -> UnknownPacking:
    return UnknownPacking(f"{config.where}: the bytes of {what} are not known", "give the model's tensors")


_NOT_PACKED = "modules_to_not_convert|ignore|ignored_layers|exclude_modules|exclude|llm_int8_skip_modules|skip_modules"


def _left_out(config: Fields) -> Iterator[str]:
    """Yield the patterns of modules that are not quantised."""
    for key in _NOT_PACKED.split("|"):
        names = config.values.get(key)
        yield from (name for name in (names if isinstance(names, list) else []) if isinstance(name, str) and name)
    dynamic = _mapping(config.values.get("dynamic"))  # GPTQModel's
    yield from (f"re:{name[2:]}" for name in dynamic if name.startswith("-:"))
    for name, rule in _mapping(config.values.get("extra_config")).items():  # AutoRound's
        if _mapping(rule).get("bits", 0) >= 16:
            yield name


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _of_experts(config: Fields) -> tuple[tuple[str, Packing | None], ...]:
    """Read DeepSeek-V4's `expert_dtype`, the format of the routed experts."""
    name = config.values.get("expert_dtype")
    if name is None:
        return ()
    packing = {"fp4": _MXFP4, "fp8": replace(_FP8, scale_bytes=1, tile=(128, 128))}.get(str(name))
    if packing is None:
        raise _unknown(config, f"expert_dtype {shown(name)}")
    return (("re:.*\\bexperts\\b", packing),)


def _bits(config: Fields, names: str = "bits|w_bit|num_bits") -> int:
    bits = config.get(names, None)
    if type(bits) is not int or not 1 <= bits <= 8:
        raise _unknown(config, f"weights of {shown(bits)} bits")
    return bits


def _group(config: Fields, names: str, default: int = 128) -> int:
    """Read a group size: 0 for a scale per row (-1 or null)."""
    size = config.values.get(next((n for n in names.split("|") if n in config.values), ""), default)
    if size in (None, -1, 0):
        return 0
    if type(size) is not int or not 1 <= size <= 1 << 20:
        raise _unknown(config, f"groups of {shown(size)}")
    return size


_MXFP4 = Packing("mxfp4", 4, 32, 1)
_NVFP4 = Packing("nvfp4", 4, 16, 1)
_FP8 = Packing("fp8", 8)


def _gptq(config: Fields) -> Scheme:
    bits, group = _bits(config), _group(config, "group_size")
    packing = Packing(f"gptq-{bits}bit", bits, group, 2, bits, column_bytes=4)
    rules = [
        (f"re:{name.removeprefix('+:')}", replace(packing, name=f"gptq-{b}bit", bits=b, zero_bits=b, group=g))
        for name, rule in _mapping(config.values.get("dynamic")).items()
        if not name.startswith("-:")
        for b, g in [(_mapping(rule).get("bits", bits), _mapping(rule).get("group_size", group))]
        if type(b) is int and type(g) is int
    ]
    head, inside = config.values.get("lm_head") is True, config.values.get("modules_in_block_to_quantize")
    if isinstance(inside, list):  # lists of names, in the order of their quantization
        names = [name for one in inside for name in (one if isinstance(one, list) else [one])]
        rules += [(str(name), packing) for name in (*names, *(["lm_head"] if head else []))]
        return Scheme(None, tuple(rules), head)
    return Scheme(packing, tuple(rules), head, usual_only=True)


def _awq(config: Fields) -> Scheme:
    bits, group = _bits(config), _group(config, "group_size|q_group_size")
    return Scheme(Packing(f"awq-{bits}bit", bits, group, 2, bits), usual_only=True)


def _auto_round(config: Fields) -> Scheme:
    """Read AutoRound's config: GPTQ's or AWQ's tensors, with other widths for single modules (`extra_config`)."""
    packed = str(config.values.get("packing_format", "auto_round:auto_gptq"))
    if "nv_fp" in packed or "mx_fp" in packed or str(config.values.get("data_type", "int")) not in ("int", "int_sym"):
        kind = str(config.values.get("data_type", packed))
        known = {"nv": _NVFP4, "mx": _MXFP4}.get(kind[:2]) if _bits(config) == 4 else None
        if known is None:
            raise _unknown(config, f"data_type {shown(kind)}")
        return Scheme(known)
    rules, default = [], (_awq(config) if "awq" in packed else _gptq(config)).default
    if default and "auto_round" in packed and "gptqmodel" not in packed:
        default = replace(default, column_bytes=0)  # its own form of GPTQ's tensors has no order of columns
    for name, rule in _mapping(config.values.get("extra_config")).items():
        bits, group = _mapping(rule).get("bits"), _mapping(rule).get("group_size", 0)
        if default and type(bits) is int and bits <= 8 and type(group) is int:
            rules.append((name, replace(default, bits=bits, zero_bits=bits, group=max(group, 0) or default.group)))
    return Scheme(default, tuple(rules), any(name == "lm_head" for name, _ in rules), usual_only=True)


def _compressed(config: Fields) -> Scheme:
    """Read compressed-tensors: a packing for each group of targets (`Linear`, or patterns of names)."""
    rules: list[tuple[str, Packing | None]] = []
    for group in _mapping(config.values.get("config_groups")).values():
        weights = _mapping(group).get("weights")
        if not isinstance(weights, Mapping):
            continue
        packing = _of_weights(Fields(weights, f"{config.where}: config_groups"))
        targets = _mapping(group).get("targets")
        names = targets if isinstance(targets, list) and targets else ["Linear"]
        rules += [("*" if name == "Linear" else str(name), packing) for name in names]
    if not rules:
        raise _unknown(config, "weights without config_groups")
    return Scheme(None, tuple(rules), head=True)


def _of_weights(weights: Fields) -> Packing:
    """Read the description of one group's weights: type, bits, strategy, group size."""
    bits, kind = _bits(weights), weights.values.get("type", "int")
    strategy = weights.values.get("strategy") or ("group" if weights.values.get("group_size") else "tensor")
    group, tile = 0, None
    scale = 2.0  # bf16
    if strategy in ("group", "tensor_group"):
        group = _group(weights, "group_size")
    elif strategy == "block":
        sizes = weights.values.get("block_structure")
        if not isinstance(sizes, list) or len(sizes) != 2 or any(type(s) is not int or s < 1 for s in sizes):
            raise _unknown(weights, f"blocks of {shown(sizes)}")
        tile = (sizes[0], sizes[1])
    elif strategy == "tensor":
        scale = 0.0
    elif strategy != "channel":
        raise _unknown(weights, f"scales by {shown(strategy)}")
    if kind == "float":
        if bits == 4 and group in (16, 32):
            return _NVFP4 if group == 16 else _MXFP4
        if bits == 8 and group == 32:
            return Packing("mxfp8", 8, 32, 1)
        if bits != 8:
            raise _unknown(weights, f"floats of {bits} bits in groups of {group}")
        return Packing("fp8", 8, group, scale, tile=tile)
    zero = 0 if weights.values.get("symmetric", True) else bits
    column = 4 if weights.values.get("actorder") == "group" else 0
    return Packing(f"compressed-int{bits}", bits, group, scale, zero, tile, column)


def _modelopt(config: Fields) -> Scheme:
    """Read ModelOpt's `quant_algo`; with MIXED_PRECISION, `quantized_layers` gives each module's."""
    inner = _mapping(config.values.get("quantization"))
    config = Fields({**config.values, **inner}, config.where)
    algorithm = str(config.values.get("quant_algo") or "").upper()
    if algorithm == "MIXED_PRECISION" or (not algorithm and config.values.get("quantized_layers")):
        layers = _mapping(config.values.get("quantized_layers"))
        rules = tuple(
            (name, _of_algorithm(Fields(_mapping(rule), config.where), str(_mapping(rule).get("quant_algo")).upper()))
            for name, rule in layers.items()
        )
        return Scheme(None, rules)
    excluded = tuple((str(name), None) for name in _left_out(config))
    return Scheme(_of_algorithm(config, algorithm), excluded)


def _of_algorithm(config: Fields, algorithm: str) -> Packing:
    group = _group(config, "group_size", 0)
    if algorithm in ("FP8", "W4A8_NVFP4_FP8") or algorithm.startswith("FP8_PER_TENSOR"):
        return _FP8
    if algorithm == "FP8_PER_CHANNEL_PER_TOKEN":
        return replace(_FP8, scale_bytes=4)
    if algorithm in ("FP8_PB_WO", "FP8_PB_REAL"):
        return replace(_FP8, scale_bytes=4, tile=(128, 128))
    if "NVFP4" in algorithm:
        return _NVFP4
    if algorithm in ("MXFP4", "W4A8_MXFP4_FP8"):
        return _MXFP4
    if algorithm == "MXFP8":
        return Packing("mxfp8", 8, 32, 1)
    if algorithm in ("W4A16_AWQ", "W4A8_AWQ", "INT4_AWQ"):
        return Packing("int4", 4, group or 128, 2)
    if algorithm in ("W8A16", "W8A8_SQ_PER_CHANNEL", "INT8_SQ"):
        return Packing("int8", 8, 0, 4)
    raise _unknown(config, f"quant_algo {shown(algorithm)}")


def _fp8(config: Fields) -> Scheme:
    """Read DeepSeek-V3's format, with a scale for each block, or one with a scale for each tensor."""
    sizes = config.values.get("weight_block_size")
    if sizes is None:
        return Scheme(_FP8)
    if not isinstance(sizes, list) or len(sizes) != 2 or any(type(s) is not int or s < 1 for s in sizes):
        raise _unknown(config, f"blocks of {shown(sizes)}")
    scale = 1 if "expert_dtype" in config.values else 4  # DeepSeek-V4 stores powers of two
    return Scheme(replace(_FP8, name=f"fp8-block{sizes[1]}", scale_bytes=scale, tile=(sizes[0], sizes[1])))


def _bitsandbytes(config: Fields) -> Scheme:
    if not (config.values.get("load_in_4bit") or config.values.get("_load_in_4bit")):
        return Scheme(Packing("bnb-int8", 8, 0, 4))
    form, size = str(config.values.get("bnb_4bit_quant_type", "fp4")), config.values.get("bnb_4bit_blocksize", 64)
    if type(size) is not int or size < 1:
        raise _unknown(config, f"blocks of {shown(size)}")
    doubled = config.values.get("bnb_4bit_use_double_quant") is True
    packing = Packing(f"bnb-{form}", 4, size, 1 if doubled else 4, flat=True, nested=256 if doubled else 0)
    return Scheme(packing)


def _torchao(config: Fields) -> Scheme:
    """Read torchao's config: the name of a configuration class, or that of its function in older files."""
    kind, arguments = config.values.get("quant_type"), _mapping(config.values.get("quant_type_kwargs"))
    if isinstance(kind, Mapping):
        default = _mapping(kind.get("default"))
        arguments, kind = _mapping(default.get("_data")), default.get("_type")
    name = re.sub(r"(config|_)", "", str(kind).lower())
    group = _group(Fields(arguments, config.where), "group_size", 128)
    if name.startswith("int4weightonly"):
        return Scheme(Packing("torchao-int4", 4, group, 4))  # scale and zero in bf16
    if name.startswith(("int8weightonly", "int8dynamicactivationint8weight")):
        return Scheme(Packing("torchao-int8", 8, 0, 4, 8))
    if name.startswith("float8"):
        rows = "row" in str(arguments.get("granularity", "row" if "weightonly" in name else "")).lower()
        return Scheme(Packing("torchao-fp8", 8, 0, 4 if rows else 0))
    raise _unknown(config, f"quant_type {shown(kind)}")


def _mlx(config: Fields) -> Scheme:
    """Read MLX's `quantization`: a scale and a bias in 16 bits for every group; a module's entry overrides it."""

    def packing(values: Mapping[str, Any]) -> Packing:
        fields, mode = Fields(values, config.where), values.get("mode", "affine")
        if mode in ("mxfp4", "nvfp4", "mxfp8"):
            bits, group = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}[mode]
            return Packing(str(mode), bits, group, 1, everywhere=True)
        if mode != "affine":
            raise _unknown(config, f"mode {shown(mode)}")
        bits = _bits(fields)
        return Packing(f"mlx-{bits}bit", bits, _group(fields, "group_size", 64), 4, everywhere=True)

    rules = [
        (name, packing({**config.values, **rule}) if isinstance(rule, Mapping) else None)
        for name, rule in config.values.items()
        if "." in name and (rule is False or isinstance(rule, Mapping))
    ]
    return Scheme(packing(config.values), tuple(rules))


_METHODS = {
    "gptq": _gptq, "awq": _awq, "auto_round": _auto_round, "intel/auto_round": _auto_round,
    "compressed_tensors": _compressed, "modelopt": _modelopt, "modelopt_fp4": _modelopt, "modelopt_mixed": _modelopt,
    "fp8": _fp8, "fbgemm_fp8": lambda config: Scheme(replace(_FP8, scale_bytes=4)),
    "mxfp4": lambda config: Scheme(None, (("re:.*\\bexperts\\b", _MXFP4),)), "bitsandbytes": _bitsandbytes,
    "torchao": _torchao, "mlx": _mlx,
}  # fmt: skip


def unknown_packing(resolved: Resolved) -> str:
    """Return a note if a quantised model without tensors has a config that does not determine its bytes, else ""."""
    try:
        packed = packed_model(resolved)
    except UnknownPacking as unknown:
        return f"{unknown.message}, so weight bytes are not counted"
    if packed is None or not packed.unknown:
        return ""
    where = f"{resolved.source}: quantization_config"
    return f"{where}: the bytes of {packed.unknown} are not known, so those of the whole model are not counted"


# --- the bytes of a model ---------------------------------------------------------------------------------------------

_LEAVES = {
    "gate": ("gate_proj", "w1", "gate_up_proj", "w_in"), "down": ("down_proj", "w2", "fc2", "c_proj", "dense_4h_to_h"),
    "up": ("up_proj", "w3", "gate_up_proj", "w_in", "fc1", "c_fc", "dense_h_to_4h"),
}  # fmt: skip
_LAYERS = (
    "model.layers", "model.language_model.layers", "language_model.model.layers", "transformer.h", "layers",
    "backbone.layers", "model.decoder.layers", "gpt_neox.layers", "transformer.blocks", "biogpt.layers",
)  # fmt: skip
_MLPS = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "mixer")
_MOST_MATCHES = 100_000  # patterns times layers; published models have a few thousand
_USUAL = ("self_attn.", "self_attention.", "attention.", "attn.")  # modules that every library packs
_SHARED = ("shared_expert", "shared_experts", "shared_mlp")


@dataclass(frozen=True)
class PackedModel:
    """The bytes of a quantised model: of its FFNs, and of everything else (None if unknown, and then `unknown` names
    the modules, unless their parameters are unknown). `format` stands for the FFNs' formats, with their mean bytes per
    parameter."""

    ffn_bytes: int
    other_bytes: int | None
    format: DType
    unknown: str = ""


def packed_model(resolved: Resolved) -> PackedModel | None:
    """Return the bytes that a quantised model's tensors would have; None if no config describes its quantization, or if
    there are tensors. Raises UnknownPacking, which names what the config does not determine."""
    quantization, model = resolved.quantization, resolved.model
    if not quantization or resolved.stored is not None:
        return None
    scheme, plain = scheme_of(quantization, resolved.source), dtypes.find(model.dtype) or dtypes.dtype("bf16")
    try:
        matches = len(scheme.patterns) * sum(len(group.layers) for group in model.groups)
    except re.error as error:
        raise UnknownPacking(f"{resolved.source}: quantization_config: a pattern is not read ({error})") from None
    if matches > _MOST_MATCHES:
        raise UnknownPacking(
            f"{resolved.source}: quantization_config: the bytes of {len(scheme.patterns):,} patterns are not known"
        )
    bytes_by_format: dict[str, int] = {}
    for group in model.groups:
        for matrix in _matrices(group.steps):
            names = _names(matrix) if matrix.role else []
            for layer in group.layers:
                packing = scheme.in_layer(layer, names) if names else None
                if matrix.part == "router":
                    packing = scheme.default if scheme.default and scheme.default.everywhere else None
                size = matrix.bytes(packing, plain)
                name = packing.name if packing else plain.name
                bytes_by_format[name] = bytes_by_format.get(name, 0) + size
    total = sum(bytes_by_format.values())
    name = max(bytes_by_format, key=lambda one: bytes_by_format[one])
    packings = [scheme.default, *(packing for _, packing in scheme.rules)]
    block = max([1, *(packing.group for packing in packings if packing)])
    blocks = [(group.steps, len(group.layers)) for group in model.groups]
    mean = dtypes.mean_format(name, blocks, total, block, plain.block_bytes)
    other = _outside(model, scheme, plain)
    return PackedModel(total, None, mean, other) if isinstance(other, str) else PackedModel(total, other, mean)


@dataclass(frozen=True)
class _Matrix:
    """A parameter of a block: the part of the block (`mlp`, `experts`, `shared`, `router`), its role there (`gate`,
    `up`, `down`; empty if no format packs it), and its shape."""

    part: str
    role: str
    shape: tuple[int, ...]

    @property
    def params(self) -> int:
        return prod(self.shape)

    def bytes(self, packing: Packing | None, plain: DType) -> int:
        if packing is None or len(self.shape) < 2:
            return self.params * plain.block_bytes
        rows, columns = self.shape[-2:]
        return prod(self.shape[:-2]) * packing.matrix_bytes(rows, columns)


def _matrices(steps: Sequence[Step], part: str = "mlp", stack: tuple[Axis, ...] = ()) -> Iterator[_Matrix]:
    """Yield a block's parameters, without its norms."""
    for step in steps:
        if isinstance(step.op, Experts):
            inner = "shared" if step.op.always else "experts"
            yield from _matrices(step.op.program, inner, (*stack, step.op.experts))
        elif not of_norm(step):
            for name, axes in step.parameters().items():
                first, _, last = step.output.rpartition(".")
                at = "shared" if first == "shared" else "router" if step.output.startswith("router") else part
                shape = tuple(axis.size for axis in (*stack, *axes))
                packs = isinstance(step.op, Linear) and name.endswith("weight") and last in _LEAVES
                yield _Matrix(at, last if packs else "", shape)


def _names(matrix: _Matrix) -> list[str]:
    """Return the names that checkpoints give to this matrix's module in a layer."""
    if matrix.part == "experts":
        bases = [f"{mlp}.experts{e}" for mlp in _MLPS for e in (".0", "")]
    elif matrix.part == "shared":
        bases = [f"{mlp}.{shared}" for mlp in _MLPS for shared in _SHARED]
    else:
        bases = [*_MLPS]
    return [f"{base}.{leaf}" for base in bases for leaf in _LEAVES[matrix.role]]


_HEADS = ("lm_head", "model.lm_head", "language_model.lm_head", "embed_out")


def _outside(model: Model, scheme: Scheme, plain: DType) -> int | str | None:
    """Return the bytes of a model outside its FFNs: None if its parameters are unknown, or the modules whose packing is
    unknown. The projections of attention and other mixers are packed unless they are left out; embeddings and norms are
    not, except in formats that pack everything."""
    rest, stacks = model.non_ffn, {group.stack for group in model.groups}
    total = rest.params(stacks) if rest else None
    if rest is None or rest.parts is None or total is None:
        return None
    if not scheme.beyond_experts:
        return total * plain.block_bytes
    if not rest.listed:
        return f"the projections of {model.model_type} that belong to neither attention nor FFN"
    out, packed = 0, 0
    for layer, one in _layers_outside(rest, stacks):
        for matrix in one.projections:
            packing = scheme.in_layer(layer, [matrix.name])
            if packing and not rest.named:
                return f"the attention of {model.model_type}"
            if packing and scheme.usual_only and not matrix.name.startswith(_USUAL):
                return matrix.name
            if packing:
                out += packing.matrix_bytes(matrix.rows, matrix.columns)
                packed += matrix.params
    everywhere = scheme.default if scheme.default and scheme.default.everywhere else None
    head = scheme.of(_HEADS) if scheme.head else everywhere
    for part, packing in (("head", head), ("input embedding", everywhere)):
        columns = rest.parts["", part] // rest.vocabulary if rest.vocabulary else 0  # without the head's bias
        if packing and columns:
            out += packing.matrix_bytes(rest.vocabulary, columns)
            packed += rest.vocabulary * columns
    return out + (total - packed) * plain.block_bytes


def _layers_outside(rest: NonFFN, stacks: Collection[str]) -> Iterator[tuple[int, LayerParams]]:
    """Yield the number of each layer and its parameters outside the FFN, in the stacks and in layers without FFN."""
    for stack in stacks:
        yield from rest.layers.get(stack, {}).items()
    yield from rest.between.items()
