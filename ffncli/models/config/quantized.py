"""How a quantised model's matrices are stored, from its config alone (`quantization_config`), and the bytes of one.

A matrix takes the bytes of the tensors that the format's library writes for it: packed values, the scales and zeros of
groups, rows and tiles, and GPTQ's order of columns. Not counted are the numbers that a matrix has once, whatever its
size (the scale of a whole tensor, a shape, a table of code values). Sources: the writers' output (AutoGPTQ, AutoAWQ,
AutoRound, bitsandbytes, compressed-tensors, ModelOpt, torchao, MLX) and the configs of published models.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cached_property
from math import ceil
from typing import Any

from ffncli.errors import FFNError, shown
from ffncli.models.files.strict_json import Fields


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
_LAYERS = (
    "model.layers", "model.language_model.layers", "language_model.model.layers", "transformer.h", "layers",
    "backbone.layers", "model.decoder.layers", "gpt_neox.layers", "transformer.blocks", "biogpt.layers",
)  # fmt: skip


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
    quantization = {**quantization, **_mapping(quantization.get("quantization"))}  # ModelOpt's own file nests it
    config = Fields(quantization, f"{where}: quantization_config")
    method = str(quantization.get("quant_method") or "").lower().replace("-", "_")
    if not method and {"load_in_4bit", "load_in_8bit"} & {*quantization}:
        method = "bitsandbytes"  # before transformers wrote the method
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
    if config.values.get("checkpoint_format") == "marlin" or config.values.get("is_marlin_format") is True:
        packing = replace(packing, zero_bits=0, column_bytes=0)
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
    zero = 0 if str(config.values.get("version")).lower() == "marlin" else bits
    return Scheme(Packing(f"awq-{bits}bit", bits, group, 2, zero), usual_only=True)


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
    form, sparsity = config.values.get("format"), _mapping(config.values.get("sparsity_config")).get("format", "dense")
    if sparsity != "dense":
        raise _unknown(config, f"the sparsity {shown(sparsity)}")
    for group in _mapping(config.values.get("config_groups")).values():
        weights = _mapping(group).get("weights")
        if not isinstance(weights, Mapping):
            continue
        stored_as = _mapping(group).get("format") or form
        packing = _of_weights(Fields(weights, f"{config.where}: config_groups"), stored_as)
        targets = _mapping(group).get("targets")
        names = targets if isinstance(targets, list) and targets else ["Linear"]
        rules += [("*" if name == "Linear" else str(name), packing) for name in names]
    if not rules:
        raise _unknown(config, "weights without config_groups")
    return Scheme(None, tuple(rules), head=True)


def _of_weights(weights: Fields, form: object) -> Packing:
    """Read the description of one group's weights: type, bits, strategy, group size; `form` is how they are stored."""
    bits, kind = _bits(weights), weights.values.get("type", "int")
    if form in ("dense", "marlin-24"):
        raise _unknown(weights, f"weights in the format {shown(form)}")
    if kind == "int" and form in ("int-quantized", "naive-quantized", "float-quantized"):
        bits = 8  # a value of fewer bits takes a byte
    strategy = weights.values.get("strategy") or ("group" if weights.values.get("group_size") else "tensor")
    group, tile = 0, None
    scale = 2.0  # bf16
    if strategy in ("group", "tensor_group"):
        group = _group(weights, "group_size")
    elif strategy == "block":
        sizes = weights.values.get("block_structure")
        if isinstance(sizes, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", sizes):
            sizes = [int(size) for size in sizes.split("x")]
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
        if not config.values.get("load_in_8bit", config.values.get("_load_in_8bit", True)):
            raise _unknown(config, "weights in neither 4 nor 8 bits")
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
    tables = config.values.get("include_input_output_embeddings") is True
    if name.startswith("int4weightonly"):
        group = _group(Fields(arguments, config.where), "group_size", 128)
        return Scheme(Packing("torchao-int4", 4, group, 4, everywhere=tables))  # scale and zero in bf16
    by = str(arguments.get("granularity", "row" if "weightonly" in name or name.startswith("int8") else "")).lower()
    if name.startswith(("int8weightonly", "int8dynamicactivationint8weight")):
        grouped = {**arguments, **_mapping(_mapping(arguments.get("granularity")).get("_data"))}
        group = _group(Fields(grouped, config.where), "group_size", 0)
        scales = (0, 0) if "tensor" in by else (4, 8)
        return Scheme(Packing("torchao-int8", 8, group, *scales, everywhere=tables))
    if name.startswith("float8"):
        return Scheme(Packing("torchao-fp8", 8, 0, 4 if "row" in by else 0, everywhere=tables))
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
