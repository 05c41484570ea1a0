"""Families whose code is not in transformers, configs of repository code without a row, and other spellings."""

from typing import Any

import pytest
import torch

from ffncli.errors import FFNError
from ffncli.models.config.read import from_config
from ffncli.models.counting.count import count
from tests.oracles.checkpoints import refusal

CODE = {"auto_map": {"AutoConfig": "configuration_x.X"}}
LLAMA_LIKE = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "hidden_act": "silu"}
WIDE = 3 * 64 * 160  # gate, up and down of one layer
MIXTURE = {"moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 2}


def nas(*layers: dict[str, Any]) -> dict[str, Any]:
    return {"model_type": "nemotron-nas", "hidden_size": 8192, "num_hidden_layers": len(layers), "hidden_act": "silu",
            "block_configs": [{"attention": {}, "ffn": layer} for layer in layers]}  # fmt: skip


# By hand from each repository's modeling code; full sizes are those of the published config.
COUNTS: dict[str, tuple[dict[str, Any], int]] = {
    "exaone": (
        {"model_type": "exaone", "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32,
         "activation_function": "silu"}, 32 * 3 * 4096 * 14336,
    ),
    "minicpm": ({"model_type": "minicpm", **LLAMA_LIKE, "scale_depth": 1.4, "scale_emb": 12}, 3 * WIDE),
    "mimo": ({"model_type": "mimo", **LLAMA_LIKE, "num_nextn_predict_layers": 1}, 3 * WIDE),
    "internlm, whose bias is the attention's": ({"model_type": "internlm", **LLAMA_LIKE, "bias": True}, 3 * WIDE),
    "orion": ({"model_type": "orion", **LLAMA_LIKE}, 3 * WIDE),
    "yi": ({"model_type": "Yi", **LLAMA_LIKE}, 3 * WIDE),
    "xverse": ({"model_type": "xverse", **LLAMA_LIKE}, 3 * WIDE),
    # the published totals: 25.8 B with 4.2 B active, 146 B with 22 B active; the rest is attention and tables
    "XVERSE-MoE-A4.2B": (
        {"model_type": "xverse", "hidden_size": 2560, "intermediate_size": 1728, "num_hidden_layers": 28,
         "hidden_act": "silu", "num_experts": 64, "num_shared_experts": 2, "moe_top_k": 6},
        28 * (66 * 3 * 2560 * 1728 + 64 * 2560),
    ),
    "Skywork-MoE": (
        {"model_type": "skywork", "hidden_size": 4608, "intermediate_size": 12288, "num_hidden_layers": 52,
         "hidden_act": "silu", "num_experts": 16, "num_experts_per_tok": 2},
        52 * (16 * 3 * 4608 * 12288 + 16 * 4608),
    ),
    "Skywork with one expert": ({"model_type": "skywork", **LLAMA_LIKE, "num_experts": 1}, 3 * WIDE),
    "deepseek": (
        {"model_type": "deepseek", **LLAMA_LIKE, **MIXTURE, "first_k_dense_replace": 1, "moe_layer_freq": 1,
         "scoring_func": "softmax", "norm_topk_prob": False}, WIDE + 2 * (10 * 3 * 64 * 24 + 8 * 64),
    ),
    "bailing_moe": (
        {"model_type": "bailing_moe", **LLAMA_LIKE, "moe_intermediate_size": 24, "num_experts": 8,
         "num_experts_per_tok": 2, "num_shared_experts": 2, "first_k_dense_replace": 0, "norm_topk_prob": True},
        3 * (10 * 3 * 64 * 24 + 8 * 64),
    ),
    "phi3small": (
        {"model_type": "phi3small", "hidden_size": 64, "ff_intermediate_size": 160, "num_hidden_layers": 3,
         "hidden_act": "gegelu", "gegelu_limit": 20.0, "gegelu_pad_to_256": True, "blocksparse_block_size": 64,
         "mup_embedding_multiplier": 10.0}, 3 * (WIDE + 2 * 160 + 64),
    ),
    "the first Phi-2": (
        {"model_type": "phi-msft", "n_embd": 2560, "n_inner": None, "n_layer": 32, "activation_function": "gelu_new"},
        32 * (2 * 2560 * 10240 + 10240 + 2560),
    ),
    "OLMo 1": (
        {"model_type": "hf_olmo", "d_model": 64, "mlp_hidden_size": 320, "mlp_ratio": 4, "n_layers": 3,
         "activation_type": "swiglu"}, 3 * WIDE,
    ),
    "OLMo 1 without mlp_hidden_size": (
        {"model_type": "hf_olmo", "d_model": 64, "mlp_ratio": 8, "n_layers": 3, "activation_type": "swiglu"},
        3 * 3 * 64 * 256,
    ),
    # ⅔ · 5.25 · 8192 = 28,672, as wide as Llama-3's 70B; ⅔ · 2.625 · 8192 = 14,336; a layer without an FFN
    # the published totals of the next seven: 8.02 B (the rest is 32 · 4 · 4096² and two tables of 126,464), 13.6 B
    # without embeddings, 16 B with 1.4 B active, 27.5 B with its vision, 389 B, 80 B, 13 B
    "LLaDA-8B": (
        {"model_type": "llada", "d_model": 4096, "mlp_hidden_size": 12288, "mlp_ratio": 4, "n_layers": 32,
         "activation_type": "silu", "block_type": "llama"}, 32 * 3 * 4096 * 12288,
    ),
    "MiniCPM-MoE-8x2B": (
        {"model_type": "minicpm", "hidden_size": 2304, "intermediate_size": 5760, "num_hidden_layers": 40,
         "hidden_act": "silu", "num_experts": 8, "num_experts_per_tok": 2, "scale_depth": 1.4},
        40 * (8 * 3 * 2304 * 5760 + 8 * 2304),
    ),
    "Ling-mini-2.0": (
        {"model_type": "bailing_moe_v2", "hidden_size": 2048, "intermediate_size": 5120, "moe_intermediate_size": 512,
         "num_hidden_layers": 20, "hidden_act": "silu", "num_experts": 256, "num_shared_experts": 1,
         "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 1, "norm_topk_prob": True,
         "moe_router_enable_expert_bias": True, "routed_scaling_factor": 2.5, "router_dtype": "fp32",
         "score_function": "sigmoid", "moe_shared_expert_intermediate_size": 512},
        3 * 2048 * 5120 + 19 * (257 * 3 * 2048 * 512 + 256 * 2048 + 256),
    ),
    "DeepSeek-VL2": (
        {"model_type": "deepseek_vl_v2", "language_config": {
            "model_type": "deepseek_v2", "hidden_size": 2560, "intermediate_size": 12288, "num_hidden_layers": 30,
            "hidden_act": "silu", "moe_intermediate_size": 1536, "n_routed_experts": 72, "n_shared_experts": 2,
            "num_experts_per_tok": 6, "first_k_dense_replace": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid",
            "norm_topk_prob": True, "routed_scaling_factor": 2.0, "n_group": 1, "topk_group": 1}},
        3 * 2560 * 12288 + 29 * (74 * 3 * 2560 * 1536 + 72 * 2560 + 72),
    ),
    "Hunyuan-Large": (
        {"model_type": "hunyuan", "hidden_size": 6400, "intermediate_size": 18304, "num_hidden_layers": 64,
         "hidden_act": "silu", "num_experts": 16, "moe_topk": 1, "num_shared_expert": 1, "use_mixed_mlp_moe": True},
        64 * (17 * 3 * 6400 * 18304 + 16 * 6400),
    ),
    "Hunyuan-A13B, a number for each layer": (
        {"model_type": "hunyuan_v1_moe", "hidden_size": 4096, "intermediate_size": 3072, "num_hidden_layers": 32,
         "hidden_act": "silu", "moe_intermediate_size": [3072] * 32, "num_experts": 64, "moe_topk": [8] * 32,
         "num_shared_expert": [1] * 32, "use_mixed_mlp_moe": True, "dense_list": [128167, 0]},
        32 * (65 * 3 * 4096 * 3072 + 64 * 4096),
    ),
    "jais-13b": (
        {"model_type": "jais", "activation_function": "swiglu", "n_embd": 5120, "n_inner": 13653, "n_layer": 40},
        40 * (3 * 5120 * 13653 + 2 * 13653 + 5120),
    ),
    "telechat, whose down projection alone has a bias": (
        {"model_type": "telechat", "hidden_size": 64, "ffn_hidden_size": 160, "n_layer": 3}, 3 * (WIDE + 64)
    ),
    "codeshell": (
        {"model_type": "codeshell", "activation_function": "gelu_pytorch_tanh", "n_embd": 64, "n_inner": 256,
         "n_layer": 3}, 3 * (2 * 64 * 256 + 256 + 64),
    ),
    "plamo": (
        {"model_type": "plamo", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3,
         "n_shared_head": 8}, 3 * WIDE,
    ),
    "LLaVA's first code": (
        {"model_type": "llava_qwen", **LLAMA_LIKE, "num_attention_heads": 4, "vocab_size": 100, "mm_hidden_size": 32},
        3 * WIDE,
    ),
    "nemotron-nas": (
        nas({"ffn_mult": 5.25}, {"ffn_mult": 2.625}, {"no_op": True}, {"ffn_mult": 0.1}),
        3 * 8192 * (28672 + 14336 + 768),  # 2/3 of 0.1 · 8192 is 546.1, rounded up to 3 · 256
    ),
    "openelm": (
        {"model_type": "openelm", "model_dim": 1280, "num_transformer_layers": 2, "ffn_multipliers": [0.5, 0.73],
         "ffn_dim_divisor": 256, "ffn_with_glu": True, "activation_fn_name": "swish"}, 3 * 1280 * (768 + 1024),
    ),
    "grok-1": (
        {"model_type": "grok-1", "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_experts": 8,
         "num_experts_per_tok": 2, "output_multiplier_scale": 0.577}, 3 * (8 * WIDE + 8 * 64),
    ),
    # Grok-2: experts of moe_intermediate_size, and an MLP of intermediate_size beside them
    "grok-2": (
        {"model_type": "git", "architectures": ["Grok1ForCausalLM"], "hidden_size": 64, "intermediate_size": 160,
         "moe_intermediate_size": 24, "num_hidden_layers": 3, "num_local_experts": 8, "num_experts_per_tok": 2,
         "residual_moe": True, "router_logit_softcapping": 30.0, "embedding_multiplier_scale": 90.5},
        3 * (8 * 3 * 64 * 24 + 8 * 64 + WIDE),
    ),
    # its router has a learned factor for each expert
    "Pangu Pro MoE": (
        {"model_type": "PanguProMoE", "hidden_size": 64, "num_hidden_layers": 3, "hidden_act": "silu",
         "moe_intermediate_size": 24, "shared_expert_intermediate_size": 160, "num_experts": 8,
         "num_experts_per_tok": 2}, 3 * (8 * 3 * 64 * 24 + 8 * 64 + 8 + WIDE),
    ),
    "CogVLM, without a model_type": ({"architectures": ["CogVLMForCausalLM"], **LLAMA_LIKE}, 3 * WIDE),
    # the mixture of every second layer has a dense MLP as wide as d_model beside it
    "arctic": (
        {"model_type": "arctic", **LLAMA_LIKE, "num_hidden_layers": 4, "num_local_experts": 8, "num_experts_per_tok": 2,
         "moe_layer_frequency": 2, "moe_token_dropping": True, "parallel_attn_mlp_res": True},
        2 * WIDE + 2 * (8 * WIDE + 8 * 64 + 3 * 64 * 64),
    ),
}  # fmt: skip


COUNTED_ONLY = ("grok-2", "Pangu Pro MoE")


@pytest.mark.parametrize("name", COUNTS)
def test_counts_by_hand(name: str) -> None:
    values, params = COUNTS[name]
    assert count(from_config({**values, **CODE}, name, "config.json")).ffn_params_total == params
    assert bool(refusal({**values, **CODE})) == (name in COUNTED_ONLY)


@pytest.mark.parametrize(
    ("values", "total", "active"),
    [  # billions, as published
        ({"model_type": "git", "architectures": ["Grok1ForCausalLM"], "hidden_size": 8192, "intermediate_size": 32768,
          "moe_intermediate_size": 16384, "num_experts_per_tok": 2, "num_local_experts": 8, "residual_moe": True,
          "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 64, "head_dim": 128,
          "vocab_size": 131072, "rms_norm_eps": 1e-5}, 270, 115),
        ({"model_type": "PanguProMoE", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
          "num_key_value_heads": 8, "hidden_act": "silu", "moe_intermediate_size": 1344, "num_experts": 64,
          "shared_expert_intermediate_size": 5376, "num_experts_per_tok": 8, "vocab_size": 153376}, 72, 16.5),
    ],
)  # fmt: skip
def test_totals_are_the_published_ones(values: dict[str, Any], total: float, active: float) -> None:
    read = from_config({**values, **CODE}, "c", "config.json")
    counted = count(read)
    assert read.model.refused
    assert counted.model_params_total == pytest.approx(total * 1e9, rel=0.005)
    assert counted.model_params_active == pytest.approx(active * 1e9, rel=0.005)
    assert not any("is not used" in line for line in read.evidence)
    by = f"class {values['architectures'][0]}" if "architectures" in values else "model_type"
    assert any(line.startswith(f"gated: {by}") for line in read.evidence)


def test_what_decided_is_the_evidence() -> None:
    """The model_type, another spelling of one, or the class if the model_type is unknown or another family's."""
    for config, decided in (
        ({"model_type": "llama"}, "model_type llama"),
        ({"model_type": "foo", "architectures": ["LlamaForCausalLM"]}, "class LlamaForCausalLM"),
        ({"architectures": ["CogVLMForCausalLM"]}, "class CogVLMForCausalLM"),
    ):
        read = from_config({**LLAMA_LIKE, **config, **CODE}, "c", "config.json")
        assert f"gated: {decided}" in read.evidence


def test_cogvlms_image_tokens_have_ffns_of_their_own_behind_the_same_norms() -> None:
    (images,) = from_config({**COUNTS["CogVLM, without a model_type"][0], **CODE}, "c", "config.json").not_counted[:1]
    assert (images.what, images.parameters) == ("FFNs of image tokens", 3 * WIDE)


def test_openelms_widths_are_those_of_its_code() -> None:
    """`make_divisible` of its repository, after the paper's torchvision function, on many drawn multipliers."""

    def make_divisible(v: float, divisor: int) -> int:
        new = max(divisor, int(v + divisor / 2) // divisor * divisor)
        return new + divisor if new < 0.9 * v else new

    draw = torch.Generator().manual_seed(0)
    factors = [round(0.2 + 4 * f, 2) for f in torch.rand(40, generator=draw).tolist()]
    values = {**COUNTS["openelm"][0], "num_transformer_layers": 40, "ffn_multipliers": factors}
    groups = from_config(values, "openelm", "config.json").model.groups
    widths = {layer: group.spec.d_ff for group in groups for layer in group.layers}
    assert [widths[i] for i in range(40)] == [make_divisible(f * 1280, 256) for f in factors]


def test_phi3smalls_unit_is_that_of_its_code() -> None:
    """`gegelu` of its repository: quick GELU of the clamped gate, times the clamped other half plus one."""
    from ffncli.block.recipe import unit_ops
    from ffncli.run.engine.execute import activation

    spec = from_config({**COUNTS["phi3small"][0], "gegelu_limit": 1.5}, "p", "config.json").model.main.spec
    gate, up = torch.randn(2, 200, dtype=torch.float64) * 2
    act, lift = unit_ops(spec.activation, spec.limits)
    clamped = gate.clamp(max=1.5)
    theirs = clamped * torch.sigmoid(1.702 * clamped) * (up.clamp(-1.5, 1.5) + 1)
    assert torch.allclose(activation(act, {}, gate) * activation(lift, {}, up), theirs)


def test_repository_code_that_may_differ_is_counted_with_a_note_or_refused() -> None:
    unknown = {"model_type": "somebodys", **LLAMA_LIKE, **CODE}
    read = from_config(unknown, "c", "config.json")
    assert count(read).ffn_params_total == 3 * WIDE
    assert count(read).model_params_total is None
    assert read.notes[0] == (
        "model_type 'somebodys' has code of its own, assumed to run Llama's block: gate, up and down without biases; "
        "only its tensors would show this"
    )
    for other in ({"hidden_act": "gelu"}, {"auto_map": None}, {"intermediate_size": None}):
        with pytest.raises(FFNError, match="'somebodys' is not known; give the model's tensors"):
            from_config({**unknown, **other}, "c", "config.json")
    with pytest.raises(FFNError, match="n_routed_experts = 8, moe_intermediate_size = 24"):
        from_config({**unknown, "n_routed_experts": 8, "moe_intermediate_size": 24}, "c", "config.json")


@pytest.mark.parametrize(
    ("given", "means"),
    [
        ({"model_type": "qwen2-vl"}, "qwen2_vl"), ({"model_type": "Qwen2"}, "qwen2"),
        ({"model_type": "qwen3_lm"}, "qwen3"),
        ({"model_type": "mine", "architectures": ["LlamaForCausalLM"]}, "llama"),
        ({"model_type": "mine", "architectures": ["Qwen3Model"]}, "qwen3"),
    ],
)  # fmt: skip
def test_another_spelling_is_read_as_the_family_that_it_means(given: dict[str, Any], means: str) -> None:
    common = {**LLAMA_LIKE, "num_attention_heads": 4, "vocab_size": 100}
    read = from_config({**common, **given}, "c", "config.json")
    known = from_config({**common, "model_type": means}, "c", "config.json")
    assert read.model.groups == known.model.groups
    assert count(read).model_params_total == count(known).model_params_total
    assert f"is read as {means}" in read.notes[0]


@pytest.mark.parametrize("wrong", ["exaone9", "minimax_m9", "mistrall4x", "deepseek_v9"])
def test_no_advice_to_use_another_model(wrong: str) -> None:
    with pytest.raises(FFNError, match="give the model's tensors"):
        from_config({"model_type": wrong, **LLAMA_LIKE}, "c", "config.json")


def test_gemma_4s_experts_beside_its_mlp_are_counted_and_not_run() -> None:
    """Against transformers' own modules on meta: the MLP, the router with its two scales, the experts."""
    pytest.importorskip("transformers")
    from transformers.models.gemma4 import modeling_gemma4 as code

    config = code.Gemma4TextConfig(
        hidden_size=64, intermediate_size=48, moe_intermediate_size=24, num_experts=8, top_k_experts=2,
        num_hidden_layers=2, enable_moe_block=True, hidden_size_per_layer_input=0, vocab_size=128,
        vocab_size_per_layer_input=128, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        layer_types=["sliding_attention", "full_attention"], num_kv_shared_layers=0,
    )  # fmt: skip
    with torch.device("meta"):
        model = code.Gemma4TextModel(config)
    theirs = sum(
        parameter.numel() for layer in model.layers for part in (layer.mlp, layer.router, layer.experts)
        for parameter in part.parameters()
    )  # fmt: skip
    values = {name: value for name, value in config.to_dict().items() if name != "dtype"}
    ours = count(from_config(values, "gemma", "config.json"))
    assert ours.ffn_params_total == theirs
    assert "enable_moe_block = true is not covered" in refusal(values)
