"""Models that no family's row describes: their blocks as the tensors show them, and what a config adds by usual names.

Such are a checkpoint whose model_type is not known, one without a config.json, and every GGUF file, whose metadata say
the widths but neither gatedness nor activation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ffncli.block import activations
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError, shown
from ffncli.models.evidence import demand_found, items_of, with_stored
from ffncli.models.families import BY_TYPE, family_of
from ffncli.models.family import TOP_K
from ffncli.models.fields import REQUIRED, Fields
from ffncli.models.gguf_file import GGUFFile, gguf_config
from ffncli.models.inventory import Inventory
from ffncli.models.model import Difference, Group, Model, Stored, grouped
from ffncli.models.matrices import Item
from ffncli.models.recognise import Found, Layers, recognise

_ACTIVATION = "hidden_act|hidden_activation|activation_function|activation|dense_act_fn|ffn_act_fn|hidden_activation_fn"
_D_MODEL = "hidden_size|d_model|n_embd|dim|embed_dim"


@dataclass(frozen=True)
class Said:
    """What is known beside the tensors: by a config's usual field names, or a GGUF file's metadata."""

    d_model: int | None = None
    top_k: int | None = None
    activation: str | None = None
    checks: Mapping[str, tuple[str, Any]] = field(default_factory=dict)  # our name → (its name there, its value)
    evidence: tuple[str, ...] = ()


def from_tensors(inventory: Inventory, config: Fields | None, source: str, name: str) -> Model:
    """The model whose tensors these are; `config` is that of an unknown model_type, or None.

    Raises FFNError, saying what was looked for, where no FFN is recognised.
    """
    said = _from_config(config) if config else Said(evidence=("no config.json: everything from the tensors",))
    quantization = config.get("quantization_config", None) if config else None
    items = items_of(inventory, quantization if isinstance(quantization, Mapping) else None)
    return _model(items, said, inventory.where, source, name)


def from_gguf(file: GGUFFile, source: str) -> Model:
    """The model in a GGUF file. What its metadata contradict is a difference, as between a config and tensors."""
    items = {t.name: Item(t.shape, t.params, t.bytes, 1, t.format) for t in file.tensors}
    path = Path(source).absolute()
    name = path.stem if path.suffix == ".gguf" else path.name
    return _model(items, _from_metadata(file), file.where, source, name)


def _from_config(config: Fields) -> Said:
    kind = config.values.get("model_type")
    evidence = (f"model_type {shown(kind)} is not known: widths, gate and biases from the tensors",)
    top_k = config.get(TOP_K, None)
    act = config.get(_ACTIVATION, None)
    d_model = config.get(_D_MODEL, None)
    return Said(
        d_model if type(d_model) is int and d_model > 0 else None,
        top_k if type(top_k) is int and top_k > 0 else None,
        activations.CANONICAL.get(act.lower()) if isinstance(act, str) else None,
        evidence=evidence,
    )


def _from_metadata(file: GGUFFile) -> Said:
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
    return Said(told.get("d_model"), told.get("top_k"), canonical, checks, tuple(evidence))


_KEYS = {"d_model": "embedding_length", "layers": "block_count", "experts": "expert_count",
         "d_ff": "feed_forward_length", "expert_d_ff": "expert_feed_forward_length"}  # fmt: skip


# --- the blocks -------------------------------------------------------------------------------------------------------


def _model(items: Mapping[str, Item], said: Said, where: str, source: str, name: str) -> Model:
    layers = recognise(items, said.d_model)
    demand_found(layers, items, where)
    moe = any(found.experts for seen in layers.values() for founds in seen.values() for found in founds)
    unknown = {"norm"} | ({"activation"} if said.activation is None else set())
    unknown |= {"top_k"} if moe and said.top_k is None else set()
    groups = [group for prefix, seen in layers.items() for group in _groups(prefix, seen, said, where)]
    founds = [found for seen in layers.values() for several in seen.values() for found in several]
    stored = Stored(
        sum(f.params for f in founds), sum(f.bytes for f in founds),
        tuple(dict.fromkeys(fmt for f in founds for fmt in f.formats)),
    )  # fmt: skip
    first_prefix, first_layers = next(iter(layers.items()))
    first = min(first_layers)
    tensor = f"{first_prefix}.{first}.{first_layers[first][0].tensor}".replace("#", "0")
    gated = f"{'gated' if first_layers[first][0].gated else 'plain'}: tensor {shown(tensor, 120)}"
    model = Model(
        name, source, tuple(groups), evidence=(gated, *said.evidence), unknown=frozenset(unknown),
        differences=tuple(_differences(groups, layers, said, tensor)), stored=stored,
    )  # fmt: skip
    what = {"norm": "norms and residuals", "activation": "the activation", "top_k": "top_k, so what is active"}
    model = model.noted("not known here, so not counted: " + ", ".join(what[u] for u in what if u in unknown))
    return with_stored(model, items)


def _groups(prefix: str, seen: Mapping[int, tuple[Found, ...]], said: Said, where: str) -> list[Group]:
    """The layers under one prefix, in groups; a layer's several FFNs one after the other."""
    per_layer = max(map(len, seen.values()))
    specs = {
        layer * per_layer + i: _spec(found, said, f"{where}: {prefix}.{layer}")
        for layer, founds in sorted(seen.items())
        for i, found in enumerate(founds)
    }
    stack = next((name for name in ("encoder", "decoder") if name in prefix), "decoder")
    return grouped(stack, specs, 1, per_layer)


def _spec(found: Found, said: Said, where: str) -> FFNSpec:
    if found.d_model is None or found.d_ff is None:
        raise FFNError(
            f"{where}: the shapes of {shown(found.tensor)} do not show d_model and d_ff", "give a config.json"
        )
    moe = None
    if found.experts:
        moe = MoE(
            experts=found.experts,
            top_k=min(said.top_k or 1, found.experts),
            shared_experts=1 if found.shared_d_ff else 0,
            shared_d_ff=found.shared_d_ff or None,
            shared_gate=found.shared_gate,
            router_bias=found.router_bias,
            correction=found.correction,
            latent=found.latent or None,
        )
    return FFNSpec(found.d_model, found.d_ff, said.activation or "silu", bool(found.gated), found.bias, moe=moe)


def _differences(groups: list[Group], layers: Layers, said: Said, tensor: str) -> list[Difference]:
    """What the metadata say otherwise than the tensors."""
    main = max(groups, key=lambda group: len(group.layers))
    seen: dict[str, int] = {
        "d_model": main.spec.d_model, "d_ff": main.spec.d_ff, "experts": main.spec.moe.experts if main.spec.moe else 0,
        "layers": max(len(found) for found in layers.values()),
    }  # fmt: skip
    out = []
    for name, (field_name, value) in said.checks.items():
        if type(value) is int and value != seen[name] and not (name == "layers" and value > seen[name]):
            out.append(Difference(name, field_name, str(value), str(seen[name]), tensor))
    return out
