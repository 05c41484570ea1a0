"""What the rows of mixtures of experts read that no default config of transformers holds: lists, nulls, refusals."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from tests.oracles.architectures import config_fields

TINY = {
    "hidden_size": 16, "intermediate_size": 40, "num_hidden_layers": 4, "num_attention_heads": 4,
    "moe_intermediate_size": 12, "num_experts": 8, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 20,
}  # fmt: skip
WIDTHS = ("moe_intermediate_size", "shared_expert_intermediate_size")
DEEPSEEK = {**TINY, "num_hidden_layers": 5, "n_group": 2, "topk_group": 1}
LLAMA4 = {**TINY, "intermediate_size_mlp": 44}
LONGCAT = {"num_layers": 2, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 12, "n_routed_experts": 8}
FFN = {"ffn_hidden_size": 40, "moe_num_experts": 8, "moe_top_k": 2}
DBRX = {"d_model": 16, "n_layers": 2}


def known(model_type: str, values: dict[str, Any]) -> dict[str, Any]:
    """Without the widths that the model_type's config does not have: they would be refused."""
    names = config_fields(CONFIG_MAPPING[model_type]) if model_type in CONFIG_MAPPING else set(values)
    return {name: value for name, value in values.items() if name in names or name not in WIDTHS}


def routed(model_type: str, **values: Any) -> list[int]:
    """The layers that have experts."""
    groups = from_config({"model_type": model_type, **known(model_type, values)}, "c", "c").model.groups
    return sorted(i for g in groups for i in g.layers if g.spec.moe)


def moe(model_type: str, **values: Any) -> Any:
    """The routing of the first layers that have one."""
    groups = from_config({"model_type": model_type, **known(model_type, values)}, "c", "c").model.groups
    return next(g.spec.moe for g in groups if g.spec.moe)


@pytest.mark.parametrize(
    ("model_type", "values", "layers"),
    [
        ("axk1", {**DEEPSEEK}, [1, 2, 3, 4]),
        ("axk1", {**DEEPSEEK, "first_k_dense_replace": 0, "moe_layer_freq": 2}, [0, 2, 4]),
        ("dots3_note_text", {**DEEPSEEK, "num_key_value_heads": 4, "moe_layer_freq": [0, 0, 1, 0, 1]}, [2, 4]),
        ("deepseek_v32", {**DEEPSEEK, "mlp_layer_types": ["sparse", "dense", "dense", "sparse", "dense"]}, [0, 3]),
        ("flint", {**TINY}, [2, 3]),
        ("flint", {**TINY, "mlp_only_layers": []}, [0, 1, 2, 3]),
        ("ernie4_5_moe", {**TINY, "moe_layer_end_index": 2}, [1, 2]),
        ("ernie4_5_moe", {**TINY, "moe_layer_interval": 2}, [1, 3]),
        ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2}, [1, 3]),
        ("llama4_text", {**LLAMA4, "interleave_moe_layer_step": 2, "moe_layers": [0]}, [0]),
    ],
)
def test_which_layers_have_experts(model_type: str, values: dict[str, Any], layers: list[int]) -> None:
    assert routed(model_type, **values) == layers
    theirs = AutoConfig.for_model(model_type, **values)
    if hasattr(theirs, "mlp_layer_types"):
        assert [i for i, kind in enumerate(theirs.mlp_layer_types) if kind == "sparse"] == layers
    if hasattr(theirs, "moe_layers"):
        assert theirs.moe_layers == layers


def test_null_is_not_absent_where_the_code_asks() -> None:
    assert moe("dbrx", **DBRX, ffn_config=FFN).renormalise is True
    assert moe("dbrx", **DBRX, ffn_config={**FFN, "moe_normalize_expert_weights": None}).renormalise is False
    assert moe("longcat_flash", hidden_size=16, moe_topk=2, **LONGCAT).identity_experts == 256
    assert moe("longcat_flash", hidden_size=16, moe_topk=2, **LONGCAT, zero_expert_num=None).identity_experts == 0


def test_a_list_with_one_top_k_per_layer() -> None:
    values = {k: v for k, v in TINY.items() if k != "num_experts_per_tok"}
    assert moe("hunyuan_v1_moe", **values, moe_topk=[3, 3, 3, 3]).top_k == 3
    with pytest.raises(FFNError, match=r"moe_topk must be one number for all layers, got \[3, 2, 3, 3\]"):
        moe("hunyuan_v1_moe", **values, moe_topk=[3, 2, 3, 3])


def test_cohere_2_takes_the_mean_of_experts_and_shared_ones() -> None:
    mean = moe("cohere2_moe", **TINY, num_shared_experts=1)
    whole = moe("cohere2_moe", **TINY, num_shared_experts=1, shared_expert_combination_strategy="sum")
    assert (mean.scale, mean.shared_scale, whole.scale, whole.shared_scale) == (0.5, 0.5, 1.0, 1.0)
    assert moe("cohere2_moe", **TINY).scale == 1.0


@pytest.mark.parametrize(
    ("model_type", "values", "message"),
    [
        ("deepseek_v2", {**DEEPSEEK, "mlp_bias": True}, "mlp_bias = True is not covered"),
        ("ernie4_5_moe", {**TINY, "use_bias": True}, "use_bias = True is not covered"),
        ("aria_text", {**TINY, "hidden_act": "gelu"}, "hidden_act = 'gelu' is not covered"),
        ("kolibri1", {**TINY, "norm_topk_prob": True}, "norm_topk_prob = True is not covered"),
        ("laguna", {**TINY, "moe_router_logit_softcapping": 30.0}, "softcapping = 30.0 is not covered"),
        ("cohere2_moe", {**TINY, "expert_selection_fn": "entmax"}, "expert_selection_fn = 'entmax'"),
        ("cohere2_moe", {**TINY, "shared_expert_combination_strategy": "max"}, "strategy = 'max'"),
        ("dbrx", {**DBRX, "ffn_config": {**FFN, "moe_normalize_expert_weights": 2.0}}, "weights = 2.0"),
        ("dbrx", {**DBRX, "ffn_config": []}, r"ffn_config\.ffn_hidden_size is missing"),
        ("longcat_flash", {"hidden_size": 16, "moe_topk": 2, **LONGCAT, "router_bias": True}, "router_bias = True"),
        ("minimax_m3_vl_text", {**TINY, "swiglu_alpha": 2.0}, "swiglu_alpha = 2 is not covered"),
        ("mellum", {**TINY, "mlp_layer_types": ["sparse"]}, "must be a list of 4 out of dense, sparse"),
        ("mellum", {**TINY, "mlp_layer_types": ["sparse"] * 3 + [{}]}, "must be a list of 4"),
        ("axk1", {**DEEPSEEK, "moe_layer_freq": [1, 2, 3, 4, 5]}, "moe_layer_freq must be a list of 5 out of 0, 1"),
    ],
)
def test_what_is_not_covered_is_named(model_type: str, values: dict[str, Any], message: str) -> None:
    with pytest.raises(FFNError, match=message):
        from_config({"model_type": model_type, **known(model_type, values)}, "c", "c")
