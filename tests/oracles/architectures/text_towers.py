"""Cases of text models inside multimodal ones that transformers lists in none of its text tables.

Each is built alone, as the class that its family's modeling file has for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.oracles.architectures import Architecture

_NONE = r"(?!)"


def layers(
    model: str, ffn: str = r"mlp\..*", norm: str = r"post_attention_layernorm\..*", at: str = "", **values: Any
) -> Architecture:
    """A model whose blocks are `layers.0`, ...: its FFN and the FFN's norms by the names after that."""
    layer = r"(?:.*\.)?layers?\.\d+\."
    return Architecture(layer + ffn, layer + norm, values, model=model, at=at)


def bert(model: str, **values: Any) -> Architecture:
    return layers(model, r"(intermediate|output)\.dense\..*", r"output\.LayerNorm\..*", **values)


def _clip(model: str, **values: Any) -> Architecture:
    return layers(model, norm=r"layer_norm2\..*", **values)


def _kosmos(model: str) -> Architecture:
    return layers(
        model, r"ffn\.fc[12]\..*", r"(final_layer_norm|ffn\.ffn_layernorm)\..*",
        embed_dim=16, layers=4, attention_heads=4, ffn_dim=40,
    )  # fmt: skip


_ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 0]}  # half of a head together
_GLM = r"(post_attention_layernorm|post_mlp_layernorm)\.weight"
_MIXED = ["dense", "sparse", "sparse", "sparse"]

CASES: Mapping[str, Architecture] = {
    "qwen2_vl_text": layers("Qwen2VLTextModel"),
    "qwen2_5_vl_text": layers("Qwen2_5_VLTextModel"),
    "qwen2_5_omni_text": layers("Qwen2_5OmniThinkerTextModel"),
    "qwen3_vl_text": layers("Qwen3VLTextModel"),
    "qwen3_vl_moe_text": layers("Qwen3VLMoeTextModel", mlp_only_layers=[1]),
    "qwen3_omni_moe_text": layers("Qwen3OmniMoeThinkerTextModel", mlp_only_layers=[1]),
    "glm4v_text": layers("Glm4vTextModel", norm=_GLM),
    "glm4v_moe_text": layers("Glm4vMoeTextModel"),
    "glm5_next_text": layers(
        "Glm5NextTextModel", num_key_value_heads=4, index_topk=16, qk_rope_head_dim=0,
        linear_num_heads=2, linear_head_dim=8,
    ),
    "glm_image_text": layers("GlmImageTextModel", norm=_GLM),
    "glm_ocr_text": layers("GlmOcrTextModel", norm=_GLM),
    "hunyuan_vl_text": layers("HunYuanVLTextModel"),
    "paddleocr_vl_text": layers("PaddleOCRTextModel", use_bias=True),
    "cosmos3_edge_text": layers("Cosmos3EdgeTextModel", rope_parameters=_ROPE),
    "deepseek_ocr2_text": layers("DeepseekOcr2TextModel", mlp_layer_types=_MIXED),
    "unlimited_ocr_text": layers("UnlimitedOcrTextModel"),
    "granite4_vision_text": layers("Granite4VisionTextModel", mlp_bias=True),
    "step3p5": layers("Step3p7TextModel", mlp_layer_types=_MIXED),
    "granite_docling_text": layers("GraniteDoclingTextModel"),
    "mistral4": layers("Mistral4Model"),
    "mistral_large4_text": layers("MistralLarge4TextModel"),
    "embedding_gemma2_text": layers("EmbeddingGemma2TextModel", norm=r"(pre|post)_feedforward_layernorm\.weight"),
    "muse_spark_text": layers(
        "MuseSparkTextModel", r"mlp\.(?!.*_norm\.).*",
        r"(pre_feedforward_layernorm|post_feedforward_layernorm|mlp\.pre_expert_norm|mlp\.experts\.post_expert_norm)\..*",
        moe_hidden_size=10, mlp_layer_types=_MIXED, routed_scaling_factor=2.5, post_norm_eps=1e-3,
    ),
    "muse_glimmer_text": layers(
        "MuseGlimmerTextModel", norm=r"(pre|post)_feedforward_layernorm\.weight", post_norm_eps=1e-3
    ),
    "openai_privacy_filter": layers("OpenAIPrivacyFilterModel", swiglu_limit=0.5),
    "chameleon": layers(
        "ChameleonModel", swin_norm=True, vocabulary_map={"<image>": 3}, vq_config={"base_channels": 32}
    ),
    "align_text_model": bert("AlignTextModel"),
    "altclip_text_model": bert("AltCLIPTextModel"),
    "blip_text_model": bert("BlipTextModel"),
    "bridgetower_text_model": bert("models.bridgetower.modeling_bridgetower.BridgeTowerTextModel"),
    "chinese_clip_text_model": bert("ChineseCLIPTextModel"),
    "clap_text_model": bert("ClapTextModel"),
    "flava_text_model": layers("FlavaTextModel", r"(intermediate|output)\.dense\..*", r"layernorm_after\..*"),
    "clipseg_text_model": _clip("CLIPSegTextModel"),
    "groupvit_text_model": _clip("GroupViTTextModel"),
    "metaclip_2_text_model": _clip("MetaClip2TextModel"),
    "owlv2_text_model": _clip("Owlv2TextModel"),
    "owlvit_text_model": _clip("OwlViTTextModel"),
    "siglip_text_model": _clip("SiglipTextModel"),
    "siglip2_text_model": _clip("Siglip2TextModel"),
    "xclip_text_model": _clip("XCLIPTextModel"),
    "aimv2_text_model": layers("Aimv2TextModel", r"ffn\..*", r"rms_norm2\.weight"),
    "kosmos_2_text_model": _kosmos("models.kosmos2.modeling_kosmos2.Kosmos2TextForCausalLM"),
    "kosmos_2_5_text_model": _kosmos("models.kosmos2_5.modeling_kosmos2_5.Kosmos2_5TextForCausalLM"),
    "pix2struct_text_model": Architecture(
        r"layer\.\d+\.mlp\.DenseReluDense\..*", r"layer\.\d+\.mlp\.layer_norm\.weight", model="Pix2StructTextModel"
    ),
}  # fmt: skip

# Remote code: (published config, all parameters, active ones), from the published tables and model pages.
REMOTE: Mapping[str, tuple[Mapping[str, Any], int, int]] = {
    "kimi_k2": (  # Kimi-K2-Instruct: 1T, 32B active
        {
            "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
            "num_hidden_layers": 61, "num_attention_heads": 64, "num_key_value_heads": 64,
            "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "topk_method":
            "noaux_tc", "scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor":
            2.827, "hidden_act": "silu", "rms_norm_eps": 1e-06, "q_lora_rank": 1536, "kv_lora_rank": 512,
            "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 163840,
            "tie_word_embeddings": False, "attention_bias": False, "num_nextn_predict_layers": 0,
        },
        1_026_408_232_448, 32_861_500_928,
    ),
    "internlm2": (  # internlm2-7b
        {
            "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads":
            32, "num_key_value_heads": 8, "hidden_act": "silu", "rms_norm_eps": 1e-05, "vocab_size":
            92544, "bias": False, "tie_word_embeddings": False,
        },
        7_737_708_544, 7_737_708_544,
    ),
    "baichuan": (  # Baichuan-7B
        {
            "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads":
            32, "hidden_act": "silu", "rms_norm_eps": 1e-06, "vocab_size": 64000, "tie_word_embeddings":
            False,
        },
        7_000_559_616, 7_000_559_616,
    ),
    "qwen": (  # Qwen-7B
        {
            "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32, "num_attention_heads":
            32, "kv_channels": 128, "layer_norm_epsilon": 1e-06, "no_bias": True, "vocab_size": 151936,
            "tie_word_embeddings": False,
        },
        7_721_324_544, 7_721_324_544,
    ),
    "chatglm": (  # chatglm2-6b
        {
            "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 28, "num_attention_heads": 32,
            "kv_channels": 128, "multi_query_attention": True, "multi_query_group_num": 2,
            "add_bias_linear": False, "add_qkv_bias": True, "rmsnorm": True, "post_layer_norm": True,
            "apply_residual_connection_post_layernorm": False, "layernorm_epsilon": 1e-05,
            "padded_vocab_size": 65024, "tie_word_embeddings": False,
        },
        6_243_584_000, 6_243_584_000,
    ),
    "RefinedWebModel": (  # falcon-7b
        {
            "hidden_size": 4544, "n_layer": 32, "n_head": 71, "multi_query": True, "parallel_attn": True,
            "bias": False, "alibi": False, "layer_norm_epsilon": 1e-05, "vocab_size": 65024,
            "apply_residual_connection_post_layernorm": False,
        },
        6_921_720_704, 6_921_720_704,
    ),
    "RefinedWeb": (  # falcon-40b
        {
            "hidden_size": 8192, "n_layer": 60, "n_head": 128, "n_head_kv": 8, "parallel_attn": True,
            "bias": False, "alibi": False, "layer_norm_epsilon": 1e-05, "vocab_size": 65024,
            "apply_residual_connection_post_layernorm": False,
        },
        41_303_293_952, 41_303_293_952,
    ),
}  # fmt: skip
