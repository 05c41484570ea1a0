"""Read models that no family's row describes: blocks come from the tensors, other facts from a config's usual fields.

Such models are checkpoints with an unknown model_type or without a config.json, and GGUF files. GGUF metadata give the
widths, but not gatedness, activation, norm or routing, which llama.cpp's code fixes for each architecture name. If the
architecture is a known family under another name, the metadata are converted to the family's config fields, and its row
supplies the rest; whatever the tensors do not confirm stays unknown.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from ffncli.block import activations
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError, shown
from ffncli.models.config.families import BY_TYPE, family_of
from ffncli.models.config.family import EXPERTS, TOP_K
from ffncli.models.config.read import PREDICTION, from_config, quantization_of
from ffncli.models.config.unread import in_words, unread_arithmetic
from ffncli.models.evidence.agreement import (
    NOT_WHOLE,
    RecognisedTensors,
    TensorBlocks,
    absent_files,
    misfit,
    not_counted,
    params_of,
    recognised,
    with_tensors,
)
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.gguf import CONFIG_KEYS, GGUFFile, gguf_config
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.inventory import shared_name, take_inventory
from ffncli.models.files.packing import logical
from ffncli.models.files.strict_json import REQUIRED, Fields
from ffncli.models.model import IN_ALL, Disagreement, Group, Model, Resolved, StoredSize, grouped, unknown_note
from ffncli.models.tensors.ffns import Item
from ffncli.models.tensors.matching import items_of, spots_by_name, stacks_of
from ffncli.models.tensors.recognise import Layers, StoredFFN, layer_numbers, stem_of

_ACTIVATION = "hidden_act|hidden_activation|activation_function|activation|dense_act_fn|ffn_act_fn|hidden_activation_fn"
_D_MODEL = "hidden_size|d_model|n_embd|dim|embed_dim"
_FIELDS = {
    "d_model": _D_MODEL, "layers": "num_hidden_layers|n_layer|n_layers|num_layers", "experts": EXPERTS,
    "width": "intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size",
}  # fmt: skip

_LIMITS = re.compile(r"swiglu_clamp|activation_situ")  # llama.cpp's names for the limits of a gated unit, in GGUF keys


@dataclass(frozen=True)
class Metadata:
    """Facts from a config's usual fields or from a GGUF file's metadata, in addition to the tensors.

    `checks` maps our names to (the name in the metadata, the value to compare with the tensors); `width` is a dense
    d_ff, which may be the total width of gate and up, or the width of each. `extra_layers` is the number of layers that
    may be stored in addition to the metadata's layer count. A config with an unknown model_type is not `binding`: its
    fields may have other meanings, so differences are only noted. `model` supplies the norms and the routing if the
    blocks match it. `refused` is the reason why the blocks cannot be run.
    """

    d_model: int | None = None
    top_k: int | None = None
    activation: str | None = None
    checks: Mapping[str, tuple[str, Any]] = field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    extra_layers: int = 0
    tied: bool | None = None
    teller: str = "the config says"
    binding: bool = False
    model: Model | None = None
    refused: str = ""


def from_tensors(checkpoint: Checkpoint, config: Fields | None, source: str, name: str, unknown: str = "") -> Resolved:
    """Read a model from its tensors. The `config`, if any, has a model_type without a row, or `unknown` fields
    (described in words) that the row does not know."""
    inventory = take_inventory(checkpoint)
    alone = Metadata(evidence=("no config.json: everything is read from the tensors",))
    metadata = _from_config(config, unknown) if config else alone
    quantization = quantization_of(config) if config else None
    items, absent = items_of(inventory, quantization), absent_files(inventory)
    tensors = _without_prediction(recognised(items, metadata.d_model, inventory.where, absent))
    resolved = replace(_resolved(tensors, metadata, source, name, checkpoint), quantization=quantization)
    return resolved.noted(f"{inventory.where}: {absent}; they contain no FFN") if absent else resolved


_PREDICTION = re.compile(r"(?:^|[._])(?:mtp|nextn)")


def _without_prediction(tensors: RecognisedTensors) -> RecognisedTensors:
    """Move layers that predict more tokens to the FFNs outside the model, unless there are no other layers."""
    more = {prefix: layers for prefix, layers in tensors.layers.items() if _PREDICTION.search(prefix)}
    if len(more) == len(tensors.layers):
        return tensors
    kept = {prefix: layers for prefix, layers in tensors.layers.items() if prefix not in more}
    return replace(tensors, layers=kept, others={**tensors.others, **more})


def from_gguf(file: GGUFFile, source: str) -> Resolved:
    """Read the model in a GGUF file; metadata that contradict the tensors are a difference, as with a config."""
    stored = {t.name: TensorInfo(t.format, t.shape, t.bytes) for t in file.tensors}
    items: dict[str, Item] = {}
    for n, m in logical(stored, None, file.where).items():
        alike = items.get(shared_name(n))
        name = n if alike and (alike.shape, alike.format) != (m.shape, m.format) else shared_name(n)
        count = alike.count + 1 if alike and name != n else 1
        items[name] = Item(m.shape, m.params, m.bytes + (alike.bytes if alike and name != n else 0), count, m.format)
    path = Path(source).absolute()
    name = path.stem if path.suffix == ".gguf" else path.name
    metadata = _from_metadata(file)
    tensors = recognised(items, metadata.d_model, file.where)
    return _resolved(tensors, metadata, source, name, checkpoint_of(file))


def _from_config(config: Fields, unknown: str) -> Metadata:
    kind = config.values.get("model_type")
    why = f"has no {unknown}" if unknown else "is not known"
    act = config.get(_ACTIVATION, None)
    checks = {ours: (config.name(theirs), config.get(theirs, None)) for ours, theirs in _FIELDS.items()}
    refused, notes = _unread(unknown or unread_arithmetic(config), "its config has fields")
    return Metadata(
        _positive(config, _D_MODEL),
        _positive(config, TOP_K),
        activations.CANONICAL.get(act.lower()) if isinstance(act, str) else None,
        checks={ours: check for ours, check in checks.items() if type(check[1]) is int and check[1] > 0},
        evidence=(f"model_type {shown(kind)} {why}: widths, gate and biases from the tensors",),
        notes=notes,
        refused=refused,
        extra_layers=_positive(config, PREDICTION) or 0,
        tied=tied if isinstance(tied := config.get("tie_word_embeddings", None), bool) else None,
    )


def _unread(fields: str, where: str) -> tuple[str, tuple[str, ...]]:
    """Return the reason why the blocks cannot be run, and notes. `fields` describes the config's arithmetic fields that
    nothing reads."""
    if not fields:
        return "", ()
    note = f"not read, but may change what its FFN computes: {fields}"
    return f"{where} that may change what its FFN computes ({fields})", (note,)


def _positive(config: Fields, names: str) -> int | None:
    value = config.get(names, None)
    return value if type(value) is int and value > 0 else None


def _from_metadata(file: GGUFFile) -> Metadata:
    """Read the metadata of a GGUF file. Its architecture is the family's name, apart from hyphens and underscores."""
    config = gguf_config(file)
    family = family_of(BY_TYPE.get(file.architecture) or file.architecture.replace("moe", "_moe"))
    act = family.default_activation if family and family.default_activation is not REQUIRED else None
    moe = "expert_d_ff" in config
    keys = {"d_model": "d_model", "layers": "layers", "experts": "experts", "d_ff": "expert_d_ff" if moe else "d_ff"}
    checks = {
        ours: (f"{file.architecture}.{CONFIG_KEYS[theirs].key}", config[theirs])
        for ours, theirs in keys.items()
        if theirs in config
    }
    evidence = [f"GGUF of architecture {file.architecture}: widths, gate and biases from the tensors"]
    evidence += [f"activation: {act}, from the family {file.architecture}; GGUF does not store it"] if act else []
    canonical = activations.CANONICAL.get(act) if act else None
    # the order of these limits depends on llama.cpp's code for the architecture
    limits = {key: value for key, value in file.metadata.items() if _LIMITS.search(key)}
    limits = {key: value for key, value in limits.items() if (any(value) if isinstance(value, list) else value)}
    refused, notes = _unread(in_words(limits), "its metadata have keys")
    return Metadata(
        config.get("d_model"),
        config.get("top_k"),
        canonical,
        checks,
        tuple(evidence),
        notes,
        tied=all(tensor.name != "output.weight" for tensor in file.tensors),  # llama.cpp's rule
        teller="the metadata say",
        binding=True,
        model=described(file),
        refused=refused,
    )


# --- the blocks -------------------------------------------------------------------------------------------------------


def _resolved(
    tensors: RecognisedTensors, metadata: Metadata, source: str, name: str, checkpoint: Checkpoint
) -> Resolved:
    """Build the model. Raises FFNError if an absent file contains tensors of the model's FFNs."""
    layers, where = tensors.layers, tensors.where
    ffns = [ffn for numbered in layers.values() for several in numbered.values() for ffn in several]
    if tensors.absent and not all(ffn.whole for ffn in ffns):
        advice = "they contain FFN tensors, whose shapes are needed if there is no config"
        raise FFNError(f"{where}: {tensors.absent}", advice)
    learned = next((ffn.shows["activation"] for ffn in ffns if "activation" in ffn.shows), None)
    metadata = replace(metadata, activation=learned or metadata.activation)
    unknown = {"norm"} | ({"activation"} if metadata.activation is None else set())
    unknown |= {"top_k"} if any(ffn.experts for ffn in ffns) and metadata.top_k is None else set()
    stacks = stacks_of(layers)
    groups = [g for prefix in layers for g in _groups(prefix, stacks[prefix], layers[prefix], metadata, where)]
    evidence, model_type = metadata.evidence, ""
    if (agreed := confirmed(groups, metadata.model)) and metadata.model:
        groups, unknown, model_type = agreed, set(), metadata.model.model_type
        evidence += (f"norms, routing and activation: taken from model_type {model_type}, as in llama.cpp",)
    model = Model(
        name, tuple(groups), model_type, tied=metadata.tied, unknown=frozenset(unknown), refused=metadata.refused
    )
    resolved = Resolved(
        model, source, evidence=evidence, notes=metadata.notes, from_tensors=True, checkpoint=checkpoint
    )
    blocks = _blocks(model, tensors, metadata, ffns)
    # the remaining tensors certainly belong to the text model only if there is a single plain stack
    plain = not tensors.absent and len(layers) == 1 and not blocks.differences
    return with_tensors(resolved, blocks, tensors, outside=plain)


def _blocks(model: Model, tensors: RecognisedTensors, metadata: Metadata, ffns: Sequence[StoredFFN]) -> TensorBlocks:
    """Return the blocks of a model that was read from its tensors, with the differences from its metadata."""
    layers = tensors.layers
    prefix, numbered = next(iter(layers.items()))
    layer, first = min(numbered.items(), key=lambda item: item[0])
    tensor = (stem_of(prefix, layer) + first[0].tensor).replace("#", "0")
    kind = "gated" if first[0].shows.get("gated") else "plain"
    differences = tuple(_differences(model.groups, layers, tensors.items, metadata, tensor))
    doubts = () if metadata.binding else tuple(f"{difference}: the tensors decide" for difference in differences)
    unknown = [unknown_note(model.unknown)] if model.unknown else []
    formats = tuple(dict.fromkeys(form for ffn in ffns for form in ffn.formats))
    return TensorBlocks(
        model.groups,
        spots_by_name(layers),
        StoredSize(sum(ffn.params for ffn in ffns), sum(ffn.bytes for ffn in ffns), formats),
        (*_uncounted(layers, metadata), *(differences if metadata.binding else ())),
        (f"{kind}: tensor {shown(tensor, 120)}",),
        (*doubts, *unknown),
        tuple(not_counted(tensors.others)),
    )


def _groups(
    prefix: str, stack: str, by_layer: Mapping[int, tuple[StoredFFN, ...]], metadata: Metadata, where: str
) -> list[Group]:
    """Return the layers under one prefix in groups; the FFNs of a layer stay in order."""
    per_layer = max(map(len, by_layer.values()))
    specs = {
        layer * per_layer + i: _spec(ffn, metadata, f"{where}: {prefix}.{layer}")
        for layer, ffns in sorted(by_layer.items())
        for i, ffn in enumerate(ffns)
    }
    return grouped(stack, specs, 1, per_layer)


def _spec(ffn: StoredFFN, metadata: Metadata, where: str) -> FFNSpec:
    if ffn.uneven:
        raise FFNError(f"{where} has {ffn.uneven}", NOT_WHOLE)
    shows = dict(ffn.shows)
    if not {"d_model", "d_ff"} <= shows.keys():
        what = " and ".join(f"{shown(name)} {shown(list(shape))}" for name, shape in ffn.misfit)
        problem = (
            f"{what} do not fit together" if what else f"the shapes of {shown(ffn.tensor)} do not determine the widths"
        )
        raise FFNError(f"{where}: {problem}", "" if what else "add a config.json, which has d_model and d_ff")
    routing = {field.name: shows.pop(field.name) for field in fields(MoE) if field.name in shows}
    if routing["shared_routed"]:
        routing["shared_d_ff"] = None  # each shared expert is as wide as a routed expert
    else:
        routing |= {"shared_experts": int(routing["shared_d_ff"] > 0), "shared_d_ff": routing["shared_d_ff"] or None}
    moe = MoE(top_k=min(metadata.top_k or 1, ffn.experts), **routing) if ffn.experts else None
    dense = {**shows, "activation": metadata.activation or "silu", "gated": bool(shows.get("gated"))}
    return FFNSpec(**dense, moe=moe)


# --- differences ------------------------------------------------------------------------------------------------------


def _uncounted(layers: Layers, metadata: Metadata) -> list[Disagreement]:
    """Return a difference for each FFN whose tensors contain parameters that its block lacks."""
    out: dict[tuple[str, str, str], Disagreement] = {}
    for prefix, by_layer in layers.items():
        for layer, ffns in by_layer.items():
            for ffn in ffns:
                for new in _unlike(ffn, _spec(ffn, metadata, prefix), f"{prefix}.{layer}"):
                    key = (new.name, new.config, new.tensors)
                    out[key] = replace(out[key], layers=out[key].layers + 1) if key in out else new
    return list(out.values())


def _unlike(ffn: StoredFFN, spec: FFNSpec, at: str) -> Iterator[Disagreement]:
    counted = params_of(spec)
    if counted != ffn.params:
        name = ffn.loose[0] if ffn.loose else ffn.tensor
        yield Disagreement(
            IN_ALL, IN_ALL, str(counted), str(ffn.params), f"{at}.{name}".replace("#", "0"), teller="the block has"
        )
    if ffn.misfit:
        yield replace(misfit(ffn, spec, at), teller="the block has")


def _differences(
    groups: Sequence[Group], layers: Layers, items: Mapping[str, Item], metadata: Metadata, tensor: str
) -> Iterator[Disagreement]:
    """Yield the differences between the config or metadata and the tensors."""
    main = max(groups, key=lambda group: len(group.layers)).spec
    most = max((g for g in groups if g.spec.moe), key=lambda group: len(group.layers), default=None)
    experts = most.spec if most else None
    d_ff = (experts if "expert" in metadata.checks.get("d_ff", ("",))[0] and experts else main).d_ff
    routed = experts.moe.experts if experts and experts.moe else 0
    by_tensors = {"d_model": main.d_model, "d_ff": d_ff, "experts": routed}
    numbered = layer_numbers(items)
    numbers = {len(numbered.get(prefix, (0,))) for prefix in layers}
    for name, (theirs, value) in metadata.checks.items():
        if type(value) is not int:
            continue
        if name == "layers":
            wrong = not any(value <= number <= value + metadata.extra_layers for number in numbers)
            stored = max(numbers)
        elif name == "width":
            stored = main.d_ff
            wrong = experts is None and len(groups) == 1 and value not in (stored, 2 * stored, stored / 2)
        else:
            stored = by_tensors[name]
            wrong = value != stored and not (name == "experts" and value + stored <= 1)
        if wrong:
            yield Disagreement(name, theirs, str(value), str(stored), tensor, teller=metadata.teller)


# maps an architecture's name in llama.cpp to the model_type; `llama` with experts is Mixtral
_FAMILIES: Mapping[str, str] = {
    "llama": "llama", "mistral3": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3",
    "olmo2": "olmo2", "olmoe": "olmoe", "smollm3": "smollm3", "seed_oss": "seed_oss", "gpt2": "gpt2",
    "starcoder2": "starcoder2", "gpt-oss": "gpt_oss",
}  # fmt: skip
_RENORMALISED = {"qwen3moe": True}  # fixed in llama.cpp's code, absent from the metadata; otherwise the family's value


def checkpoint_of(file: GGUFFile) -> Checkpoint:
    """Build a checkpoint from a GGUF file's tensors; dtypes are GGML's formats, shapes are torch's."""
    folder = file.tensors[0].path.parent if file.tensors else Path()
    files = {tensor.name: tensor.path.name for tensor in file.tensors}
    headers: dict[str, dict[str, TensorInfo]] = {}
    starts: dict[str, dict[str, int]] = {}
    for tensor in file.tensors:
        info = TensorInfo(tensor.format, tensor.shape, tensor.bytes)
        headers.setdefault(tensor.path.name, {})[tensor.name] = info
        starts.setdefault(tensor.path.name, {})[tensor.name] = tensor.start
    return Checkpoint(file.where, folder, files, False, {}, headers, True, starts)


def described(file: GGUFFile) -> Model | None:
    """Read the model from its metadata alone, as a config of its family; None if it does not describe a model."""
    config = gguf_config(file)
    model_type = _FAMILIES.get(file.architecture)
    if model_type == "llama" and config.get("experts"):
        model_type = "mixtral"
    family = family_of(model_type)
    if family is None:
        return None
    values: dict[str, Any] = {"model_type": model_type, **_sizes(config, file)}
    layers = family.stacks[0].layers
    for usual, theirs in (
        ("hidden_size", family.d_model),
        ("intermediate_size", family.d_ff),
        ("num_hidden_layers", layers),
    ):
        if isinstance(theirs, str) and usual in values:
            values[theirs.partition("|")[0]] = values.pop(usual)
    if family.eps[0] and (eps := _epsilon(file)) is not None:
        values[family.eps[0].partition("|")[0]] = eps
    try:
        return from_config(values, file.where, file.where).model
    except FFNError:
        return None


def confirmed(groups: Sequence[Group], model: Model | None) -> list[Group] | None:
    """Return the tensors' groups with the norms and the routing of `model`; None if a layer contradicts `model`."""
    if model is None:
        return None
    by_layer = {layer: group.spec for group in model.groups for layer in group.layers}
    out: list[Group] = []
    for group in groups:
        specs = {layer: _agreed(group.spec, by_layer.get(layer)) for layer in group.layers}
        if None in specs.values():
            return None
        out += grouped(group.stack, {layer: spec for layer, spec in specs.items() if spec}, per_layer=group.per_layer)
    return out


def _sizes(config: Mapping[str, Any], file: GGUFFile) -> dict[str, Any]:
    """Return the widths and expert counts that are present, under the usual config names."""
    experts = config.get("experts")
    names = {
        "hidden_size": "d_model", "intermediate_size": "d_ff", "num_hidden_layers": "layers",
        "num_experts_per_tok": "top_k", "moe_intermediate_size": "expert_d_ff",
        "shared_expert_intermediate_size": "shared_d_ff",
    }  # fmt: skip
    out = {theirs: config[ours] for theirs, ours in names.items() if ours in config}
    out |= {name: list(value) for name, value in out.items() if isinstance(value, tuple)}
    if experts:
        out |= dict.fromkeys(("num_experts", "num_local_experts"), experts)
        flag = file.metadata.get(f"{file.architecture}.expert_weights_norm", _RENORMALISED.get(file.architecture))
        out |= {"norm_topk_prob": flag} if isinstance(flag, bool) else {}
        if (width := config.get("expert_d_ff")) and file.architecture in ("gpt-oss", "olmoe", "llama"):
            out["intermediate_size"] = width
            out.pop("moe_intermediate_size")
    return out


def _epsilon(file: GGUFFile) -> float | None:
    """Return the norm's epsilon as the shortest decimal that rounds to the float32 stored by llama.cpp."""
    fields = Fields(file.metadata, file.where)
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        value = fields.get(f"{file.architecture}.attention.{name}", None)
        if isinstance(value, float) and 0 <= value < 1:
            return float(f"{value:.7g}")
    return None


def _agreed(stored: FFNSpec, spec: FFNSpec | None) -> FFNSpec | None:
    """Return `spec` if the tensors confirm it, else None."""
    if spec is None or (stored.moe is None) != (spec.moe is None):
        return None
    same = (stored.d_model, stored.d_ff, stored.gated, stored.bias) == (spec.d_model, spec.d_ff, spec.gated, spec.bias)
    if stored.moe and spec.moe:
        same = same and stored.moe.experts == spec.moe.experts
        same = same and bool(stored.moe.shared_experts) == bool(spec.moe.shared_experts)
    if not same:
        return None
    # converters add the 1 of Gemma's norms to the stored weights
    return replace(spec, norm_weight="plain") if spec.norm_weight == "one_plus" else spec
