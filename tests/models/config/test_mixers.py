"""Layers that differ, residual streams, tables of n-grams and by tokens: against transformers' own modules."""

import copy
import json
import re
from collections.abc import Mapping
from functools import cache
from math import prod
from operator import attrgetter
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.config.non_ffn import MIXED
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from ffncli.models.evidence.agreement import with_inventory
from ffncli.models.files.headers import TensorInfo
from ffncli.models.files.inventory import Inventory
from ffncli.models.model import LayerParams, NotCounted, Resolved
from tests.fuzz.configs import specimens
from tests.oracles.architectures import numbers, text_architectures

_NGRAMS = {
    "ple_layer_ids": [1, 3], "ngram_vocab_size_base": 53, "heads_per_ngram": 4, "ngram_size": 3, "ple_embed_dim": 16,
    "make_ngram_vocab_size_divisible_by": 8,
}  # fmt: skip
_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_SPARSE, _HEAVY = "compressed_sparse_attention", "heavily_compressed_attention"
_KIMI = {"full_attn_layers": [2, 4], "kda_layers": [1, 3], "num_heads": 3, "head_dim": 6, "short_conv_kernel_size": 2}
# Family → what is changed in its tiny config, besides nothing; None takes a field away.
CHANGES: Mapping[str, tuple[dict[str, Any], ...]] = {
    "qwen3_next": ({"attention_bias": True}, {"layer_types": None, "full_attention_interval": 2}),
    "qwen3_5_text": ({"linear_conv_kernel_dim": 3, "linear_key_head_dim": 6, "linear_num_value_heads": 6},),
    "qwen4_exp_text": (_NGRAMS, {**_NGRAMS, "ple_layer_ids": [3], "ple_conv_kernel_size": 2, "hc_count": 2}),
    "kimi_linear": (
        {"layer_types": None}, {"q_lora_rank": None, "layer_types": [_FULL] * 4},
        {"layer_types": None, "linear_attn_config": _KIMI},
    ),
    "deepseek_v4": (
        {"layer_types": [_SLIDING, _SPARSE, _HEAVY, _SLIDING]}, {"layer_types": None, "compress_rates": None},
        {"layer_types": None, "compress_ratios": [128, 0, 4, 4], "compress_rates": None},
        {"hc_mult": 2, "layer_types": None, "compress_rate_csa": 2, "compress_rate_hca": 16, "compress_rates": None},
    ),
    "glm_moe_dsa": (
        {"indexer_types": ["full", "full", "shared", "shared"]},
        {"indexer_types": None, "index_topk_freq": 2, "index_skip_topk_offset": 1},
        {"indexer_types": None, "index_topk_pattern": "FSSF"},
    ),
    "glm5_next_text": ({"index_kpool": 8, "linear_num_heads": 3, "linear_head_dim": 6}, {"layer_types": None}),
    "hy_v4": ({"indexer_types": None}, {"hc_mult": 3}),
    "axk2": ({"gated_norm_rank": 5},),
    "bailing_hybrid": ({"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL]}, {"layer_types": None, "layer_group_size": 2}),
    "gemma4_unified_text": ({"attention_bias": True, "num_kv_shared_layers": 0},),
    "mistral4": ({"attention_bias": True},),
    "axk1": ({"attention_bias": True},),
    "mistral_large4_text": (
        {"indexer_types": ["full", "shared", "shared", "full"], "attention_bias": True},
        {"no_rope_layers": [1, 0, 0, 1], "kv_source_layers": [0, 0, 2, 2]}, {"no_rope_layers": None},
    ),
    "dots3_note_text": (
        {"layer_types": None, "per_layer_config": None, "swa_q_lora_rank": 6, "swa_num_attention_heads": 3,
         "swa_num_key_value_heads": 3},
        {"layer_types": [_SLIDING, _FULL, "indexed_attention", _FULL], "per_layer_config": None,
         "attention_bias": True},
    ),
    "minimax_m3_vl_text": ({"layer_types": ["minimax_m3_sparse", _FULL, _FULL, "minimax_m3_sparse"]},
                           {"layer_types": None, "sparse_attention_config": {
                               "sparse_attention_freq": [0, 1, 1, 1], "sparse_num_index_heads": 3,
                               "sparse_index_dim": 10}}),
    "mimo_v2_flash": ({"v_head_dim": 6, "attention_bias": True}, {"layer_types": None}),
    "step3p5": (
        {"layer_types": [_SLIDING, _FULL, _SLIDING, _FULL], "num_sliding_attention_heads": None,
         "attention_other_setting": {"num_attention_heads": 6}, "per_layer_config": None},
        {"attention_bias": True, "layer_types": None},
    ),
    "bamba": ({"attn_layer_indices": [1], "mamba_conv_bias": False}, {"mamba_proj_bias": True, "mamba_n_groups": 2},
              {"attn_layer_indices": [0, 3], "attention_bias": True, "mamba_d_head": "auto"}),
    "granitemoehybrid": ({"layer_types": [_LINEAR, _FULL, _LINEAR, _FULL], "mamba_conv_bias": False},
                         {"attention_bias": True, "layer_types": ["mamba", "attention", "mamba", "mamba"]}),
    "jamba": ({"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_proj_bias": True},
              {"mamba_conv_bias": False, "mamba_dt_rank": "auto", "mamba_expand": 3}),
    "lfm2": ({"conv_bias": True}, {"layer_types": None, "full_attn_idxs": [1]}, {"layer_types": None}),
    "lfm2_moe": ({"conv_bias": True, "conv_L_cache": 5},),
    "lfm3": ({"use_attention_gate": False, "use_sandwich_norm": False}, {"layer_types": None, "attention_bias": True}),
    "olmo_hybrid": ({"layer_types": None, "linear_key_head_dim": None, "linear_value_head_dim": None},
                    {"linear_num_key_heads": None, "linear_num_value_heads": None, "attention_bias": True}),
    "nemotron_h": ({"use_bias": True, "use_conv_bias": False, "n_groups": 2},),
    "gemma3n_text": (
        {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 6}, {"laurel_rank": 3, "altup_num_inputs": 2},
    ),
    "gemma4_text": (
        {"attention_bias": True}, {"vocab_size_per_layer_input": 21}, {"hidden_size_per_layer_input": 0},
        {"num_kv_shared_layers": 1, "layer_types": [_SLIDING, _FULL, _FULL, _FULL], "attention_k_eq_v": True,
         "num_global_key_value_heads": 1, "per_layer_config": None, "global_head_dim": 6},
    ),
}  # fmt: skip
TRIED = [pytest.param(name, i, id=f"{name}-{i}") for name in MIXED for i in range(1 + len(CHANGES.get(name, ())))]
# What of a layer is neither attention nor a norm nor the FFN, by the names in transformers' modules.
_OTHER = re.compile(
    r"^(?:attn_hc|ffn_hc|altup|laurel|per_layer_|post_per_layer|ple\.|.*hyper_connection|.*residual_gate)"
    r"|^input_layernorm\.mlp"
)


def values_of(name: str, number: int) -> dict[str, Any]:
    """The config of a tiny model."""
    changes = ({}, *CHANGES.get(name, ()))[number]
    values = {**copy.deepcopy(specimens()[name][1]), **changes}
    return {key: value for key, value in values.items() if value is not None or key not in changes}


@cache
def built(name: str, number: int) -> dict[str, tuple[int, ...]]:
    """The shapes of transformers' model, with the choice corrections that are buffers."""
    values = copy.deepcopy(values_of(name, number))
    with torch.device("meta"):
        config = CONFIG_MAPPING[name].from_dict({k: v for k, v in values.items() if k != "model_type"})
        model = attrgetter(specimens()[name][0].model or text_architectures()[name])(transformers)(config)
    buffers = [(n, b) for n, b in model.named_buffers() if n.endswith(("e_score_correction_bias", "expert_bias"))]
    return {n: tuple(tensor.shape) for n, tensor in (*model.named_parameters(), *buffers)}


def size_of(shapes: Mapping[str, tuple[int, ...]], pattern: str = "") -> int:
    return sum(prod(shape) for name, shape in shapes.items() if re.search(pattern, name))


def read(name: str, number: int) -> Resolved:
    return from_config(values_of(name, number), "m", "config.json")


@pytest.mark.parametrize(("name", "number"), TRIED)
def test_whole_model(name: str, number: int) -> None:
    """A text tower of transformers has no head: its size is then added by hand."""
    shapes, values = built(name, number), values_of(name, number)
    bare = not any(n.startswith("lm_head") for n in shapes) and MIXED[name].head is not None
    head = values["vocab_size"] * values["hidden_size"] if bare and not values["tie_word_embeddings"] else 0
    assert count(read(name, number)).model_params_total == size_of(shapes) + head


@pytest.mark.parametrize("width", [6, 16])
def test_a_config_that_transformers_saved_counts_as_the_published_one(width: int) -> None:
    """It has two widths of a head, where the published one has head_dim alone."""
    specimen = {name: value for name, value in values_of("bailing_hybrid", 0).items() if name != "linear_head_dim"}
    values = {**specimen, "head_dim": width}
    saved = CONFIG_MAPPING["bailing_hybrid"].from_dict(values).to_dict()
    assert saved["linear_head_dim"] == width != saved["head_dim"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIG_MAPPING["bailing_hybrid"].from_dict(dict(values)))
    expected = sum(p.numel() for p in model.parameters())
    expected += sum(b.numel() for n, b in model.named_buffers() if n.endswith("_bias"))
    for config in (values, {**saved, "model_type": "bailing_hybrid"}):
        found = count(from_config(config, "m", "config.json"))
        assert found.model_params_total == expected


@pytest.mark.parametrize(("name", "number"), TRIED)
def test_each_layer(name: str, number: int) -> None:
    found = read(name, number).model.non_ffn
    assert found is not None
    shapes = built(name, number)
    (stack,) = found.layers.values()
    if name == "longcat_flash":  # a layer has two dense blocks, each after an attention, and a mixture beside them
        both = [(stack[i], stack[i + 1]) for i in range(0, len(stack), 2)]
        stack = {i: LayerParams(a.attention + b.attention, a.norms + b.norms) for i, (a, b) in enumerate(both)}
    for i, layer in stack.items():
        inside = {n.split(f"layers.{i}.")[1]: shape for n, shape in shapes.items() if f"layers.{i}." in n}
        table = {n: shape for n, shape in inside.items() if n.endswith("ngram_embedding.weight")}
        other = {n: shape for n, shape in inside.items() if _OTHER.search(n) and n not in table}
        mixer = {n: shape for n, shape in inside.items() if re.match(r"self_attn|linear_attn|mamba\.|conv\.", n)}
        norms = {
            n: s for n, s in inside.items() if "norm" in n and "mlp.fc" not in n and n not in other | mixer | table
        }
        expected = LayerParams(size_of(mixer), size_of(norms), size_of(other))
        gated = size_of(inside, r"post_attention_layernorm\.mlp")  # A.X-K2's second gated norm is the FFN's
        assert (layer.attention, layer.norms + layer.other) == (
            expected.attention, expected.norms + expected.other + gated,
        )  # fmt: skip


def test_layers_that_differ_have_no_number_for_all() -> None:
    """Three linear attentions and a full one: the page says none of the two; layers that are alike have one."""
    differ, alike = count(read("qwen3_next", 0)), count(read("axk2", 0))
    assert (differ.attention_params_per_layer, differ.ffn_share_of_layer) == (None, None)
    assert alike.attention_params_per_layer == size_of(built("axk2", 0), r"layers\.1\.self_attn")


@pytest.mark.parametrize(("name", "number"), TRIED)
def test_tensors_agree(name: str, number: int) -> None:
    """The tensors beside the config: no attention of any layer differs, and the whole is the same."""
    shapes = built(name, number)
    tensors = {n: TensorInfo("F32", shape, 4 * prod(shape)) for n, shape in shapes.items()}
    found = with_inventory(read(name, number), Inventory("here", tensors, dict.fromkeys(tensors, 1)))
    assert [str(difference) for difference in found.differences] == []
    total = count(found).model_params_total
    assert total is None or total == size_of(shapes)


@pytest.mark.parametrize(("name", "number", "pattern"), [
    ("gemma4_text", 0, "embed_tokens_per_layer"), ("gemma3n_text", 1, "embed_tokens_per_layer"),
    ("qwen4_exp_text", 1, "ngram_embedding|embed_tokens"),
])  # fmt: skip
def test_tables_are_looked_up(name: str, number: int, pattern: str) -> None:
    """A token's parameters without those that are only looked up: no table is among them."""
    found = count(read(name, number))
    assert found.model_params_active is not None
    assert found.model_params_active_no_embedding is not None
    looked_up = size_of(built(name, number), pattern)
    assert found.model_params_active - found.model_params_active_no_embedding == looked_up > 0


@pytest.mark.parametrize(("name", "field", "value"), [
    ("qwen3_next", "layer_types", ["full_attention"]), ("qwen3_next", "layer_types", ["a", "b", "c", "d"]),
    ("kimi_linear", "linear_attn_config", {**_KIMI, "full_attn_layers": [9]}), ("hy_v4", "indexer_types", ["full"]),
    ("deepseek_v4", "compress_ratios", [0, 4, 5, 128]), ("deepseek_v4", "compress_ratios", [0]),
    ("gemma4_text", "num_kv_shared_layers", 5), ("gemma3n_text", "altup_num_inputs", 0),
    ("glm_moe_dsa", "indexer_types", "full"), ("qwen4_exp_text", "hc_count", -1),
])  # fmt: skip
def test_layers_that_cannot_be_are_refused(name: str, field: str, value: object) -> None:
    values = values_of(name, 0)
    if field in ("linear_attn_config", "compress_ratios"):
        del values["layer_types"]
    with pytest.raises(FFNError, match=f"{field}.* must be"):
        from_config({**values, field: value}, "m", "config.json")


@pytest.mark.parametrize("name", MIXED)
def test_without_a_needed_field_the_whole_is_unknown(name: str) -> None:
    values = values_of(name, 0)
    del values["num_attention_heads"]
    values.pop("linear_head_dim", None)
    assert count(from_config(values, "m", "config.json")).model_params_total is None


# Kimi-K3 by hand, its config's numbers: d 7168, 96 heads of 128. Names and shapes as its implementations list them.
_D, _INNER = 7168, 96 * 128
_KDA = 5 * _D * _INNER + 128 * (_D + _INNER) + 3 * 4 * _INNER + _INNER + 128 + 96 * _D + 128
_MLA = (_D + 1) * 1536 + 1536 * 96 * 192 + _D * 576 + 512 + 512 * 96 * 256 + 2 * _INNER * _D
_K3 = (
    2_740_940_521_984 + 92 * 3584 + 69 * _KDA + 24 * _MLA + 93 * (2 + 4) * _D  # norms, and what weighs the residuals
    + 3 * _D + 2 * 163_840 * _D
)  # fmt: skip


def test_kimi_k3() -> None:
    """The whole by hand, and within 0.1 % of the 2,779,931,837,184 parameters of its release, which has a tower."""
    found = catalog.find("kimi-k3")
    assert found is not None
    total = count(found).model_params_total
    assert total == _K3
    assert 0 < 2_779_931_837_184 - total < 0.001 * total


_PER_LAYER = r".*per_layer.*"


def module(name: str, values: dict[str, Any]) -> torch.nn.Module:
    """transformers' model of a config, its shapes alone."""
    case = specimens()[name][0]
    with torch.device("meta"):
        built = CONFIG_MAPPING[name].from_dict({k: v for k, v in values.items() if k != "model_type"})
        model: torch.nn.Module = attrgetter(case.model or text_architectures()[name])(transformers)(built)
    return model


def tables(values: dict[str, Any]) -> tuple[NotCounted, ...]:
    """What ffn says of them where the whole model is not known."""
    alone = {key: value for key, value in values.items() if key != "num_attention_heads"}
    return from_config(alone, "m", "config.json").not_counted


@pytest.mark.parametrize("name", ["gemma3n_text", "gemma4_text", "qwen4_exp_text"])
def test_what_is_in_the_whole_is_not_left_out(name: str) -> None:
    values = {**copy.deepcopy(specimens()[name][1]), **(_NGRAMS if name == "qwen4_exp_text" else {})}
    assert from_config(values, "m", "config.json").not_counted == ()
    assert tables(values) != ()


@pytest.mark.parametrize(("name", "pattern", "more"), [
    ("gemma3n_text", _PER_LAYER, {}), ("gemma3n_text", _PER_LAYER, {"hidden_size_per_layer_input": 6}),
    ("gemma4_text", _PER_LAYER, {}), ("gemma4_text", _PER_LAYER, {"vocab_size_per_layer_input": 21}),
    ("qwen4_exp_text", r".*\.ngram_embedding\.weight", _NGRAMS),
    ("qwen4_exp_text", r".*\.ngram_embedding\.weight", {**_NGRAMS, "ple_layer_ids": [3], "ngram_size": 2}),
    ("blt", r".*encoder_hash_tok_embedding.*", {"encoder_hash_byte_group_vocab": 90}),
    ("blt", r".*encoder_hash_tok_embedding.*",
     {"encoder_hash_byte_group_vocab": 50, "encoder_hash_byte_group_size": [3, 5],
      "encoder_hash_byte_group_nb_functions": 2}),
])  # fmt: skip
def test_parameters_are_the_modules(name: str, pattern: str, more: dict[str, Any]) -> None:
    values = {**copy.deepcopy(specimens()[name][1]), **more}
    found = tables(values)
    assert [part.parameters for part in found] == [numbers(module(name, values), pattern)]


@pytest.mark.parametrize(("name", "fields"), [
    ("gemma4_text", ["vocab_size_per_layer_input"]), ("blt", [f"encoder_hash_byte_group_{n}" for n in
                                                              ("vocab", "size", "nb_functions")]),
])  # fmt: skip
def test_absent_fields_are_the_classs_defaults(name: str, fields: list[str]) -> None:
    default = json.loads(json.dumps(CONFIG_MAPPING[name]().to_dict(), default=str))
    bare = {key: value for key, value in default.items() if key not in fields}
    assert len(bare) == len(default) - len(fields)
    assert tables(bare) == tables(default) != ()


def test_ngrams_of_the_published_size() -> None:
    """Qwen3.8-Flash-Next: 20,000,000 n-grams in one layer, 51 G parameters (its model card): rows of 2,560 numbers."""
    config = {**specimens()["qwen4_exp_text"][1], "ple_layer_ids": [1], "ple_embed_dim": 2560}
    (part,) = tables({k: v for k, v in config.items() if "ngram" not in k})
    assert part.parameters is not None
    assert 16 * 20_000_000 * 160 < part.parameters < 1.001 * 16 * 20_000_000 * 160
    assert round(part.parameters / 1e9) == 51


def test_a_family_without_such_a_table_says_nothing_and_a_new_one_its_size_is_unknown() -> None:
    values = specimens()["llama"][1]
    assert tables(values) == ()
    (part,) = tables({**values, "hidden_size_per_layer_input": 8})
    assert (part.what, part.parameters) == ("embeddings for every layer", None)
    gemma = specimens()["gemma4_text"][1]
    assert tables({**gemma, "hidden_size_per_layer_input": 0}) == ()
    (part,) = tables({key: value for key, value in gemma.items() if key != "hidden_size_per_layer_input"})
    assert (part.why, part.parameters) == ("the model may have none: the config does not specify their width", None)


@pytest.mark.parametrize("value", [0, -1, 10**10, "8", True, 2.5])
def test_a_table_that_cannot_be_is_refused(value: object) -> None:
    from ffncli.errors import FFNError

    with pytest.raises(FFNError, match="ngram_vocab_size_base must be"):
        tables({**specimens()["qwen4_exp_text"][1], **_NGRAMS, "ngram_vocab_size_base": value})
