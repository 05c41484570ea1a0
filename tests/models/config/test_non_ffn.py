"""What a model has beside its FFN, counted from its config, against the model that transformers builds.

Sizes are odd on purpose: heads are not d_model / head_dim, key-value heads are fewer, positions and vocabulary differ.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.config.attention import Heads
from ffncli.models.config.non_ffn import MIXED, RESTS, non_ffn
from ffncli.models.config.read import FAMILIES, from_config
from ffncli.models.counting.count import ModelCount, count
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Group, NonFFN
from tests.oracles.architectures.multimodal import REMOTE
from tests.oracles.counts import ACTIVE, RECENT, WHOLE
from tests.oracles.whole import ENCODERS, Built, build

Values = Mapping[str, Any]

_IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_BASE = {"vocab_size": 97, "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, **_IDS}
_WIDE = {**_BASE, "intermediate_size": 40}
_LLAMA = {**_WIDE, "num_key_value_heads": 3, "head_dim": 10}
_KV = {**_WIDE, "num_key_value_heads": 3}
_BERT = {**_WIDE, "max_position_embeddings": 33, "type_vocab_size": 3}
_GPT2 = {"vocab_size": 97, "n_embd": 24, "n_layer": 3, "n_head": 6, "n_positions": 33, "n_inner": 40, **_IDS}
_GPTJ = {k: v for k, v in _GPT2.items() if k != "n_inner"} | {"rotary_dim": 4}
_T5 = {
    "vocab_size": 97, "d_model": 24, "d_ff": 40, "d_kv": 10, "num_heads": 6, "num_layers": 3, "num_decoder_layers": 2,
    "relative_attention_num_buckets": 9, "feed_forward_proj": "gated-gelu", "pad_token_id": 0,
}  # fmt: skip
_WHISPER = {
    "vocab_size": 97, "d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "encoder_layers": 3,
    "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 4, "num_mel_bins": 7,
    "max_source_positions": 11, "max_target_positions": 13, **_IDS,
}  # fmt: skip
_BART = {
    "vocab_size": 97, "d_model": 24, "encoder_ffn_dim": 40, "decoder_ffn_dim": 36, "encoder_layers": 3,
    "decoder_layers": 2, "encoder_attention_heads": 6, "decoder_attention_heads": 4, "max_position_embeddings": 33,
    **_IDS,
}  # fmt: skip
_OPT = {**_BASE, "ffn_dim": 40, "word_embed_proj_dim": 24, "max_position_embeddings": 33}
_BLOOM = {"vocab_size": 97, "hidden_size": 24, "n_layer": 3, "n_head": 6, **_IDS}
_FALCON = {**_BASE, "ffn_hidden_size": 40}
_ONE_WIDTH = {"num_experts": 4, "num_experts_per_tok": 2}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12}
_FEW = {"num_experts": 4, "num_experts_per_tok": 2}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "n_group": 1, "topk_group": 1,
    "n_shared_experts": 1,
}  # fmt: skip
_ARIA = {"moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 2}
_ERNIE = {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 12, "moe_num_shared_experts": 1}
_AFMOE = {**_FEW, "num_shared_experts": 1, "moe_intermediate_size": 12, "num_dense_layers": 1}
_KOLIBRI = {**_LOCAL, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 20}
# MoE families whose attention is one of the common ones, with what their FFN needs to be built
_SPARSE: Mapping[str, Values] = {
    "granitemoeshared": _LOCAL, "cohere2_moe": _ONE_WIDTH, "dots1": _ROUTED, "exaone_moe": _MOE, "hunyuan_v1_moe": _MOE,
    "hy_v3": _MOE, "mellum": _MOE, "solar_open": _ROUTED,
}  # fmt: skip
_MLA = {
    **_WIDE, "num_key_value_heads": 6, "kv_lora_rank": 8, "q_lora_rank": 14, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 7, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 12, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
}  # fmt: skip
_PHI3 = {**_LLAMA, "max_position_embeddings": 32, "original_max_position_embeddings": 32}
_TIED, _UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
_BIASED = {"attention_bias": True}

# model_type → the configs that its row is tried on
CASES: Mapping[str, tuple[Values, ...]] = {
    "gpt2": (_GPT2, {**_GPT2, **_UNTIED}),
    "openai-gpt": ({k: v for k, v in _GPT2.items() if k != "n_inner"},),
    "gpt_neo": ({"vocab_size": 97, "hidden_size": 24, "num_layers": 3, "num_heads": 6, "intermediate_size": 40,
                 "attention_types": [[["global"], 3]], "max_position_embeddings": 33, **_IDS},),
    "biogpt": ({**_WIDE, "max_position_embeddings": 33},),
    "xglm": ({"vocab_size": 97, "d_model": 24, "ffn_dim": 40, "num_layers": 3, "attention_heads": 6, **_IDS},),
    "bart": (_BART,),
    "mbart": (_BART,),
    "modernbert": (_WIDE, {**_WIDE, **_BIASED, "norm_bias": True}),
    "gpt_bigcode": (_GPT2, {**_GPT2, "multi_query": False}),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), (_BERT,)),
    "electra": ({**_BERT, "embedding_size": 10}, {**_BERT, "embedding_size": 24}),
    "distilbert": ({"vocab_size": 97, "dim": 24, "hidden_dim": 40, "n_layers": 3, "n_heads": 6,
                    "max_position_embeddings": 33, "pad_token_id": 0},),
    "vit": ({**{k: _WIDE[k] for k in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")},
             "image_size": 20, "patch_size": 6, "num_channels": 2, "qkv_bias": False},
            {"hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 6, "intermediate_size": 40}),
    **{name: (_T5, {**_T5, **_UNTIED}) for name in ("t5", "mt5", "umt5")},
    "whisper": (_WHISPER,),
    "opt": (_OPT, {**_OPT, "word_embed_proj_dim": 10, "do_layer_norm_before": False},
            {**_OPT, "_remove_final_layer_norm": True},
            {**_OPT, "enable_bias": False, "layer_norm_elementwise_affine": False, **_UNTIED}),
    "bloom": (_BLOOM, {**_BLOOM, **_UNTIED}),
    "gpt_neox": (_WIDE, {**_WIDE, "attention_bias": False, **_TIED}),
    "falcon": (_FALCON, {**_FALCON, "bias": True, "multi_query": False, "parallel_attn": False},
               {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, **_UNTIED},
               {**_FALCON, "new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    "phi": (_KV, {**_KV, "qk_layernorm": True, **_TIED}),
    **{name: (_LLAMA, {**_LLAMA, **_BIASED, **_TIED}, _WIDE)
       for name in ("llama", "granite", "arcee", "qwen3", "gemma", "gemma2", "gemma3_text", "vaultgemma", "exaone4",
                    "smollm3", "mistral", "ministral3")},
    **{name: (_LLAMA, {**_LLAMA, "attention_bias": False, **_TIED}) for name in ("glm", "glm4", "jais2")},
    "seed_oss": (_LLAMA, {**_LLAMA, "attention_bias": False}, {**_LLAMA, "attention_out_bias": True, **_TIED}),
    "ernie4_5": (_LLAMA, {**_LLAMA, "use_bias": True, **_UNTIED}),
    **{name: (_LLAMA, {**_LLAMA, **_BIASED, **_TIED})
       for name in ("hunyuan_v1_dense", "nemotron", "ministral", "cwm")},
    "aria_text": ({**_LLAMA, **_ARIA}, {**_LLAMA, **_ARIA, **_BIASED, **_TIED}),
    **{name: (_KV, {**_KV, **_BIASED, **_TIED})
       for name in ("olmo", "olmo2", "olmo3", "apertus", "nanochat")},
    "cohere": ({**_KV, **_BIASED}, {**_KV, "use_qk_norm": True, **_UNTIED}),
    **{name: ({**_LLAMA, **more}, {**_LLAMA, **more, **_BIASED, **_TIED}) for name, more in _SPARSE.items()},
    "helium": ({**_KV, "head_dim": 4}, {**_KV, "head_dim": 4, **_BIASED, **_TIED}),
    "ernie4_5_moe": ({**_LLAMA, **_ERNIE}, {**_KV, **_ERNIE, "use_bias": True, **_UNTIED}),
    **{name: (_MLA, {**_MLA, **_BIASED}) for name in ("glm4_moe_lite", "minicpm3", "youtu")},
    "afmoe": ({**_LLAMA, **_AFMOE}, {**_WIDE, **_AFMOE, **_BIASED, **_TIED}),
    "kolibri1": ({**_LLAMA, **_KOLIBRI}, {**_WIDE, **_KOLIBRI, **_TIED}),
    **{name: (_LLAMA, {**_LLAMA, **_BIASED, "mlp_bias": True, **_TIED}, _WIDE)
       for name in ("internlm3", "iquestcoder")},
    "granitemoe": ({**_KV, **_LOCAL}, {**_KV, **_LOCAL, **_BIASED, **_TIED}),
    "cohere2": (_LLAMA, {**_LLAMA, **_BIASED, **_UNTIED}),
    "mixtral": ({**_LLAMA, **_LOCAL}, {**_LLAMA, **_LOCAL, **_TIED}),
    "phi3": (_PHI3, {**_PHI3, **_TIED}),
    "qwen2": (_KV, _WIDE, {**_KV, **_TIED}),
    "qwen2_moe": tuple({**_KV, **_MOE, "shared_expert_intermediate_size": 20, "qkv_bias": b} for b in (True, False)),
    "qwen3_moe": ({**_LLAMA, **_MOE}, {**_LLAMA, **_MOE, **_BIASED, **_TIED}),
    "olmoe": ({**_KV, **_FEW}, {**_KV, **_BIASED, **_FEW}),
    "flex_olmo": ({**_KV, **_FEW}, {**_KV, **_BIASED, **_FEW}),
    "deepseek_v2": (_MLA, {**_MLA, **_BIASED, "q_lora_rank": None}),
    "deepseek_v3": (_MLA, {**_MLA, **_BIASED, **_TIED}),
    "gpt_oss": ({**_LLAMA, **_LOCAL}, {**_LLAMA, **_LOCAL, "attention_bias": False}),
    "stablelm": (_KV, {**_KV, "use_qkv_bias": True, "qk_layernorm": True, "use_parallel_residual": True}),
    "starcoder2": (_KV, {**_KV, "use_bias": False, **_UNTIED}),
    "glm4_moe": ({**_LLAMA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12},
                 {**_LLAMA, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12,
                  "use_qk_norm": True, **_BIASED}),
    "phimoe": ({**_KV, **_LOCAL}, {**_KV, **_LOCAL, **_BIASED, "lm_head_bias": True}),
    "minimax_m2": ({**_LLAMA, **_LOCAL},),
    "llama4_text": ({**_LLAMA, **_LOCAL, "intermediate_size_mlp": 36}, {**_LLAMA, **_LOCAL, **_BIASED, **_TIED}),
    "gptj": (_GPTJ,),
    "codegen": (_GPTJ,),
    "persimmon": (_WIDE, {**_WIDE, "qk_layernorm": False}),
    "mpt": ({"vocab_size": 97, "d_model": 24, "n_heads": 6, "n_layers": 3, **_IDS},),
}  # fmt: skip
TRIED = [pytest.param(name, i, id=f"{name}-{i}") for name, cases in CASES.items() for i in range(len(cases))]


def outside(values: Values) -> NonFFN | None:
    """What a config has outside its FFN blocks, of which it says nothing here."""
    stacks = [Group(name, (0, 1, 2), FFNSpec(24, 40)) for name in ("encoder", "decoder")]
    return non_ffn(Fields(values, "here"), values["model_type"], stacks)


@cache
def case(name: str, number: int) -> tuple[dict[str, Any], Built, NonFFN]:
    """A config, transformers' model of it, and what we say of it."""
    values = {"model_type": name, **CASES[name][number]}
    found = outside(values)
    assert found is not None
    return values, build(values), found


def test_every_row_is_tried() -> None:
    tried = {*CASES, *MIXED, *REMOTE, "gemma3"}  # gemma3 is gemma3_text by its multimodal config's name
    tried |= {"grok-1", "PanguProMoE"}  # in test_remote.py
    assert tried == set(RESTS)  # MIXED in test_mixers.py


@pytest.mark.parametrize("name", CASES)
def test_what_absent_fields_mean(name: str) -> None:
    """A family's own defaults: what transformers' config class says when given heads and d_model alone."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    row = RESTS[name]
    if not isinstance(row.attention, Heads) or row.attention.heads is None or name in ("falcon", "opt", "gpt_bigcode"):
        pytest.skip("no such fields")
    d_model, heads = row.d_model.split("|")[0], row.attention.heads
    theirs = CONFIG_MAPPING[name](**{heads: 3, d_model: 24})
    if isinstance(row.attention.kv_heads, str):
        assert (getattr(theirs, row.attention.kv_heads) or 3) == (row.attention.kv_default or 3)
    if row.attention.head_dim and getattr(theirs, row.attention.head_dim, None):
        assert getattr(theirs, row.attention.head_dim) == (row.attention.head_dim_default or 8)
    if row.head is not None:
        assert theirs.tie_word_embeddings == row.tied


@pytest.mark.parametrize(("name", "number"), TRIED)
def test_attention_and_norms_of_a_layer(name: str, number: int) -> None:
    _, built, found = case(name, number)
    assert found.layers
    for stack, layers in found.layers.items():
        assert layers[1].attention == built.attention(stack, 1) > 0
        assert layers[1].norms == built.norms(stack, 1)


@pytest.mark.parametrize(("name", "number"), TRIED)
def test_what_lies_outside_the_layers(name: str, number: int) -> None:
    _, built, found = case(name, number)
    parts = found.parts
    assert parts is not None
    assert sum(params for (_, what), params in parts.items() if what != "layers") == built.outside
    if name != "vit":
        assert parts["", "input embedding"] == built.model.get_input_embeddings().weight.numel()
    if name in ENCODERS:
        assert (parts["", "head"], found.lookup) == (0, parts["", "input embedding"])
        return
    head, table = built.model.get_output_embeddings(), built.model.get_input_embeddings().weight
    assert found.lookup == (0 if head.weight is table else parts["", "input embedding"])
    assert parts["", "head"] == sum(p.numel() for p in head.parameters() if p is not table)


UNSAID = {"ernie4_5_moe-1"}  # biases in some of its MLPs alone: no block of ours, so its FFN is refused
COUNTED = [p for p in TRIED if p.values[0] in FAMILIES and p.id not in UNSAID]


@pytest.mark.parametrize(("name", "number"), COUNTED)
def test_whole_model(name: str, number: int) -> None:
    values, built, _ = case(name, number)
    assert count(from_config(values, "here", "here")).model_params_total == built.total


@pytest.mark.parametrize(
    "name", [name for name in catalog.names() if name not in ("transformer-base", "transformer-big", *RECENT)]
)
def test_catalog(name: str) -> None:
    """Real sizes, held to transformers' model of the same config and to the published total."""
    found = counted(name)
    expected = WHOLE.get(name)
    if expected is not None:
        assert found.model_params_total == expected
    values = catalog.config(name)
    if values:
        assert found.model_params_total == build(values).total
    else:
        assert expected is not None


@pytest.mark.parametrize("name", ACTIVE)
def test_active(name: str) -> None:
    """Both conventions: a token's parameters with its embedding, and without."""
    found = counted(name)
    assert (found.model_params_active, found.model_params_active_no_embedding) == ACTIVE[name]


def test_a_tied_table_is_the_head() -> None:
    found = known("gpt2")
    assert found.parts is not None
    assert (found.lookup, found.parts["", "head"], found.parts["", "input embedding"]) == (0, 0, 50257 * 768)
    plain = counted("gpt2")
    assert plain.model_params_active_no_embedding == plain.model_params_active == plain.model_params_total


def test_a_stack_that_is_absent_is_not_counted() -> None:
    found = known("t5-v1.1-base")
    both, alone = found.params({"encoder", "decoder"}), found.params({"encoder"})
    assert (both, alone) != (None, None)
    assert found.parts is not None
    encoder, decoder = (sum(n for (s, _), n in found.parts.items() if s == name) for name in ("encoder", "decoder"))
    assert both - alone == decoder > encoder


def test_bert_layer() -> None:
    found = known("bert-base")
    layer = found.layer("encoder", range(12))
    assert layer is not None
    assert found.layer("decoder", range(12)) is None
    assert (layer.attention, layer.norms) == (2_362_368, 3_072)
    assert round(layer.ffn_share(4_722_432), 3) == 0.666
    assert counted("bert-base").ffn_share_of_model == 56_669_184 / 109_482_240


def test_share_of_the_model_is_of_all_parameters() -> None:
    found = counted("mixtral-8x7b")
    assert found.ffn_share_of_model == 45_098_205_184 / 46_702_792_704


def said(**changes: Any) -> NonFFN | None:
    """What is said of a Llama config with these fields; None takes a field away."""
    values = {k: v for k, v in {"model_type": "llama", **_LLAMA, **changes}.items() if v is not None}
    return outside(values)


@pytest.mark.parametrize("missing", ["num_attention_heads", "vocab_size", "hidden_size"])
def test_without_what_it_takes_nothing_is_said(missing: str) -> None:
    assert said() is not None
    assert said(**{missing: None}) is None


def test_of_an_unknown_family_nothing_is_said() -> None:
    assert said(model_type="mamba") is None


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_attention_heads", "6"), ("num_key_value_heads", 0), ("head_dim", 1.5), ("vocab_size", True),
     ("attention_bias", 1), ("tie_word_embeddings", "yes")],
)  # fmt: skip
def test_a_value_that_cannot_be_names_its_field(field: str, value: object) -> None:
    with pytest.raises(FFNError, match=f"here: {field} must be"):
        said(**{field: value})


def test_key_value_heads_null_and_absent() -> None:
    """Null means as many as heads; absent means the family's own default: 8 for Mistral."""
    values = {"model_type": "mistral", **_WIDE}
    sizes = [outside({**values, **more}) for more in ({}, {"num_key_value_heads": None})]
    absent, null = (found.layers["decoder"][0].attention for found in sizes if found is not None)
    assert (absent, null) == (24 * 4 * (2 * 6 + 2 * 8), 4 * 24 * 24)


def test_images_may_have_two_sides() -> None:
    values = {"model_type": "vit", **CASES["vit"][0]}
    square = outside({**values, "image_size": [20, 20], "patch_size": [6, 6]})
    wide = outside({**values, "image_size": [20, 40], "patch_size": [6, 4]})
    assert square == outside(values)
    assert wide is not None
    assert wide.parts is not None
    assert wide.parts["encoder", "positions"] == 24 * (3 * 10 + 1)
    assert wide.parts["encoder", "stem"] == 24 * (2 * 6 * 4 + 2)
    for bad in ([20], [20, 0], [20, True]):
        with pytest.raises(FFNError, match="here: patch_size must be a side in pixels, or two"):
            outside({**values, "patch_size": bad})


def known(name: str) -> NonFFN:
    """What a known model has outside its FFN blocks."""
    found = catalog.find(name)
    assert found is not None
    assert found.model.non_ffn is not None
    return found.model.non_ffn


def counted(name: str) -> ModelCount:
    """A known model's whole count."""
    found = catalog.find(name)
    assert found is not None
    return count(found)
