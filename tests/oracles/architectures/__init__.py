"""Tiny models of every text architecture in transformers: a count must equal the parameters in their modules.

An Architecture says how to build one model of a model_type and which of its parameters, by their names in memory, are
the FFN's. The patterns are written by hand. `outside` checks them without any knowledge of names: if every d_ff is
doubled, no parameter that the patterns do not match may change.
"""

import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.oracles.architectures.stubs import stubbed
from tests.oracles.architectures.walk import walk

_TABLES = tuple(
    """
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES MODEL_FOR_MASKED_LM_MAPPING_NAMES
    MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES
""".split()
)
MOST_PARAMETERS = 30_000_000  # a larger model has a part whose size the generic fields do not set

# The sizes of a tiny model, under every name that configs use. All widths differ, so that a mix-up is noticed.
WIDTHS = {
    "intermediate_size": 40, "d_ff": 40, "ffn_dim": 40, "encoder_ffn_dim": 40, "decoder_ffn_dim": 24, "n_inner": 40,
    "ffn_hidden_size": 40, "hidden_dim": 40, "dim_feedforward": 40, "d_inner": 40, "moe_intermediate_size": 12,
    "shared_expert_intermediate_size": 20, "expert_ffn_hidden_size": 12, "intermediate_size_mlp": 44,
    "shared_intermediate_size": 20, "moe_shared_expert_intermediate_size": 20, "dff": 40, "dim_ff": 40,
    "feed_forward_size": 40,
}  # fmt: skip
SIZES = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "embed_dim", "emb_dim", "dim", "n_embed"), 16),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 4),
    **dict.fromkeys(("encoder_layers",), 2), **dict.fromkeys(("decoder_layers", "num_decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
                     "decoder_attention_heads"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "rotary_dim", "v_head_dim"), 4),
    **dict.fromkeys(("qk_rope_head_dim", "qk_nope_head_dim"), 4), "num_key_value_heads": 2, "vocab_size": 64,
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_sequence_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "moe_top_k", "num_experts_per_token",
                     "top_k_experts", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts",
                     "n_group", "num_expert_group"), 2),
    "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "o_lora_rank": 8,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sep_token_id": 2, "decoder_start_token_id": 1,
    **dict.fromkeys(("mamba_n_heads", "mamba_d_state", "state_size", "mamba_num_heads", "ssm_state_size",
                     "mamba_dt_rank", "mamba_chunk_size", "chunk_size", "linear_num_value_heads",
                     "linear_key_head_dim", "linear_value_head_dim", "index_topk"), 4),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("mamba_expand", "conv_kernel", "mamba_d_conv", "linear_num_key_heads", "index_n_heads",
                     "type_vocab_size"), 2),
    **dict.fromkeys(("n_groups", "mamba_n_groups"), 1), **dict.fromkeys(("embedding_size", "word_embed_proj_dim"), 16),
}  # fmt: skip


@dataclass(frozen=True)
class Architecture:
    """How to build and count a model_type. `ffn` and `norm` match whole names of parameters and stored buffers.

    `second` matches FFNs in the same layers, with their norms, that no text token passes. `values` replace generic
    sizes (nested mappings those of nested configs); `drop` lists generic sizes to omit. `norm` are the norms that only
    the FFN branch uses. `model` is the class to build, from the nested config `at` if the whole model cannot be built
    or cannot be tiny. `apart` lists the nested configs of towers that are not counted, whose widths do not double.
    `activation` is False if the modules have a function that they do not call. `reason` says why it cannot be built or
    counted; such an architecture is listed but not compared.
    """

    ffn: str = r".*\.layers\.\d+\.mlp\..*"
    norm: str = r".*\.layers\.\d+\.post_attention_layernorm\..*"
    values: Mapping[str, Any] = field(default_factory=dict)
    drop: tuple[str, ...] = ()
    model: str = ""
    at: str = ""
    second: str = r"(?!)"
    apart: tuple[str, ...] = ("vision_config", "audio_config")
    activation: bool = True
    reason: str = ""


@cache
def text_architectures() -> Mapping[str, str]:
    """Return a mapping from every model_type that transformers can build as a text model to the class it builds."""
    found: dict[str, str] = {}
    for table in _TABLES:
        for model_type, names in getattr(modeling_auto, table).items():
            found.setdefault(model_type, names if isinstance(names, str) else names[0])
    return dict(sorted(found.items()))


def class_of(model_type: str, case: Architecture) -> str:
    """Return the name of the class that is built, or that would be built."""
    return (case.model or text_architectures().get(model_type) or walk()[model_type][0]).rpartition(".")[2]


def config(model_type: str, case: Architecture, factor: int = 1) -> PretrainedConfig:
    """Return a tiny config; `factor` multiplies every d_ff."""
    return _config(_config_class(model_type, case), case, case.values, factor)


def _config_class(model_type: str, case: Architecture) -> Any:
    """Return the config class of a model_type; if it is only ever nested, the class is read from its model class."""
    if model_type in CONFIG_MAPPING:
        return CONFIG_MAPPING[model_type]
    return attrgetter(case.model)(transformers).config_class


def _config(kind: Any, case: Architecture, over: Mapping[str, Any], factor: int) -> PretrainedConfig:
    names = config_fields(kind) - set(case.drop)
    sizes = {**SIZES, **{name: width * factor for name, width in WIDTHS.items()}}
    values = {name: value for name, value in sizes.items() if name in names and not _by_stage(kind, name)}
    for name, inner in getattr(kind, "sub_configs", {}).items():
        said = over.get(name, {})
        inner = CONFIG_MAPPING[said["model_type"]] if "model_type" in said else inner
        if hasattr(inner, "model_type") and inner.model_type:
            values[name] = _config(inner, case, said, 1 if name in case.apart else factor)
    own = {name: value if name in case.apart else _scaled(name, value, factor) for name, value in over.items()
           if not isinstance(values.get(name), PretrainedConfig)}  # fmt: skip
    return kind(**{**values, **own})


def _by_stage(kind: Any, name: str) -> bool:
    """Return whether a field has a value for each stage, as in Swin."""
    return isinstance(getattr(kind, name, None), list | tuple)


def _scaled(name: str, value: Any, factor: int) -> Any:
    """Return the value of a case's field with widths multiplied by `factor`, also in a nested config."""
    if isinstance(value, Mapping):
        return {inner: _scaled(inner, said, factor) for inner, said in value.items()}
    if name not in WIDTHS or factor == 1:
        return value
    return [v * factor for v in value] if isinstance(value, list) else value * factor


def config_fields(kind: Any) -> set[str]:
    """Return the names of a config class's fields."""
    names: set[str] = set(getattr(kind, "attribute_map", {}) or {})
    for base in kind.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    names |= set(inspect.signature(kind.__init__).parameters)
    return names | set(vars(kind))


def build(model_type: str, case: Architecture, factor: int = 1, meta: bool = False) -> nn.Module:
    """Build the tiny model; with `meta`, on the meta device without any memory."""
    with torch.device("meta"):
        model = fresh(model_type, case, factor)
    size = sum(p.numel() for p in model.parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"not tiny: {size:,} parameters")
    if meta:
        return model
    torch.manual_seed(0)
    return fresh(model_type, case, factor)


def fresh(model_type: str, case: Architecture, factor: int = 1) -> nn.Module:
    """Build the case's class from its config, whatever its size."""
    whole = config(model_type, case, factor)
    kind = attrgetter(case.model or text_architectures()[model_type])(transformers)
    with stubbed(model_type):
        model: nn.Module = kind(getattr(whole, case.at) if case.at else whole)
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    model.config = whole  # so that the whole model's config is counted
    return model


def matching(model: nn.Module, pattern: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters, and the buffers that a checkpoint stores, whose whole name matches."""
    wanted = re.compile(pattern)
    kept = set(model.state_dict(keep_vars=True))
    for name, tensor in (*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n in kept)):
        if wanted.fullmatch(name):
            yield name, tensor


def numbers(model: nn.Module, pattern: str) -> int:
    """Return the number of elements of the matching parameters; tied parameters count once."""
    return sum(tensor.numel() for _, tensor in matching(model, pattern))


def outside(module: nn.Module, twice: nn.Module, case: Architecture) -> list[str]:
    """Return the parameters that change with d_ff but match no pattern (BitNet's norm is d_ff wide)."""
    plain, wide = dict(module.named_parameters()), dict(twice.named_parameters())
    changed = [n for n, p in plain.items() if n in wide and p.shape != wide[n].shape]
    wanted = re.compile(f"{case.ffn}|{case.norm}|{case.second}")
    return [name for name in changed if not wanted.fullmatch(name)]


@cache
def cases() -> Mapping[str, Architecture]:
    """Return every text architecture with its case; one without a row has the default case, Llama's."""
    from tests.oracles.architectures.families import DECODERS, ENCODERS, HYBRIDS, MIXTURES, PAIRS
    from tests.oracles.architectures.multimodal import COMPOSITES

    rows = {**DECODERS, **ENCODERS, **PAIRS, **MIXTURES, **HYBRIDS, **COMPOSITES}
    return {name: rows.get(name, Architecture()) for name in text_architectures()}


@cache
def towers() -> Mapping[str, Architecture]:
    """Return the towers that take token ids but are in none of transformers' text tables: only composites have them."""
    from tests.oracles.architectures.multimodal import MEDIA, TOWERS

    return {**TOWERS, **MEDIA}
