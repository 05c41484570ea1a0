"""Models that no family's row describes: their blocks as the tensors show them, and what a config adds by usual names.

Such are a checkpoint whose model_type is not known, one without a config.json, and every GGUF file, whose metadata say
the widths but neither gatedness nor activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ffncli.block import activations
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError, shown
from ffncli.models.config.families import BY_TYPE, family_of, refusal
from ffncli.models.config.family import EXPERTS, TOP_K
from ffncli.models.config.read import PREDICTION, quantization_of
from ffncli.models.evidence.agreement import TensorBlocks, misfit, not_counted, params_of
from ffncli.models.evidence.from_gguf import checkpoint_of, confirmed, described
from ffncli.models.evidence.recognised import NOT_WHOLE, RecognisedTensors, absent_files, recognised, with_tensors
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.fields import REQUIRED, Fields
from ffncli.models.files.gguf import GGUFFile, gguf_config
from ffncli.models.files.inventory import take_inventory
from ffncli.models.model import IN_ALL, Disagreement, Group, Model, Resolved, StoredSize, grouped, unknown_note
from ffncli.models.tensors.items import items_of
from ffncli.models.tensors.matching import spots_by_name, stacks_of
from ffncli.models.tensors.recognise import Found, Layers, layer_numbers
from ffncli.models.tensors.shapes import Item

_ACTIVATION = "hidden_act|hidden_activation|activation_function|activation|dense_act_fn|ffn_act_fn|hidden_activation_fn"
_D_MODEL = "hidden_size|d_model|n_embd|dim|embed_dim"
_FIELDS = {
    "d_model": _D_MODEL, "layers": "num_hidden_layers|n_layer|n_layers|num_layers", "experts": EXPERTS,
    "width": "intermediate_size|ffn_dim|d_ff|n_inner|ffn_hidden_size",
}  # fmt: skip
_KEYS = {"d_model": "embedding_length", "layers": "block_count", "experts": "expert_count",
         "d_ff": "feed_forward_length", "expert_d_ff": "expert_feed_forward_length"}  # fmt: skip


@dataclass(frozen=True)
class Metadata:
    """What is known but for the tensors: by a config's usual field names, or a GGUF file's metadata.

    `checks` are what the tensors are held to: our name → (its name there, its value); `width` is a dense d_ff that may
    mean gate and up together, or one of them. `extra_layers` may be stored beyond the number that is given. What is not
    `binding` is a config of an unknown model_type, whose fields may mean other things: it is noted where it differs.
    `known` has the norms and the routing, for blocks that are as it says.
    `refused` is why its blocks cannot be said.
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
    known: Model | None = None
    refused: str = ""


def from_tensors(checkpoint: Checkpoint, config: Fields | None, source: str, name: str) -> Resolved:
    """The model whose tensors these are; `config` is that of a model_type without a row, or None.

    Raises FFNError, saying what was looked for, where no FFN is recognised, and naming a file that is not here where
    it has what is needed.
    """
    inventory = take_inventory(checkpoint)
    metadata = _from_config(config) if config else Metadata(evidence=("no config.json: everything from the tensors",))
    quantization = quantization_of(config) if config else None
    items, absent = items_of(inventory, quantization), absent_files(inventory)
    tensors = recognised(items, metadata.d_model, inventory.where, absent)
    resolved = replace(_resolved(tensors, metadata, source, name, checkpoint), quantization=quantization)
    return resolved.noted(f"{inventory.where}: {absent}; no FFN is in them") if absent else resolved


def from_gguf(file: GGUFFile, source: str) -> Resolved:
    """The model in a GGUF file. What its metadata contradict is a difference, as between a config and tensors."""
    items = {t.name: Item(t.shape, t.params, t.bytes, 1, t.format) for t in file.tensors}
    path = Path(source).absolute()
    name = path.stem if path.suffix == ".gguf" else path.name
    metadata = _from_metadata(file)
    tensors = recognised(items, metadata.d_model, file.where)
    return _resolved(tensors, metadata, source, name, checkpoint_of(file))


def _from_config(config: Fields) -> Metadata:
    kind = config.values.get("model_type")
    reason = refusal(kind)
    why = f"is not covered ({reason})" if reason else "is not known"
    act = config.get(_ACTIVATION, None)
    checks = {ours: (config.name(theirs), config.get(theirs, None)) for ours, theirs in _FIELDS.items()}
    return Metadata(
        _positive(config, _D_MODEL),
        _positive(config, TOP_K),
        activations.CANONICAL.get(act.lower()) if isinstance(act, str) else None,
        checks={ours: said for ours, said in checks.items() if type(said[1]) is int and said[1] > 0},
        evidence=(f"model_type {shown(kind)} {why}: widths, gate and biases from the tensors",),
        notes=(f"model_type {kind} is not covered: {reason}",) if reason else (),
        refused=reason,
        extra_layers=_positive(config, PREDICTION) or 0,
        tied=tied if isinstance(tied := config.get("tie_word_embeddings", None), bool) else None,
    )


def _positive(config: Fields, names: str) -> int | None:
    value = config.get(names, None)
    return value if type(value) is int and value > 0 else None


def _from_metadata(file: GGUFFile) -> Metadata:
    """A GGUF architecture is a family's name but for a hyphen or an underscore; the activation is that family's."""
    told = gguf_config(file)
    family = family_of(BY_TYPE.get(file.architecture) or file.architecture.replace("moe", "_moe"))
    act = family.default_activation if family and family.default_activation is not REQUIRED else None
    moe = "expert_d_ff" in told
    keys = {"d_model": "d_model", "layers": "layers", "experts": "experts", "d_ff": "expert_d_ff" if moe else "d_ff"}
    checks = {ours: (f"{file.architecture}.{_KEYS[theirs]}", told[theirs]) for ours, theirs in keys.items()
              if theirs in told}  # fmt: skip
    evidence = [f"GGUF of architecture {file.architecture}: widths, gate and biases from the tensors"]
    evidence += [f"activation: {act}, that of the family {file.architecture}; GGUF does not say it"] if act else []
    canonical = activations.CANONICAL.get(act) if act else None
    return Metadata(
        told.get("d_model"),
        told.get("top_k"),
        canonical,
        checks,
        tuple(evidence),
        tied=all(tensor.name != "output.weight" for tensor in file.tensors),  # llama.cpp's rule
        teller="the metadata say",
        binding=True,
        known=described(file),
    )


# --- the blocks -------------------------------------------------------------------------------------------------------


def _resolved(
    tensors: RecognisedTensors, metadata: Metadata, source: str, name: str, checkpoint: Checkpoint
) -> Resolved:
    """Of a checkpoint with absent files, only what has all its tensors can be a model."""
    layers, where = tensors.layers, tensors.where
    ffns = [ffn for numbered in layers.values() for several in numbered.values() for ffn in several]
    if tensors.absent and not all(ffn.whole for ffn in ffns):
        advice = "they have tensors of FFNs, whose shapes are needed without a config"
        raise FFNError(f"{where}: {tensors.absent}", advice)
    learned = next((ffn.activation for ffn in ffns if ffn.activation), None)
    metadata = replace(metadata, activation=learned or metadata.activation)
    unknown = {"norm"} | ({"activation"} if metadata.activation is None else set())
    unknown |= {"top_k"} if any(ffn.experts for ffn in ffns) and metadata.top_k is None else set()
    stacks = stacks_of(layers)
    groups = [g for prefix, seen in layers.items() for g in _groups(prefix, stacks[prefix], seen, metadata, where)]
    evidence, model_type = metadata.evidence, ""
    if (agreed := confirmed(groups, metadata.known)) and metadata.known:
        groups, unknown, model_type = agreed, set(), metadata.known.model_type
        evidence += (f"norms, routing and activation: those of {model_type}, as in llama.cpp",)
    model = Model(
        name, tuple(groups), model_type, tied=metadata.tied, unknown=frozenset(unknown), refused=metadata.refused
    )  # fmt: skip
    resolved = Resolved(
        model, source, evidence=evidence, notes=metadata.notes, from_tensors=True, checkpoint=checkpoint
    )  # fmt: skip
    blocks = _blocks(model, tensors, metadata, ffns)
    # What lies outside the FFNs is told apart in one plain stack only.
    plain = not tensors.absent and len(layers) == 1 and not blocks.differences
    return with_tensors(resolved, blocks, tensors, outside=plain)


def _blocks(model: Model, tensors: RecognisedTensors, metadata: Metadata, ffns: Sequence[Found]) -> TensorBlocks:
    """The blocks of a model that its tensors made, with what its metadata say otherwise."""
    layers = tensors.layers
    prefix, numbered = next(iter(layers.items()))
    layer, first = min(numbered.items(), key=lambda item: item[0])
    tensor = f"{prefix}.{layer}.{first[0].tensor}".replace("#", "0")
    told = tuple(_differences(model.groups, layers, tensors.items, metadata, tensor))
    doubts = () if metadata.binding else tuple(f"{difference}: the tensors count" for difference in told)
    unknown = [unknown_note(model.unknown)] if model.unknown else []
    formats = tuple(dict.fromkeys(form for ffn in ffns for form in ffn.formats))
    return TensorBlocks(
        model.groups,
        spots_by_name(layers),
        StoredSize(sum(ffn.params for ffn in ffns), sum(ffn.bytes for ffn in ffns), formats),
        (*_uncounted(layers, metadata), *(told if metadata.binding else ())),
        (f"{'gated' if first[0].gated else 'plain'}: tensor {shown(tensor, 120)}",),
        (*doubts, *unknown, *not_counted(tensors.others)),
    )


def _groups(
    prefix: str, stack: str, seen: Mapping[int, tuple[Found, ...]], metadata: Metadata, where: str
) -> list[Group]:
    """The layers under one prefix, in groups; a layer's several FFNs one after the other."""
    per_layer = max(map(len, seen.values()))
    specs = {
        layer * per_layer + i: _spec(found, metadata, f"{where}: {prefix}.{layer}")
        for layer, founds in sorted(seen.items())
        for i, found in enumerate(founds)
    }
    return grouped(stack, specs, 1, per_layer)


def _spec(found: Found, metadata: Metadata, where: str) -> FFNSpec:
    if found.uneven:
        raise FFNError(f"{where} has {found.uneven}", NOT_WHOLE)
    if found.d_model is None or found.d_ff is None:
        what = " and ".join(f"{shown(name)} {shown(list(shape))}" for name, shape in found.misfit)
        problem = f"{what} do not fit each other" if what else f"the shapes of {shown(found.tensor)} do not show widths"
        raise FFNError(f"{where}: {problem}", "" if what else "give a config.json, which says d_model and d_ff")
    moe = None
    if found.experts:
        moe = MoE(
            experts=found.experts,
            top_k=min(metadata.top_k or 1, found.experts),
            shared_experts=1 if found.shared_d_ff else 0,
            shared_d_ff=found.shared_d_ff or None,
            shared_gate=found.shared_gate,
            router_bias=found.router_bias,
            correction=found.correction,
            latent=found.latent or None,
        )
    down_bias = found.down_bias if found.down_bias != found.bias else None
    activation = metadata.activation or "silu"
    return FFNSpec(
        found.d_model, found.d_ff, activation, bool(found.gated), found.bias, down_bias=down_bias, moe=moe
    )  # fmt: skip


# --- what does not agree ----------------------------------------------------------------------------------------------


def _uncounted(layers: Layers, metadata: Metadata) -> list[Disagreement]:
    """What an FFN's tensors hold beyond what its block has: the block would be counted short."""
    out: dict[tuple[str, str, str], Disagreement] = {}
    for prefix, seen in layers.items():
        for layer, founds in seen.items():
            for found in founds:
                for new in _unlike(found, _spec(found, metadata, prefix), f"{prefix}.{layer}"):
                    key = (new.name, new.config, new.tensors)
                    out[key] = replace(out[key], layers=out[key].layers + 1) if key in out else new
    return list(out.values())


def _unlike(found: Found, spec: FFNSpec, at: str) -> Iterator[Disagreement]:
    counted = params_of(spec)
    if counted != found.params:
        name = found.loose[0] if found.loose else found.tensor
        yield Disagreement(
            IN_ALL, IN_ALL, str(counted), str(found.params), f"{at}.{name}".replace("#", "0"), teller="the block has"
        )
    if found.misfit:
        yield replace(misfit(found, spec, at), teller="the block has")


def _differences(
    groups: Sequence[Group], layers: Layers, items: Mapping[str, Item], metadata: Metadata, tensor: str
) -> Iterator[Disagreement]:
    """What the config or the metadata say otherwise than the tensors."""
    main = max(groups, key=lambda group: len(group.layers)).spec
    most = max((g for g in groups if g.spec.moe), key=lambda group: len(group.layers), default=None)
    experts = most.spec if most else None
    d_ff = (experts if "expert" in metadata.checks.get("d_ff", ("",))[0] and experts else main).d_ff
    seen = {"d_model": main.d_model, "d_ff": d_ff, "experts": experts.moe.experts if experts and experts.moe else 0}
    numbered = layer_numbers(items)
    numbers = {len(numbered.get(prefix, (0,))) for prefix in layers}
    for name, (theirs, value) in metadata.checks.items():
        if type(value) is not int:
            continue
        if name == "layers":
            wrong = not any(value <= number <= value + metadata.extra_layers for number in numbers)
            found = max(numbers)
        elif name == "width":
            found = main.d_ff
            wrong = experts is None and len(groups) == 1 and value not in (found, 2 * found, found / 2)
        else:
            found, wrong = seen[name], value != seen[name] and not (name == "experts" and value + seen[name] <= 1)
        if wrong:
            yield Disagreement(name, theirs, str(value), str(found), tensor, teller=metadata.teller)
