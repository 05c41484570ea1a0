"""A GGUF file as a model that can be run: where its tensors' values are, and what its architecture fixes.

The metadata contain neither norm nor routing: llama.cpp's code fixes them by the architecture's name. If that is a
known family under another name, the metadata become that family's config fields and its row supplies the rest; anything
that the tensors do not confirm stays unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.models.config.families import family_of
from ffncli.models.config.read import from_config
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.fields import Fields
from ffncli.models.files.gguf import GGUFFile, gguf_config
from ffncli.models.files.headers import TensorInfo
from ffncli.models.model import Group, Model, grouped

# architecture in llama.cpp → model_type; `llama` with experts is Mixtral
_FAMILIES: Mapping[str, str] = {
    "llama": "llama", "mistral3": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe", "gemma": "gemma", "gemma2": "gemma2", "gemma3": "gemma3_text", "phi3": "phi3",
    "olmo2": "olmo2", "olmoe": "olmoe", "smollm3": "smollm3", "seed_oss": "seed_oss", "gpt2": "gpt2",
    "starcoder2": "starcoder2", "gpt-oss": "gpt_oss",
}  # fmt: skip
_RENORMALISED = {"qwen3moe": True}  # fixed in llama.cpp's code, absent from the metadata; otherwise the family's value


def checkpoint_of(file: GGUFFile) -> Checkpoint:
    """The tensors as a checkpoint, whose dtypes are GGML's formats and whose shapes are torch's."""
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
    """The model by its metadata alone, read as its family's config; None if they do not describe one."""
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
    """Groups that the tensors show, with the norms and the routing of `model`; None if a layer contradicts it."""
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
    """Widths and experts under the usual config names, only the present ones."""
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
    """The norm's epsilon, which llama.cpp stores as a float32: the shortest decimal that rounds to it."""
    fields = Fields(file.metadata, file.where)
    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon"):
        value = fields.get(f"{file.architecture}.attention.{name}", None)
        if isinstance(value, float) and 0 <= value < 1:
            return float(f"{value:.7g}")
    return None


def _agreed(stored: FFNSpec, spec: FFNSpec | None) -> FFNSpec | None:
    """`spec` if the tensors confirm it, else None. Converters add the 1 of Gemma's norms to their weights."""
    if spec is None or (stored.moe is None) != (spec.moe is None):
        return None
    same = (stored.d_model, stored.d_ff, stored.gated, stored.bias) == (spec.d_model, spec.d_ff, spec.gated, spec.bias)
    if stored.moe and spec.moe:
        same = same and stored.moe.experts == spec.moe.experts
        same = same and bool(stored.moe.shared_experts) == bool(spec.moe.shared_experts)
    if not same:
        return None
    return replace(spec, norm_weight="plain") if spec.norm_weight == "one_plus" else spec
