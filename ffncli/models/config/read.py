"""Read the model that a config.json describes. A family's row (families/) defines what the fields mean and what the
code fixes.

Gatedness and most biases are not in the config: they are in the family's row, as they follow from `model_type`. Tensor
names, if available, override them (`evidence/`). Facts: transformers 5.23 `configuration_*.py` and `modeling_*.py`.

Some text models have a second FFN in each layer for tokens that are not text: audio, learned queries, images, a page's
layout. Text tokens never pass through these FFNs, so they are not counted with the text model's FFNs, but the config
determines their size.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ffncli.block import activations, dtypes
from ffncli.block.activations import NO_LIMITS
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, size, steps, unit_ops
from ffncli.errors import FFNError, did_you_mean, shown, shown_path
from ffncli.models.config.attention import memories
from ffncli.models.config.families import (
    BY_TYPE,
    FAMILIES,
    OF_REPOSITORIES,
    REFUSED,
    TEXT_DEFAULTS,
    TEXT_TYPES,
    family_of,
)
from ffncli.models.config.family import Extra, Family, MoEFields, Stack, named_limits
from ffncli.models.config.non_ffn import non_ffn
from ffncli.models.config.unread import outside_note, require_read
from ffncli.models.files.strict_json import MOST_CONFIG_BYTES, Fields, read_object
from ffncli.models.model import OTHER_TOWERS, Group, Model, NotCounted, Resolved, grouped, ranges

MOST_LAYERS = 10_000  # the deepest known model has 126
TOWERS = [
    "text_config", "thinker_config", "llm_config", "language_config", "language_model_config", "text_model_config",
    "decoder", "decoder_config", "generator", "vlm_config", "esmc_config",
]  # fmt: skip
PREDICTION = "num_nextn_predict_layers|mtp_num_hidden_layers|num_mtp_layers|mtp_num_layers"  # multi-token prediction
_TOWERS_APART = NotCounted("other towers", OTHER_TOWERS)
# `compression_config` was used before compressed-tensors 0.7; `quantization` is MLX's.
_QUANTIZATION = ("quantization_config", "compression_config", "quantization")
_DEFAULTS = "defaults of transformers"
_INHERITED = ("model_type", "dtype", "torch_dtype", *_QUANTIZATION)


def read_config(path: Path, source: str) -> Resolved:
    """Read the model in a config.json. Raises FFNError with the file, the field and the value."""
    return from_config(read_object(path, MOST_CONFIG_BYTES, constants=True), source, shown_path(path))


def from_config(values: Mapping[str, Any], source: str, where: str, name: str | None = None) -> Resolved:
    """Build the model that a config describes; for a multimodal config, the model of its text tower (`text_config`)."""
    whole = Fields(values, where)
    config, evidence = text_tower(whole)
    towers = bool(evidence)
    missing = config.values.get("model_type") is None
    if missing and not _spelled(_class(config)):
        raise FFNError(
            f"{config.where}: model_type {'is null' if 'model_type' in config.values else 'is missing'}",
            "it names the family that the fields belong to: llama, gpt2, ...",
        )
    model_type = "" if missing else config.text("model_type")
    if why := REFUSED.get(str(whole.values.get("model_type"))) or REFUSED.get(model_type):
        named = whole.values["model_type"] if model_type not in REFUSED else model_type
        raise FFNError(f"{config.where}: model_type {shown(named)} is not covered", why)
    family_name, described, decided, assumed = _family_name(config, model_type)
    family = FAMILIES[family_name]
    groups = [g for stack in family.stacks for g in _stack(config, family, stack)]
    for part in family.parts:
        inner, reasons = _part(config, part)
        groups += inner
        evidence += [f"{part}: {line}" for line in reasons]
    if not groups:
        raise FFNError(f"{config.where}: no layer of this model has an FFN", "there is nothing to count")
    spec = groups[0].spec
    if not family.parts:
        by = f"model_type {model_type}" if decided == "model_type" else f"class {_class(config)}"
        evidence.append(f"{'gated' if spec.gated else 'plain'}: {by}")
    for at in dict.fromkeys(stack.at for stack in family.stacks):
        widths = _width_evidence(config.inside(at), family, groups)
        evidence += [f"{at}: {line}" if at else line for line in widths]
    evidence += [] if family.parts else _limited_units(groups)
    model = Model(
        name or _short_name(source), tuple(groups), family_name, _dtype(config), names=_names(config, family),
        non_ffn=non_ffn(config, described, groups), tied=_tied(config, values),
        extra_layers=config.integer(PREDICTION, 0, low=0, high=MOST_LAYERS),
    )  # fmt: skip
    if family.moe and not any(group.spec.moe for group in groups):
        _pass_over_experts(config, family.moe)
    whole_known = model.non_ffn is not None and model.non_ffn.parts is not None
    tables = () if whole_known else memories(config, family_name)  # a count of the whole model includes them
    tables = (*tables, *other_tokens(config, family_name, groups))
    defaults = [line for line in evidence if line.startswith(_DEFAULTS)]
    notes: tuple[str, ...] = (*filter(None, [assumed]), *defaults, *require_read(config, family_name), *_tables(groups))
    if config.not_run:
        refused = "; ".join(config.not_run)
        model, notes = replace(model, refused=refused), (*notes, f"counted, but cannot be run: {refused}")
    quantization = quantization_of(config)
    resolved = Resolved(
        model, source, evidence=tuple(evidence), notes=notes, quantization=quantization,
        not_counted=tuple(table for table in tables if table.parameters is None),
    )  # fmt: skip
    sized = [table for table in tables if table.parameters is not None]
    resolved = resolved.without(*sized, *([_TOWERS_APART] if towers else []))
    return resolved.noted(*filter(None, [outside_note(whole, config) if towers else ""]))


def _tables(groups: Sequence[Group]) -> list[str]:
    """Return notes on the token-id tables of groups, which do not count as parameters."""
    tabled = [group for group in groups if group.spec.moe and group.spec.moe.lookup]
    return [
        f"{group.stack}: in {len(group.layers)} layers, a table of {moe.lookup:,} × {moe.top_k} integers assigns"
        " experts to token ids; it has no parameters, so it is not counted"
        for group in tabled
        if (moe := group.spec.moe)
    ]


def _tied(config: Fields, whole_values: Mapping[str, Any]) -> bool | None:
    """Return tie_word_embeddings of the text model or of the whole config; None if both lack it or they differ."""
    values = [values.get("tie_word_embeddings") for values in (config.values, whole_values)]
    flags = {value for value in values if isinstance(value, bool)}
    return flags.pop() if len(flags) == 1 else None


def _family_name(config: Fields, model_type: str) -> tuple[str, str, str, str]:
    """Return (the family whose row describes the config, the model_type whose attention it has, `model_type` or
    `class`: what decided, a note or "").

    A model_type without a row may be a composite whose fields are at the top level, another spelling of a known one, or
    the name of repository code that runs a known class (`architectures`). A class that only a repository has decides
    whatever model_type is (Grok-2's is `git`, an image model's). Any other repository code (`auto_map`) with SiLU, an
    intermediate_size and no field that a row would have to know is counted as Llama's block. Raises FFNError if none of
    this holds.
    """
    made = _class(config)
    of_class = _spelled(made)
    by_type, by_class = f"model_type {shown(model_type)}", f"class {shown(made)}"
    read_as = f"{by_type} of {by_class} is read as" if model_type else f"{by_class} is read as"
    if of_class and BY_TYPE[of_class] in OF_REPOSITORIES and BY_TYPE.get(model_type) not in (None, BY_TYPE[of_class]):
        return BY_TYPE[of_class], of_class, "class", f"{read_as} {of_class}"
    if family := BY_TYPE.get(model_type):
        return family, TEXT_TYPES.get(model_type, model_type), "model_type", ""
    if family := BY_TYPE.get(text := TEXT_TYPES.get(model_type, "")):
        return family, text, "model_type", ""
    if known := _spelled(model_type):
        return BY_TYPE[known], TEXT_TYPES.get(known, known), "model_type", f"{by_type} is read as {known}"
    if of_class:
        return BY_TYPE[of_class], TEXT_TYPES.get(of_class, of_class), "class", f"{read_as} {of_class}"
    if (
        isinstance(config.values.get("auto_map"), Mapping)
        and activations.CANONICAL.get(str(config.get("hidden_act|activation_function", None)).lower()) == "silu"
        and all(type(config.values.get(name)) is int for name in ("hidden_size", "intermediate_size"))
    ):
        note = f"{by_type} has code of its own, assumed to run Llama's block: gate, up and down"
        return "llama", model_type, "model_type", f"{note} without biases; only its tensors would show this"
    raise FFNError(f"{config.where}: {by_type} is not known", _nearest_model_type(model_type))


def _class(config: Fields) -> str:
    """Return the only class that a config names (`architectures`); empty if there is none or several."""
    classes = config.values.get("architectures")
    return classes[0][:100] if isinstance(classes, list) and len(classes) == 1 and isinstance(classes[0], str) else ""


def _spelled(name: str) -> str | None:
    """Return the known model_type that a model_type or a class spells in another way."""
    name = re.sub(r"(For[A-Z]\w*|LMHeadModel|Model)$", "", name)
    return _SPELLED.get(_letters(name)) or _SPELLED.get(_letters(_LEFT_OUT.sub("", name.lower())))


def _letters(name: str) -> str:
    """Return a name without separators and capitals."""
    return re.sub(r"[^a-z0-9]", "", name.lower())


_LEFT_OUT = re.compile(r"[_-](text|vl|lm|model)\b|[_-](text|vl|lm|model)(?=_)")  # words that not every spelling has
# Later entries win: complete names before names without those words, `qwen2` before `qwen2_vl_text`.
_SPELLED = {_letters(_LEFT_OUT.sub("", name.lower())): name for name in sorted(BY_TYPE, key=len, reverse=True)}
_SPELLED |= {_letters(name): name for name in BY_TYPE}


def _nearest_model_type(model_type: str) -> str:
    """Return a hint with known names of the same version that differ in one letter; others are different models."""
    otherwise = "give the model's tensors (a directory or .safetensors file), which are counted without it"
    version = re.findall(r"\d", model_type)
    names = [name for name in BY_TYPE if re.findall(r"\d", name) == version and abs(len(name) - len(model_type)) < 2]
    # in a name of n letters, difflib rates one substituted letter 1 - 1/n and two 1 - 2/n; the cutoff is between them
    return did_you_mean(model_type, names, otherwise, cutoff=1 - 1.5 / max(len(model_type[:80]), 6))


def _names(config: Fields, family: Family) -> dict[str, str]:
    """Map our field names to the config's, for messages: the spelling that the config uses, else the usual spelling."""
    moe, stack = family.moe, family.stacks[0] if family.stacks else Stack()
    fields = {
        "d_model": family.d_model, "d_ff": stack.d_ff or family.d_ff, "activation": family.activation,
        "layers": stack.layers if isinstance(stack.layers, str) else None,
        "bias": None if isinstance(family.bias, bool) else family.bias[0],
        **({"experts": moe.experts, "moe.d_ff": moe.d_ff} if moe else {}),
    }  # fmt: skip
    return {ours: config.name(theirs) for ours, theirs in fields.items() if isinstance(theirs, str) and theirs}


def quantization_of(config: Fields) -> Mapping[str, Any] | None:
    """Return the quantization_config of a config or of its text_config, together with DeepSeek-V4's `expert_dtype`;
    None if there is none."""
    experts = {"expert_dtype": name} if (name := config.get("expert_dtype", None)) is not None else {}
    for values in (config.values, config.values.get("text_config")):
        if isinstance(values, Mapping):
            for key in _QUANTIZATION:
                if isinstance(quantization := values.get(key), Mapping):
                    return {**quantization, **experts}
    return experts or None


def _dtype(config: Fields) -> str | None:
    """Return the format of the stored weights according to the config; None if it is missing or unknown."""
    quantization = quantization_of(config) or {}
    method, bits = quantization.get("quant_method"), quantization.get("bits")
    if method == "bitsandbytes":
        method, bits = "bitsandbytes", 4 if quantization.get("load_in_4bit") or quantization.get("_load_in_4bit") else 8
    packed = {"gptq": f"int{bits}", "awq": f"int{bits}", "bitsandbytes": "nf4" if bits == 4 else "int8"}
    row = dtypes.find_storage(packed.get(str(method), method)) or dtypes.find(config.get("dtype|torch_dtype", None))
    return row.name if row else None


def text_tower(config: Fields) -> tuple[Fields, list[str]]:
    """Return the config itself, or the nested config of the text model, at any depth."""
    evidence: list[str] = []
    while name := next((n for n in TOWERS if config.values.get(n) is not None), None):
        family = family_of(config.values.get("model_type"))
        if family is not None and name not in family.text:
            break  # the family's own row reads the nested configs
        inner = config.inside(name)
        outer = {n: config.values[n] for n in _INHERITED if config.values.get(n)}
        if isinstance(whole := outer.get("model_type"), str):
            outer["model_type"] = TEXT_TYPES.get(whole, whole)
        values = {
            **outer,
            **{key: value for key, value in inner.values.items() if value is not None or key not in outer},
        }
        defaults = TEXT_DEFAULTS.get(str(values.get("model_type")), {})
        left_out = {key: value for key, value in defaults.items() if key not in values}
        config = Fields({**left_out, **values}, inner.where, inner.looked_up, inner.prefix, inner.not_run)
        evidence.append(f"widths: {name} of the multimodal config")
        if left_out:
            listed = ", ".join(f"{key} = {value}" for key, value in left_out.items())
            evidence.append(f"{_DEFAULTS}: {name} leaves {listed} to its class")
    return config, evidence


def _part(config: Fields, part: str) -> tuple[list[Group], tuple[str, ...]]:
    """Return (groups, evidence) of a nested config's model, whose only stack is named after the part."""
    fields = config.inside(part)
    family = family_of(fields.values.get("model_type"))
    if family is not None and (family.parts or len(family.stacks) != 1):
        message = f"{fields.where}: model_type {shown(fields.values['model_type'])} is not a single stack"
        raise FFNError(message, "an encoder-decoder is made of one encoder and one decoder")
    inner = from_config(fields.values, part, fields.where)
    config.not_run.update(dict.fromkeys(filter(None, [inner.model.refused])))
    return [replace(group, stack=part) for group in inner.model.groups], inner.evidence


def _layer_count(fields: Fields, stack: Stack) -> tuple[int, int]:
    """Return (layers in the stack, FFNs in a layer). Raises FFNError if they are impossible."""
    count = fields.integer(stack.layers, high=MOST_LAYERS) if isinstance(stack.layers, str) else stack.layers(fields)
    times = fields.integer(stack.times, high=MOST_LAYERS) if isinstance(stack.times, str) else stack.times
    if not 1 <= count * times <= MOST_LAYERS:
        most = f"a stack has from 1 to {MOST_LAYERS}"
        raise FFNError(f"{fields.where}: {count * times} FFNs in the stack '{stack.name}' are out of range", most)
    return count, times


def _stack(config: Fields, family: Family, stack: Stack) -> list[Group]:
    """Return the stack's layers in groups with equal specs, leaving out layers without an FFN."""
    fields = config.inside(stack.at)
    count, times = _layer_count(fields, stack)
    has_experts = family.moe.layers(fields, stack) if family.moe else lambda i: False
    extra = family.layer(fields, stack)
    runs = (stack.runs or family.runs)(fields)
    by_kind: dict[Any, FFNSpec] = {}
    by_runs: dict[int, dict[int, FFNSpec]] = {}
    for i in range(count):
        moe, more = has_experts(i), extra(i)
        if more is None or stack.kind == ("dense" if moe else "moe"):
            continue
        dense = None if moe else _dense_width(fields, family, stack, i, count)
        key = (moe, dense, tuple(sorted(more.items(), key=lambda item: item[0])))
        if key not in by_kind:
            by_kind[key] = _experts(fields, family, more) if moe else _dense(fields, family, stack, dense, more)
        often = runs if isinstance(runs, int) else runs[i]
        by_runs.setdefault(often, {}).update(dict.fromkeys(range(i * times, (i + 1) * times), by_kind[key]))
    return [group for often, specs in by_runs.items() for group in grouped(stack.name, specs, often, times)]


def _common(config: Fields, family: Family) -> dict[str, Any]:
    """Return the keyword arguments of FFNSpec that dense and MoE layers share."""
    eps, default = family.eps
    choices: dict[str, Any] = {
        "d_model": config.integer(family.d_model),
        "gated": family.gated,
        "norm": family.norm,
        "norm_position": family.position,
        "norm_weight": family.norm_weight,
        "norm_eps": config.number(eps, default) if eps else default,
        "residual": True,
    }
    if family.activation:
        choices["activation"] = config.text(family.activation, family.default_activation)
    choices["bias"] = family.bias if isinstance(family.bias, bool) else config.flag(*family.bias)
    choices |= family.adjust(config)
    label = config.name(family.activation or "activation")
    name = choices["activation"]
    choices["activation"], implied = activations.resolve(name, f"{config.where}: {label}")
    choices.setdefault("limits", named_limits(config, name))
    if implied and not choices["gated"]:
        raise FFNError(f"{config.where}: {label} {shown(name)} is a gated unit", "this family's blocks have no gate")
    return choices


def _dense_width(config: Fields, family: Family, stack: Stack, layer: int, count: int) -> int | None:
    """Return d_ff of a dense layer; None if no field has it: then the family's `multiple` or `layer` decides."""
    name = stack.d_ff or family.d_ff
    value = config.get(name, None) if name else None
    if value is None or name is None:
        return None
    if isinstance(value, list):
        if len(value) != count:
            raise config.wrong(name, value, f"one number per layer ({count})")
        return size(f"{config.where}: {config.name(name)}[{layer}]", value[layer])
    return config.integer(name)


def _dense(config: Fields, family: Family, stack: Stack, d_ff: int | None, extra: Extra) -> FFNSpec:
    choices = _common(config, family)
    if d_ff is None and family.multiple is not None:
        d_ff = family.multiple * choices["d_model"]
    if d_ff is not None:
        choices["d_ff"] = d_ff
    choices |= extra
    if "d_ff" not in choices:
        config.get(stack.d_ff or family.d_ff or "", kind="a width")  # raises FFNError, since the field is missing
        raise FFNError(f"{config.where}: no field of this family holds the width of its dense layers")
    return _spec(config, **choices)


def _experts(config: Fields, family: Family, extra: Extra) -> FFNSpec:
    row = family.moe
    assert row is not None
    choices = _common(config, family)
    if "d_ff" not in extra:
        choices["d_ff"] = config.integer(row.d_ff)
    routing = dict(row.routing(config))
    experts = routing.pop("experts", None) or config.integer(row.experts)
    top_k = routing.pop("top_k", None) or config.integer(row.top_k, high=experts)
    routing |= {name.removeprefix("moe."): value for name, value in extra.items() if name.startswith("moe.")}
    more = {name: value for name, value in extra.items() if not name.startswith("moe.")}
    return _spec(config, **choices | {"moe": MoE(experts, top_k, **routing)} | more)


def _pass_over_experts(config: Fields, row: MoEFields) -> None:
    """Mark the fields for experts as read: the model has no MoE layers, so these fields may have any value."""
    for names in (row.experts, row.d_ff, row.top_k):
        config.get(names, None)
    with suppress(FFNError):
        row.routing(config)


def _spec(config: Fields, **choices: Any) -> FFNSpec:
    """Build an FFNSpec; its errors name the config."""
    try:
        return FFNSpec(**choices)
    except FFNError as error:
        raise FFNError(f"{config.where}: {error.message}", error.hint) from None


def _width_evidence(config: Fields, family: Family, groups: Sequence[Group]) -> list[str]:
    """List the fields that determined the widths and the activation, and similar fields that were not used."""
    dense = [n for n in (family.d_ff, *(s.d_ff for s in family.stacks)) if n]
    kinds = {group.spec.moe is not None for group in groups}
    names = [
        family.d_model,
        *(dense if False in kinds else []),
        *([family.moe.d_ff] if family.moe and True in kinds else []),
    ]
    spelled = map(config.name, dict.fromkeys(names))  # an alternative spelling with a different value stays unread
    used = [n for n in spelled if config.get(n, None) is not None]
    out = ["widths: " + ", ".join(f"{n} = {shown(config.get(n))}" for n in dict.fromkeys(used))]
    shared = {group.spec.moe.shared_d_ff for group in groups if group.spec.moe}
    unused = [n for n in dense if n not in used and config.values.get(n) not in (None, *shared)]
    out += [f"widths: {n} = {shown(config.values[n])} is not used, every layer is MoE" for n in unused]
    if family.multiple and not any(n in used for n in dense):
        out.append(
            f"widths: d_ff = {family.multiple} × d_model, the family's rule"
            + (f" ({family.d_ff} not given)" if family.d_ff else "")
        )
    hidden_act, runs = config.values.get("hidden_act"), groups[0].spec.activation
    if isinstance(hidden_act, str) and activations.function_of(hidden_act) != runs:
        out.append(f"activation: {runs}; hidden_act is {shown(hidden_act)}, which this family's code does not use")
    return out


def _limited_units(groups: Sequence[Group]) -> list[str]:
    """Describe gate and up in blocks with limits; each description names its layers if layers differ."""
    formulas = [_unit_formula(group.spec) for group in groups]
    if len(set(formulas)) == 1:
        return [f"gate and up: {formulas[0]}"] if formulas[0] else []
    return [
        f"gate and up, {group.stack} {ranges(group.layers)}: {formula}"
        for group, formula in zip(groups, formulas, strict=True)
        if formula
    ]


def _unit_formula(spec: FFNSpec) -> str:
    """Return a unit with limits as text such as `min(silu(gate), 7) ⊙ clip(up, -7, 7)`, followed by the shared experts'
    unit if that differs; empty if there are no limits."""
    shared = spec.shared_limits if spec.moe and spec.moe.shared_experts else None
    units = {"": spec.limits, "shared experts ": spec.limits if shared is None else shared}
    if not spec.gated or set(units.values()) == {NO_LIMITS}:
        return ""
    from ffncli.block.analysis.gated import GatedUnit  # few models have limits

    texts = {who: GatedUnit("", *unit_ops(spec.activation, limits)).formula for who, limits in units.items()}
    return ", ".join(f"{who}{text}" for who, text in texts.items() if not who or text != texts[""])


def _short_name(source: str) -> str:
    """Return the directory's name, since the name in a config is often the parent model's."""
    path = Path(source)
    return (path.absolute().parent.name if path.suffix == ".json" else path.absolute().name) or source


_WHY = "text tokens never pass through them"


def other_tokens(config: Fields, family: str, groups: Sequence[Group]) -> tuple[NotCounted, ...]:
    """Return a model's second FFNs, which text tokens never pass through, with the norms that only these FFNs use."""
    if family not in FFNS:
        return ()
    whose, parameters = FFNS[family]
    return (NotCounted(f"FFNs of {whose}", _WHY, parameters(config, groups)),)


def _size(spec: FFNSpec) -> int:
    one = cost(steps(spec))
    return one.params + one.norm_params


def _the_same(config: Fields, groups: Sequence[Group]) -> int:
    """Count as many FFNs as the text model has, of the same size."""
    return sum(_size(group.spec) * len(group.layers) for group in groups)


def _matrices(config: Fields, groups: Sequence[Group]) -> int:
    """Count as many FFNs as the text model has, which share its norms."""
    return _the_same(config, [replace(group, spec=replace(group.spec, norm="none")) for group in groups])


def _layout(config: Fields, groups: Sequence[Group]) -> int:
    """Count the text model's FFNs with both widths divided by `channel_shrink_ratio`."""
    by = config.integer("channel_shrink_ratio", 4)
    narrow = [(replace(g.spec, d_model=g.spec.d_model // by, d_ff=g.spec.d_ff // by), len(g.layers)) for g in groups]
    return sum(_size(spec) * layers for spec, layers in narrow)


def _image_experts(config: Fields, groups: Sequence[Group]) -> int:
    """Count as many routed experts as text tokens have, with the config's second width and a separate router."""
    width = (config.integers("moe_intermediate_size") if config.get("moe_intermediate_size", None) else (1536, 512))[-1]
    sparse = [(g.spec, g.spec.moe, len(g.layers)) for g in groups]
    alone = [(replace(moe, shared_experts=0), spec, layers) for spec, moe, layers in sparse if moe]
    return sum(_size(replace(spec, d_ff=width, norm="none", moe=moe)) * layers for moe, spec, layers in alone)


def _images(config: Fields, groups: Sequence[Group]) -> int:
    """Count one FFN in each image-only layer and one in each layer with both streams."""
    layers = config.integer("r_layers") + config.integer("x_layers")
    return _size(groups[0].spec) * layers


def _aligners(config: Fields, groups: Sequence[Group]) -> int:
    """Count plain FFNs without biases that follow a LayerNorm, one for every few layers."""
    depth = config.integer("num_hidden_layers")
    every: int = max(depth // config.integer("aligner_num_add_layers", 8), 1)
    d_model = groups[0].spec.d_model
    d_ff = config.integer("aligner_ffn_mult", 4) * d_model
    return depth // every * (2 * d_model * d_ff + 2 * d_model)


# Maps each family to the tokens that its second FFNs process, and to a function that counts these FFNs' parameters.
FFNS: Mapping[str, tuple[str, Callable[[Fields, Sequence[Group]], int]]] = {
    "ernie4_5_vl_moe_text": ("image tokens", _image_experts),
    "cogvlm": ("image tokens", _matrices),
    "evolla": ("its protein aligners", _aligners),
    "higgs_audio_v2": ("audio tokens", _the_same),
    "instructblip_qformer": ("its learned queries", _the_same),
    "lilt": ("the page's layout", _layout),
    "lxmert": ("its image stream", _images),
}
