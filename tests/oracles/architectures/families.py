"""Cases of each kind of text architecture: how to build a tiny model, and which parameters are its FFN's."""

from collections.abc import Mapping

from tests.oracles.architectures import Architecture

_NONE = r"(?!)"  # a norm without parameters, or one that the attention also reads
_GPT = Architecture(ffn=r"transformer\.h\.\d+\.mlp\..*", norm=r"transformer\.h\.\d+\.ln_2\..*")
_PARALLEL = Architecture(ffn=r"transformer\.h\.\d+\.mlp\..*", norm=_NONE)
_FAIRSEQ = Architecture(ffn=r".*\.layers\.\d+\.fc[12]\..*", norm=r".*\.layers\.\d+\.final_layer_norm\..*")
_LLAMA_PARALLEL = Architecture(norm=_NONE)
_POST = Architecture(norm=r".*\.layers\.\d+\.post_feedforward_layernorm\.weight")
_BOTH = Architecture(norm=r".*\.layers\.\d+\.(pre|post)_feedforward_layernorm\.weight")
_XLM = Architecture(ffn=r"transformer\.ffns\.\d+\..*", norm=r"transformer\.layer_norm2\.\d+\..*")
DECODERS: Mapping[str, Architecture] = {
    **dict.fromkeys(("gpt2", "gpt-sw3", "gpt_bigcode", "openai-gpt"), _GPT),
    "gpt_neo": Architecture(_GPT.ffn, _GPT.norm, {"attention_types": [[["global", "local"], 2]]}),
    **dict.fromkeys(("codegen", "gptj"), _PARALLEL),
    **dict.fromkeys(("biogpt", "xglm", "opt", "trocr"), _FAIRSEQ),
    "bloom": Architecture(_GPT.ffn, r"transformer\.h\.\d+\.post_attention_layernorm\..*"),
    "falcon": Architecture(_PARALLEL.ffn, _NONE, drop=("head_dim",)),
    "ctrl": Architecture(r"transformer\.h\.\d+\.ffn\..*", r"transformer\.h\.\d+\.layernorm2\..*"),
    "mpt": Architecture(r"transformer\.blocks\.\d+\.ffn\..*", r"transformer\.blocks\.\d+\.norm_2\..*"),
    "phi": _LLAMA_PARALLEL,
    **dict.fromkeys(("cohere", "cohere2"), _LLAMA_PARALLEL),
    "cpmant": Architecture(
        r"cpmant\.encoder\.layers\.\d+\.ffn\.ffn\..*", r"cpmant\.encoder\.layers\.\d+\.ffn\.layernorm_before_ffn\..*"
    ),
    # xielu also stores its two constants, beta and eps.
    "apertus": Architecture(
        r"model\.layers\.\d+\.mlp\.(up_proj\.weight|down_proj\.weight|act_fn\.alpha_[pn])",
        r"model\.layers\.\d+\.feedforward_layernorm\.weight",
    ),
    "bitnet": Architecture(
        r"model\.layers\.\d+\.mlp\.(gate|up|down)_proj\.weight",
        r"model\.layers\.\d+\.(mlp\.ffn_sub_norm|post_attention_layernorm)\.weight",
    ),
    **dict.fromkeys(("olmo2", "olmo3", "exaone4"), _POST),
    "glm4": Architecture(norm=r"model\.layers\.\d+\.(post_attention|post_mlp)_layernorm\.weight"),
    "hyperclovax": Architecture(norm=r"model\.layers\.\d+\.(post_attention_layernorm|post_norm2)\.weight"),
    **dict.fromkeys(("gemma2", "gemma3_text"), _BOTH),
    "vaultgemma": Architecture(norm=r"model\.layers\.\d+\.pre_feedforward_layernorm\.weight"),
    "gemma3n_text": Architecture(
        norm=_BOTH.norm,
        values={"intermediate_size": [40, 40, 48, 48], "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64},
    ),
    "gemma4_text": Architecture(
        norm=_BOTH.norm, values={"hidden_size_per_layer_input": 4, "vocab_size_per_layer_input": 64}
    ),
    # The last two layers reuse the keys and values of earlier ones and are twice as wide.
    "gemma4_unified_text": Architecture(
        norm=_BOTH.norm,
        values={
            "num_kv_shared_layers": 2, "use_double_wide_mlp": True,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "gemma4_assistant": Architecture(
        reason="transformers 5.23 cannot build it: kv_sharing_modes refuses a model all of whose layers reuse them"
    ),
    # Real models reuse keys and values in every layer, which transformers 5.23 cannot build; the FFNs are the same.
    "gemma4_unified_assistant": Architecture(
        r"model\.layers\.\d+\.mlp\..*", _BOTH.norm,
        {"text_config": {
            "model_type": "gemma4_unified_text", "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        }},
    ),
    "molmo2_text": Architecture(r"layers\.\d+\.mlp\..*", r"layers\.\d+\.post_attention_layernorm\.weight"),
    "hrm_text": Architecture(r"model\.[LH]_module\.layers\.\d+\.mlp\..*", _NONE),
    "cohere_compass_text": Architecture(
        norm=_NONE, values={"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10_000.0}}}
    ),
    "xlnet": Architecture(
        r"transformer\.layer\.\d+\.ff\.layer_[12]\..*", r"transformer\.layer\.\d+\.ff\.layer_norm\..*",
        drop=("max_position_embeddings",),
    ),
    "reformer": Architecture(
        r"reformer\.encoder\.layers\.\d+\.feed_forward\.(dense|output)\.dense\..*",
        r"reformer\.encoder\.layers\.\d+\.feed_forward\.layer_norm\..*",
        {"is_decoder": True, "axial_pos_embds_dim": [8, 8]},
    ),
    "xlm": _XLM,
    "flaubert": _XLM,
}  # fmt: skip
_BERT_FFN = r".*\.layer\.\d+\.(intermediate|output)\.dense\.(weight|bias)"
_BERT = Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.output\.LayerNorm\..*")
_POST_MLP = Architecture(norm=r".*\.layers\.\d+\.post_mlp_layernorm\..*")
_CLIP = Architecture(norm=r".*\.layers\.\d+\.layer_norm2\..*")
_MODERNBERT = Architecture(norm=r".*\.layers\.\d+\.mlp_norm\..*")
ENCODERS: Mapping[str, Architecture] = {
    **dict.fromkeys(
        (
            "bert", "bert-generation", "big_bird", "camembert", "convbert", "data2vec-text", "deberta", "deberta-v2",
            "electra", "ernie", "fnet", "layoutlm", "longformer", "mpnet", "mra", "nystromformer", "rembert",
            "roberta", "roc_bert", "roformer", "tapas", "xlm-roberta", "yoso",
        ),
        _BERT,
    ),
    "ibert": Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.output\.LayerNorm\.(weight|bias)"),  # not its scales
    "luke": Architecture(
        ffn=_BERT.ffn, norm=_BERT.norm, values={"entity_vocab_size": 64, "entity_emb_size": 16}
    ),
    "roberta-prelayernorm": Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.intermediate\.LayerNorm\..*"),
    "megatron-bert": Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.ln\..*"),
    **dict.fromkeys(
        ("esm", "xlm-roberta-xl"), Architecture(ffn=_BERT_FFN, norm=r".*\.layer\.\d+\.LayerNorm\..*")
    ),
    "xmod": Architecture(ffn=_BERT_FFN, norm=_NONE),  # output.LayerNorm also serves the adapters
    "distilbert": Architecture(
        ffn=r".*\.layer\.\d+\.ffn\.lin[12]\..*", norm=r".*\.layer\.\d+\.output_layer_norm\..*"
    ),
    "albert": Architecture(
        ffn=r".*\.albert_layers\.\d+\.(ffn|ffn_output)\..*", norm=r".*\.full_layer_layer_norm\..*",
        values={"num_hidden_groups": 3, "inner_group_num": 2},
    ),
    "mobilebert": Architecture(  # its "norms" are an elementwise scale and shift
        ffn=r".*\.layer\.\d+(\.ffn\.\d+)?\.(intermediate|output)\.dense\..*", norm=_NONE,
        values={"embedding_size": 16, "intra_bottleneck_size": 8, "num_feedforward_networks": 3, "vocab_size": 64},
    ),
    "squeezebert": Architecture(reason="its FFN's two projections are grouped, which Linear cannot say"),
    **dict.fromkeys(("gte", "nomic_bert", "jina_embeddings_v3"), _POST_MLP),
    **dict.fromkeys(("clip_text_model", "tipsv2_text_model"), Architecture(
        ffn=r"encoder\.layers\.\d+\.mlp\..*", norm=r"encoder\.layers\.\d+\.layer_norm2\..*")),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), _MODERNBERT),
    "esmc": Architecture(values={"num_key_value_heads": 4}),
    "neomme": Architecture(norm=_NONE, values={"head_dim": 16}),
    "perceiver": Architecture(
        ffn=r".*\.mlp\.dense[12]\..*",
        norm=r".*\.(cross_attention|self_attends\.\d+|decoding_cross_attention)\.layernorm\..*",
        values={
            "d_latents": 16, "d_model": 24, "num_latents": 4, "num_self_attends_per_block": 3, "num_blocks": 2,
            "num_self_attention_heads": 4, "num_cross_attention_heads": 4, "self_attention_widening_factor": 2,
            "cross_attention_widening_factor": 3,
        },
    ),
}  # fmt: skip
_BART_FFN = r".*\.(encoder|decoder)\.layers\.\d+\.fc[12]\..*"
_BART_NORM = r".*\.(encoder|decoder)\.layers\.\d+\.final_layer_norm\..*"
_T5_NORM = r"(encoder\.block\.\d+\.layer\.1|decoder\.block\.\d+\.layer\.2)\.layer_norm\.weight"
_T5 = Architecture(ffn=r".*\.layer\.\d+\.DenseReluDense\..*", norm=_T5_NORM)
_SEAMLESS = Architecture(
    ffn=r"text_(encoder|decoder)\.layers\.\d+\.ffn\..*", norm=r"text_(encoder|decoder)\.layers\.\d+\.ffn_layer_norm\..*"
)
_GEMMA_NORM = r"\.layers\.\d+\.(pre|post)_feedforward_layernorm\..*"
# By default these would be built as their decoder alone.
_WHOLE = {
    "bart": "Bart", "bigbird_pegasus": "BigBirdPegasus", "blenderbot": "Blenderbot",
    "blenderbot-small": "BlenderbotSmall", "marian": "Marian", "mbart": "MBart", "mvp": "Mvp", "pegasus": "Pegasus",
    "plbart": "PLBart", "whisper": "Whisper",
}  # fmt: skip
PAIRS: Mapping[str, Architecture] = {
    **{
        name: Architecture(
            ffn=_BART_FFN,
            norm=_BART_NORM,
            model=f"{prefix}MTModel" if name == "marian" else f"{prefix}ForConditionalGeneration",
        )
        for name, prefix in _WHOLE.items()
    },
    **dict.fromkeys(("fsmt", "led", "m2m_100", "pegasus_x"), Architecture(ffn=_BART_FFN, norm=_BART_NORM)),
    "prophetnet": Architecture(
        ffn=r".*coder\.layers\.\d+\.feed_forward\..*", norm=r".*coder\.layers\.\d+\.feed_forward_layer_norm\..*",
        model="ProphetNetForConditionalGeneration", drop=("num_hidden_layers",),
        values={"num_encoder_layers": 2, "num_encoder_attention_heads": 4, "num_decoder_attention_heads": 4},
    ),
    "funnel": Architecture(
        ffn=r".*\.ffn\.linear_[12]\..*", norm=r".*\.ffn\.layer_norm\..*", drop=("num_hidden_layers",),
        values={"block_sizes": [1, 2], "block_repeats": [2, 1]},
    ),
    **dict.fromkeys(("t5", "mt5", "umt5", "longt5"), _T5),
    "switch_transformers": Architecture(
        ffn=r".*\.layer\.\d+\.mlp\..*", norm=_T5_NORM,
        values={"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 1, "router_bias": True},
    ),
    "nllb-moe": Architecture(
        ffn=r".*\.layers\.\d+\.ffn\..*", norm=r".*\.layers\.\d+\.ff_layer_norm\..*",
        values={"encoder_sparse_step": 2, "decoder_sparse_step": 3},
    ),
    **dict.fromkeys(("seamless_m4t", "seamless_m4t_v2"), _SEAMLESS),  # speech encoder and vocoder do not read text
    "t5gemma": Architecture(
        ffn=r".*\.(encoder|decoder)\.layers\.\d+\.mlp\..*", norm=rf".*\.(encoder|decoder){_GEMMA_NORM}",
        values={"decoder": {"num_hidden_layers": 3, "intermediate_size": 24}},
    ),
    "t5gemma2": Architecture(
        ffn=r".*\.(encoder\.text_model|decoder)\.layers\.\d+\.mlp\..*",
        norm=rf".*\.(encoder\.text_model|decoder){_GEMMA_NORM}",
        values={
            # The width of the vision tower is a ratio, so the text's d_ff does not change it.
            "encoder": {"vision_config": {"model_type": "dinov2", "image_size": 28, "patch_size": 14},
                        "mm_tokens_per_image": 4},
            "decoder": {"num_hidden_layers": 3, "intermediate_size": 24},
        },
    ),
    "encoder-decoder": Architecture(
        ffn=r".*\.layer\.\d+\.(intermediate|output)\.dense\.(weight|bias)",
        norm=r".*\.layer\.\d+\.output\.LayerNorm\..*",
        values={
            "encoder": {"model_type": "bert"},
            "decoder": {"model_type": "bert-generation", "is_decoder": True, "add_cross_attention": True,
                        "num_hidden_layers": 3, "intermediate_size": 24},
        },
    ),
}  # fmt: skip
# Composites: vision and audio towers are not counted.
_TEXT_FFN = r"model\.language_model\.layers\.\d+\.mlp\..*"
_TEXT_NORM = r"model\.language_model\.layers\.\d+\.post_attention_layernorm\..*"
_TOWERS = ("intermediate_size", "moe_intermediate_size")  # so that other towers keep their widths in `wide`
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
MIXTURES: Mapping[str, Architecture] = {
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
    # its tables of token ids are integers that are not trained, so they are not parameters
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
    "inkling2_text": Architecture(activation=False),  # its code runs the soft-capped unit instead
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
    # In transformers, its identity experts have rows of gate_up_proj that nothing reads and no checkpoint has. They are
    # left out here; models in tests/run have them.
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
    # The correction is a stored buffer; the router's own norm is counted as a norm.
    "zaya": Architecture(
        r"model\.layers\.\d+\.mlp\.(?!gate\.router_mlp\.norm\.).*",
        r"model\.layers\.\d+\.(post_attention_layernorm|mlp\.gate\.router_mlp\.norm)\.weight",
        {"num_experts_per_tok": 1, "router_hidden_size": 6},
    ),
}  # fmt: skip
_NO_FFN = Architecture(reason="no FFN: its layers are sequence mixers alone")
_FEED_FORWARD = Architecture(r"model\.layers\.\d+\.feed_forward\..*", r"model\.layers\.\d+\.pre_ff_layernorm\.weight")
_LFM = Architecture(r"model\.layers\.\d+\.feed_forward\..*", r"model\.layers\.\d+\.ffn_norm\.weight")
_KINDS = ["linear_attention", "moe", "full_attention", "mlp", "linear_attention", "moe"]
HYBRIDS: Mapping[str, Architecture] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _NO_FFN),
    **dict.fromkeys(("bamba", "jamba"), _FEED_FORWARD),
    "falcon_h1": Architecture(
        _FEED_FORWARD.ffn, _FEED_FORWARD.norm, {"mamba_d_ssm": 32, "mlp_multipliers": [0.5, 0.25]}
    ),
    "granitemoehybrid": Architecture(
        r"model\.layers\.\d+\.(block_sparse_moe|shared_mlp)\..*", values={"residual_multiplier": 0.22}
    ),
    # intermediate_size is not d_ff here: 600 gives a d_ff of 512, and 1200 gives 1024.
    "lfm2": Architecture(
        _LFM.ffn,
        _LFM.norm,
        {"intermediate_size": 600, "layer_types": ["conv", "full_attention"] * 2},
    ),
    "lfm2_moe": Architecture(
        _LFM.ffn, _LFM.norm, {"layer_types": ["conv", "full_attention"] * 2, "routed_scaling_factor": 2.5}
    ),
    "lfm3": Architecture(_LFM.ffn, r"model\.layers\.\d+\.(ffn_norm|post_ffn_norm)\.weight"),
    # Only layers 1, 3 and 5 have an FFN; every layer has one norm.
    "nemotron_h": Architecture(
        r"model\.layers\.\d+\.mixer\.((up|down)_proj|experts|shared_experts|gate|fc[12]_latent_proj)\b.*",
        r"model\.layers\.(1|3|5)\.norm\.weight",
        {"layers_block_type": _KINDS, "moe_latent_size": 10, "routed_scaling_factor": 2.5},
    ),
    # Layer 3 has attention, and its norm is after the FFN; in the other layers the norm is before the FFN.
    "olmo_hybrid": Architecture(
        norm=r"model\.layers\.([012]\.post_attention_layernorm|3\.post_feedforward_layernorm)\.weight"
    ),
    "recurrent_gemma": Architecture(
        r"model\.layers\.\d+\.mlp_block\..*", r"model\.layers\.\d+\.channel_pre_norm\.weight"
    ),
    "xlstm": Architecture(
        r"backbone\.blocks\.\d+\.ffn\..*", r"backbone\.blocks\.\d+\.norm_ffn\..*", drop=("v_head_dim", "chunk_size")
    ),
    "rwkv": Architecture(
        reason="its channel mix also reads the previous token (a time shift), which the block language cannot express"
    ),
    # The two hybrid layers share one block; named_parameters lists a tied parameter once.
    "zamba": Architecture(
        r"model\.layers\.\d+\.shared_transf\.feed_forward\..*",
        r"model\.layers\.\d+\.shared_transf\.pre_ff_layernorm\.weight",
        {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    ),
    "zamba2": Architecture(reason="each use of its shared FFN adds an adapter of its own to the shared weights"),
}
