"""Configs as their organisations publish them: beside what a family's row reads, they have fields of other programs.

Each case: what the published config.json says of the FFN, and how many parameters follow by hand. These fields were
refused as unknown, until real configs were read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count

_M2 = {
    "model_type": "minimax_m2", "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
    "num_local_experts": 256, "num_experts_per_tok": 8, "hidden_act": "silu", "scoring_func": "sigmoid",
    "use_routing_bias": True, "shared_intermediate_size": 0, "use_mtp": True, "num_mtp_modules": 3,
}  # fmt: skip
_M3 = {
    "model_type": "minimax_m3_vl_text", "hidden_size": 6144, "intermediate_size": 3072, "num_hidden_layers": 60,
    "num_local_experts": 128, "num_experts_per_tok": 4, "hidden_act": "swigluoai", "dense_intermediate_size": 12288,
    "shared_intermediate_size": 3072, "n_shared_experts": 1, "scoring_func": "sigmoid", "use_routing_bias": True,
    "moe_layer_freq": [0] * 3 + [1] * 57, "swiglu_alpha": 1.702, "swiglu_limit": 7.0, "routed_scaling_factor": 2.0,
}  # fmt: skip
_MIMO = {
    "model_type": "mimo_v2_flash", "hidden_size": 4096, "intermediate_size": 16384, "num_hidden_layers": 48,
    "moe_layer_freq": [0] + [1] * 47, "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": None,
    "num_experts_per_tok": 8, "norm_topk_prob": True, "scoring_func": "sigmoid", "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "routed_scaling_factor": None, "hidden_act": "silu",
}  # fmt: skip
_GLM = {
    "model_type": "glm_moe_dsa", "hidden_size": 6144, "intermediate_size": 12288, "num_hidden_layers": 78,
    "first_k_dense_replace": 3, "moe_layer_freq": 1, "moe_intermediate_size": 2048, "n_routed_experts": 256,
    "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_router_dtype": "float32", "scoring_func": "sigmoid",
    "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1, "hidden_act": "silu", "routed_scaling_factor": 2.5,
}  # fmt: skip
_TRINITY = {
    "model_type": "afmoe", "hidden_size": 1024, "intermediate_size": 3072, "moe_intermediate_size": 256,
    "num_hidden_layers": 56, "num_dense_layers": 2, "num_experts": 128, "num_experts_per_tok": 8, "hidden_act": "silu",
    "num_shared_experts": 1, "n_group": 1, "topk_group": 1, "num_expert_groups": 1, "num_limited_groups": 1,
    "route_norm": True, "route_scale": 2.826, "score_func": "sigmoid",
}  # fmt: skip
_VL = {
    "model_type": "qwen3_vl_moe_text", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "hidden_act": "silu",
}  # fmt: skip
_OSS = {
    "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 24,
    "num_local_experts": 32, "num_experts_per_tok": 4, "experts_per_token": 4, "hidden_act": "silu",
    "swiglu_limit": 7.0,
}  # fmt: skip
_QWEN = {
    "model_type": "qwen3_5_text", "hidden_size": 5120, "intermediate_size": 17408, "num_hidden_layers": 64,
    "hidden_act": "silu", "attn_output_gate": True, "output_gate_type": "swish", "mlp_only_layers": [],
}  # fmt: skip

# Router, its correction, routed experts, shared expert: d (E + 3 E w + 3 s) + E; dense: 3 d w.
CASES = {
    "MiniMax-M2.5": (_M2, 62 * (256 * (3072 + 1 + 3 * 3072 * 1536))),
    "MiniMax-M3": (_M3, 57 * (128 * (6144 + 1 + 3 * 6144 * 3072) + 3 * 6144 * 3072) + 3 * 3 * 6144 * 12288),
    "MiMo-V2-Flash": (_MIMO, 47 * 256 * (4096 + 1 + 3 * 4096 * 2048) + 3 * 4096 * 16384),
    "GLM-5.2": (_GLM, 75 * (256 * (6144 + 1 + 3 * 6144 * 2048) + 3 * 6144 * 2048) + 3 * 3 * 6144 * 12288),
    "Trinity-Nano": (_TRINITY, 54 * (128 * (1024 + 1 + 3 * 1024 * 256) + 3 * 1024 * 256) + 2 * 3 * 1024 * 3072),
    "Qwen3-VL-30B-A3B": (_VL, 48 * 128 * (2048 + 3 * 2048 * 768)),
    "gpt-oss-20b": (_OSS, 24 * 32 * (2880 + 1 + 3 * 2880 * 2880 + 3 * 2880)),
    "Qwen3.6-27B": (_QWEN, 64 * 3 * 5120 * 17408),
}


@pytest.mark.parametrize("name", CASES)
def test_a_published_config_is_read(name):
    config, params = CASES[name]
    assert count(from_config(config, name, "config.json")).ffn_params_total == params


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (_MIMO, "moe_layer_freq", [0, 0] + [1] * 46), (_GLM, "moe_router_dtype", "bfloat16"),
        (_TRINITY, "score_func", "softmax"), (_TRINITY, "topk_group", 4),
    ],
)  # fmt: skip
def test_a_value_that_the_family_does_not_compute_is_refused(config: Mapping[str, Any], field: str, value: object):
    with pytest.raises(FFNError, match=field):
        from_config({**config, field: value}, "x", "config.json")
