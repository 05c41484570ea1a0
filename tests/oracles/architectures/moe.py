"""Cases of mixtures of experts: how each is built tiny, and which parameters are its FFN's."""

from __future__ import annotations

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

_NONE = r"(?!)"  # no norm that only the FFN reads
# Composites: vision and audio towers are not counted.
_TEXT_FFN = r"model\.language_model\.layers\.\d+\.mlp\..*"
_TEXT_NORM = r"model\.language_model\.layers\.\d+\.post_attention_layernorm\..*"
_TOWERS = ("intermediate_size", "moe_intermediate_size")  # so that the other towers keep theirs when the text's double
_DOTS3 = {
    "num_key_value_heads": 4, "layer_types": ["full_attention"] * 4, "use_dsa": False,
    "shared_experts_intermediate_size": 20,
}  # fmt: skip
_QWEN4 = {
    "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8,
    "indexer_compress_ratio": 2,
}  # fmt: skip
_DEEPSEEK4 = {
    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"], "layer_types": ["sliding_attention"] * 4,
    "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5, "o_groups": 2,
}  # fmt: skip
_LLAMA4 = {"interleave_moe_layer_step": 2}  # layers 1 and 3 have experts
_GRANITE = Architecture(ffn=r".*\.layers\.\d+\.(block_sparse_moe|shared_mlp)\..*", values={"residual_multiplier": 0.22})

CASES: Mapping[str, Architecture] = {
    "afmoe": Architecture(norm=r".*\.layers\.\d+\.(pre|post)_mlp_layernorm\..*"),
    "axk1": Architecture(
        ffn=r".*\.layers\.\d+\.mlp\.(?!post_mlp_layernorm).*",
        norm=r".*\.layers\.\d+\.(post_attention_layernorm|mlp\.post_mlp_layernorm)\..*",
    ),
    "axk2": Architecture(values={"gated_norm_rank": 3}),
    "beam": Architecture(norm=r".*\.layers\.\d+\.(pre|post)_feedforward_layernorm\..*"),
    "cohere2_moe": Architecture(norm=_NONE, values={"prefix_dense_intermediate_size": 36, "mlp_layer_types": [
        "dense", "sparse", "sparse", "sparse"]}),
    "dbrx": Architecture(
        ffn=r".*\.blocks\.\d+\.ffn\..*", norm=r".*\.blocks\.\d+\.norm_attn_norm\.norm_2\..*",
        values={
            "ffn_config": {"moe_num_experts": 8, "moe_top_k": 2, "ffn_hidden_size": 40},
            "attn_config": {"rope_theta": 10000.0},
        },
    ),
    # its tables of token ids are integers that nothing trains: they are no parameters
    "deepseek_v4": Architecture(
        ffn=r".*\.layers\.\d+\.mlp\.(?!gate\.tid2eid).*", drop=("n_shared_experts",), values=_DEEPSEEK4,
    ),
    "dots3_note": Architecture(
        ffn=_TEXT_FFN, norm=_TEXT_NORM, model="Dots3NoteForConditionalGeneration",
        drop=_TOWERS, values={
            "text_config": {**_DOTS3, "intermediate_size": 40, "moe_intermediate_size": 12},
            "audio_config": {"adapter_input_size": 16, "adapter_out_dim": 16},
            "vision_config": {"adapter_in_dim": 16, "adapter_out_dim": 16, "mlp_layer_types": ["dense"] * 4,
                              "per_layer_config": {}},
        },
    ),
    "dots3_note_text": Architecture(values=_DOTS3),
    "flex_olmo": Architecture(norm=r".*\.layers\.\d+\.post_feedforward_layernorm\..*"),
    "granitemoe": _GRANITE, "granitemoeshared": _GRANITE, "granitemoe_swa": _GRANITE,
    "inkling2_text": Architecture(activation=False),  # it names a function, and runs the soft-capped unit
    "inkling_text": Architecture(values={"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]}),
    "jetmoe": Architecture(drop=("num_key_value_heads",)),
    "kolibri1": Architecture(norm=r".*\.layers\.\d+\.(post_attention|post_mlp)_layernorm\..*"),
    "llama4": Architecture(
        ffn=r"language_model\.model\.layers\.\d+\.feed_forward\..*",
        norm=r"language_model\.model\.layers\.\d+\.post_attention_layernorm\..*",
        model="Llama4ForConditionalGeneration", drop=_TOWERS,
        values={"text_config": {**_LLAMA4, "intermediate_size": 40},
                "vision_config": {"projector_input_dim": 16, "projector_output_dim": 16}},
    ),
    "llama4_text": Architecture(ffn=r".*\.layers\.\d+\.feed_forward\..*", values=_LLAMA4),
    # transformers gives its identity experts rows of gate_up_proj that nothing reads (and no checkpoint has): without
    # them here, with them in tests/run.
    "longcat_flash": Architecture(ffn=r".*\.layers\.\d+\.mlps?\..*", values={"zero_expert_num": 0, "num_layers": 4}),
    "phimoe": Architecture(values={"router_jitter_noise": 0.3}),  # so that some weights are not 1
    "qwen3_5_moe": Architecture(
        ffn=_TEXT_FFN, norm=_TEXT_NORM, model="Qwen3_5MoeForConditionalGeneration", drop=("intermediate_size",)
    ),
    "qwen4_exp": Architecture(
        ffn=_TEXT_FFN, norm=_NONE, model="Qwen4ExpForConditionalGeneration", drop=("intermediate_size",),
        values={"text_config": _QWEN4},
    ),
    "qwen4_exp_text": Architecture(norm=_NONE, values=_QWEN4),
    # The correction is a buffer that is stored; the router's own norm is counted as a norm.
    "zaya": Architecture(
        r"model\.layers\.\d+\.mlp\.(?!gate\.router_mlp\.norm\.).*",
        r"model\.layers\.\d+\.(post_attention_layernorm|mlp\.gate\.router_mlp\.norm)\.weight",
        {"num_experts_per_tok": 1, "router_hidden_size": 6},
    ),
}  # fmt: skip
