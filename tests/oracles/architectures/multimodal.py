"""Cases of multimodal models: composites, of which only the text tower is counted, and text towers built separately.

A tower that is in none of transformers' text tables is built from the class in its family's modeling file. MEDIA has
models of audio, images or documents, built from the class that takes their token ids. A model that transformers builds
only inside a composite is not counted, and `reason` says why.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ffncli.models.config.families import REFUSED
from tests.oracles.architectures import Architecture, text_architectures

_TOWER = r"model\.language_model\.layers\.\d+\."
_NONE = r"(?!)"
_SIGLIP = {"model_type": "siglip_vision_model", "image_size": 16, "patch_size": 8}
_TOKENIZER = {
    "model_type": "vibevoice_acoustic_tokenizer_encoder", "num_filters": 2, "downsampling_ratios": [2], "depths": [1, 1]
}  # fmt: skip
_GEMMA_NORM = _TOWER + r"(pre|post)_feedforward_layernorm\.weight"


def _composite(
    text: str = "", audio: str = "", norm: str = r"post_attention_layernorm\..*", **said: Any
) -> Architecture:
    """Return the case of a model whose text_config (and audio_config) have these model types."""
    nested = {"text_config": {"model_type": text}} if text else {}
    nested |= {"audio_config": {"model_type": audio}} if audio else {}
    values = nested | said.pop("values", {})
    return Architecture(_TOWER + r"mlp\..*", norm if norm == _NONE else _TOWER + norm, values, **said)


def _musicgen(name: str) -> Architecture:
    """Return the case of a decoder of audio tokens that is conditioned on T5; only the decoder is counted."""
    return Architecture(
        r"decoder\.model\.decoder\.layers\.\d+\.fc[12]\..*",
        r"decoder\.model\.decoder\.layers\.\d+\.final_layer_norm\..*",
        {
            "text_encoder": {"model_type": "t5"}, "decoder": {"model_type": f"{name}_decoder"},
            "audio_encoder": {"model_type": "encodec", "num_filters": 2, "codebook_dim": 8, "codebook_size": 64},
        },
        model={"musicgen": "Musicgen", "musicgen_melody": "MusicgenMelody"}[name] + "ForConditionalGeneration",
        apart=("text_encoder", "audio_encoder"),
    )  # fmt: skip


COMPOSITES: Mapping[str, Architecture] = {
    **dict.fromkeys(("audioflamingo3", "musicflamingo"), _composite("qwen2", "audioflamingo3_encoder")),
    "qwen2_audio": _composite("qwen2", "qwen2_audio_encoder"),
    "qwen3_asr": _composite("qwen3", "qwen3_asr_encoder"),
    "glmasr": _composite("llama", "glmasr_encoder"),
    "voxtral": _composite("llama", "voxtral_encoder"),
    # Its norm's output is scaled by the delay's embedding before the FFN reads it.
    "voxtral_realtime": _composite("voxtral_realtime_text", "voxtral_realtime_encoder", _NONE),
    "moss_transcribe_diarize": _composite("qwen3"),
    "fuyu": _composite("persimmon"),
    "got_ocr2": _composite("qwen2"),
    **dict.fromkeys(
        ("granite_speech", "granite_speech_plus"),
        _composite(
            "granite", values={"projector_config": {"model_type": "blip_2_qformer"}},
            apart=("encoder_config", "projector_config"),
        ),
    ),
    "vibevoice_asr": _composite(
        "qwen2",
        values=dict.fromkeys(("semantic_tokenizer_encoder_config", "acoustic_tokenizer_encoder_config"), _TOKENIZER),
    ),
    # Layer 1 attends to the image; a gate, which is not an FFN parameter, scales its FFN's output.
    "mllama": _composite(
        values={"text_config": {"cross_attention_layers": [1]}}, model="MllamaForConditionalGeneration"
    ),
    # The whole model has an image tokenizer that cannot be tiny.
    "emu3": Architecture(
        r"model\.layers\.\d+\.mlp\..*", model="Emu3ForCausalLM", at="text_config", apart=("vq_config",)
    ),
    "qwen3_5": _composite(model="Qwen3_5ForConditionalGeneration"),
    "gemma3": Architecture(_TOWER + r"mlp\..*", _GEMMA_NORM, {"vision_config": _SIGLIP}),
    "gemma3n": Architecture(
        r"model\.layers\.\d+\.mlp\..*", r"model\.layers\.\d+\.(pre|post)_feedforward_layernorm\.weight",
        {"text_config": {
            "num_kv_shared_layers": 0, "vocab_size_per_layer_input": 64, "activation_sparsity_pattern": [0.0] * 4
        }},
        model="Gemma3nForCausalLM", at="text_config",  # the vision tower needs timm
    ),
    "gemma4": Architecture(
        _TOWER + r"mlp\..*", _GEMMA_NORM, {"text_config": {"vocab_size_per_layer_input": 64}}
    ),
    "gemma4_unified": Architecture(
        _TOWER + r"mlp\..*", _GEMMA_NORM,
        {"vision_config": {"mm_embed_dim": 16, "mm_posemb_size": 16, "output_proj_dims": 16}},
    ),
    "modernvbert": Architecture(
        r"model\.text_model\.layers\.\d+\.mlp\..*", r"model\.text_model\.layers\.\d+\.mlp_norm\.weight",
        {"text_config": {"model_type": "modernbert"}, "vision_config": _SIGLIP},
    ),
    "ultravbert": Architecture(
        r"model\.text_model\.layers\.\d+\.mlp\..*", r"model\.text_model\.layers\.\d+\.post_attention_layernorm\.weight",
        {"text_config": {"model_type": "ultrabert"}, "vision_config": _SIGLIP},
    ),
    # The width in its audio config follows from a nested config and cannot be set; the speaker model cannot be tiny.
    "nemo_speechlm": Architecture(
        r"model\.layers\.\d+\.mixer\.((up|down)_proj|experts|shared_experts|gate)\b.*",
        r"model\.layers\.(1|3)\.norm\.weight",
        {
            "text_config": {"model_type": "nemotron_h", "hidden_size": 16},
            "word_timestamp_config": {"blank_token_id": 0},
        },
        drop=("hidden_size",),
        model="NemotronHForCausalLM", at="text_config",
    ),
    "phi4_multimodal": Architecture(
        r"model\.layers\.\d+\.mlp\..*", r"model\.layers\.\d+\.post_attention_layernorm\.weight"
    ),
    "git": Architecture(
        r"git\.encoder\.layer\.\d+\.(intermediate|output)\.dense\..*",
        r"git\.encoder\.layer\.\d+\.output\.LayerNorm\..*",
    ),
    "blt": Architecture(
        r"model\.(local_encoder|global_transformer|local_decoder|patcher)\.layers\.\d+\.mlp\..*",
        r"model\.(local_encoder|global_transformer|local_decoder|patcher)\.layers\.\d+\.post_attention_layernorm\.weight",
        {
            "encoder_hash_byte_group_vocab": 64,
            "encoder_config": {"hidden_size_global": 16}, "decoder_config": {"hidden_size_global": 16},
        },
    ),
    **{name: _musicgen(name) for name in ("musicgen", "musicgen_melody")},
}  # fmt: skip


def layers(
    model: str, ffn: str = r"mlp\..*", norm: str = r"post_attention_layernorm\..*", at: str = "", **values: Any
) -> Architecture:
    """Return the case of a model with blocks `layers.0`, ...; `ffn` and `norm` match the names after this prefix."""
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
TOWERS: Mapping[str, Architecture] = {
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
# Models with remote code: (published config, all parameters, active parameters), from published tables and model pages.
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
_DENSE = r"(intermediate|output)\.dense\..*"
_GEMMA = r"(pre|post)_feedforward_layernorm\.weight"
_GPT = r"(?:.*\.)?h\.\d+\."
_FC = r"fc[12]\..*"
_T5 = r"(?:.*\.)?(encoder|decoder)\.block\.\d+\.layer\."
_PAIR = r"(?:.*\.)?(encoder|decoder)\.layers\.\d+\."


def _own(folder: str, kind: str) -> str:
    """Return the path of a class that transformers does not export."""
    return f"models.{folder}.modeling_{folder}.{kind}"


def _bark(kind: str) -> Architecture:
    return layers(
        _own("bark", f"Bark{kind}Model"), norm=r"layernorm_2\..*", num_heads=4, input_vocab_size=64,
        output_vocab_size=64, block_size=64,
    )  # fmt: skip


_TALKER = "models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeTalker"
_CODEC = {"model_type": "encodec", "num_filters": 2, "codebook_dim": 8, "codebook_size": 64}
_QUERIES = r"encoder\.layer\.\d+\.(intermediate|output)_query\..*"
# FFNs for non-text tokens in the text's layers, including their norms.
_SECOND: Mapping[str, str] = {
    "ernie4_5_vl_moe_text": r"layers\.\d+\.mlp\.vision_moe\..*",
    "evolla": r"(?:.*\.)?layers\.\d+\.adapter\.(?:.*\.)?ff\..*",
    "higgs_audio_v2": r"layers\.\d+\.(audio_mlp|audio_post_attention_layernorm)\..*",
    "instructblip_qformer": _QUERIES,
    "instructblipvideo_qformer": _QUERIES,
    "lilt": r"encoder\.layer\.\d+\.layout_(intermediate|output)\..*",
    "lxmert": r"encoder\.(r_layers\.\d+\.(intermediate|output)|x_layers\.\d+\.visn_(inter|output))\..*",
}
_CASES: Mapping[str, Architecture] = {
    **{name: Architecture(reason=why) for name, why in REFUSED.items() if name not in text_architectures()},
    "blt_local_decoder": layers(_own("blt", "BltLocalDecoder"), hidden_size_global=16),
    "blt_local_encoder": layers(_own("blt", "BltLocalEncoder"), hidden_size_global=16),
    "blt_patcher": layers(_own("blt", "BltPatcher")),
    "bros": bert("BrosModel", hidden_size=64),  # narrower, its boxes would have no features
    "canary_decoder": layers(_own("canary", "CanaryDecoder"), norm=r"final_layernorm\..*"),
    "canine": bert("CanineModel"),
    "clvp_decoder": layers(_own("clvp", "ClvpDecoder"), n_inner=40),
    "clvp_encoder": layers("ClvpEncoder", norm=r"post_attention_rmsnorm\.weight", use_rotary_embedding=False),
    "coarse_acoustics": _bark("Coarse"),
    "fine_acoustics": _bark("Fine"),
    "semantic": _bark("Semantic"),
    "cohere_asr": Architecture(
        r"layers\.\d+\.mlp\..*", r"layers\.\d+\.final_layernorm\..*", model=_own("cohere_asr", "CohereAsrDecoder"),
        apart=("encoder_config",),
    ),
    "csm": layers(
        "CsmForConditionalGeneration", text_vocab_size=64, num_codebooks=2, codec_config=_CODEC,
        depth_decoder_config={"num_codebooks": 2, "backbone_hidden_size": 16, "intermediate_size": 24},
    ),
    "csm_depth_decoder_model": layers("CsmDepthDecoderModel", num_codebooks=16, backbone_hidden_size=16),
    "decision_transformer": Architecture(_GPT + r"mlp\..*", _GPT + r"ln_2\..*", model="DecisionTransformerGPT2Model"),
    "dia": layers("DiaForConditionalGeneration", norm=r"(pre_mlp_norm|post_sa_norm)\.weight"),
    "dia_decoder": layers(_own("dia", "DiaDecoder"), norm=r"pre_mlp_norm\.weight"),
    "dia_encoder": layers(_own("dia", "DiaEncoder"), norm=r"post_sa_norm\.weight"),
    "dpr": bert("DPRQuestionEncoder"),
    "emu3_text_model": layers("Emu3TextModel"),
    "gradium_phonon_tts": layers("GradiumPhononTTSModel", flow_head_config={"condition_dim": 16}),
    "idefics": Architecture(
        r"(?:.*\.)?(layers|gated_cross_attn_layers)\.\d+\.mlp\.(gate|up|down)_proj\..*",
        r"(?:.*\.)?(layers|gated_cross_attn_layers)\.\d+\.post_attention_layernorm\.weight",
        {"cross_layer_interval": 2}, model="IdeficsModel", apart=("vision_config", "perceiver_config"),
    ),
    "imagegpt": Architecture(_GPT + r"mlp\..*", _GPT + r"ln_2\..*", model="ImageGPTModel"),
    "kyutai_speech_to_text": layers(
        "KyutaiSpeechToTextModel", ffn_dim=40, codebook_vocab_size=32, num_codebooks=2, audio_bos_token_id=1,
        audio_pad_token_id=0,
    ),
    "ernie4_5_vl_moe_text": layers(
        "Ernie4_5_VLMoeTextModel", r"mlp\.(?!vision_moe\.).*", moe_intermediate_size=[12, 6],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 1, 2]},
        num_attention_heads=2,
    ),
    "esmfold2": layers("EsmcModel", norm=r"post_attention_layernorm\..*", at="esmc_config",
                       esmc_config={"model_type": "esmc", "num_key_value_heads": 4}),
    "evolla": replace(
        layers("EvollaModel", protein_encoder_config={"model_type": "esm"}), apart=("protein_encoder_config",)
    ),
    "higgs_audio_v2": layers("HiggsAudioV2Model", r"mlp\..*"),
    "instructblip_qformer": bert("InstructBlipQFormerModel"),
    "instructblipvideo_qformer": bert("InstructBlipVideoQFormerModel"),
    "layoutlmv2": bert("LayoutLMv2Model", coordinate_size=2, shape_size=4),
    "lilt": bert("LiltModel", hidden_size=48),
    "lxmert": Architecture(
        r"(?:.*\.)?(layer\.\d+\.(intermediate|output)|x_layers\.\d+\.lang_(inter|output))\.dense\..*",
        r"(?:.*\.)?(layer\.\d+\.|x_layers\.\d+\.lang_)output\.LayerNorm\..*",
        {"l_layers": 4, "x_layers": 2, "r_layers": 3, "visual_feat_dim": 4}, model="LxmertModel",
    ),
    "layoutlmv3": bert("LayoutLMv3Model", visual_embed=False, coordinate_size=2, shape_size=4),
    "markuplm": bert("MarkupLMModel"),
    "mllama_text_model": layers("MllamaTextModel", cross_attention_layers=[1]),
    "moonshine": Architecture(
        _PAIR + r"mlp\..*", r"(?:.*\.)?(encoder\.layers\.\d+\.post_attention_layernorm"
        r"|decoder\.layers\.\d+\.final_layernorm)\.weight", model="MoonshineForConditionalGeneration",
    ),
    "moonshine_streaming": Architecture(
        r"(?:.*\.)?layers\.\d+\.mlp\..*", r"(?:.*\.)?layers\.\d+\.final_layernorm\.weight",
        {"num_key_value_heads": 4}, model=_own("moonshine_streaming", "MoonshineStreamingDecoder"),
        apart=("encoder_config",),
    ),
    "musicgen_decoder": layers(_own("musicgen", "MusicgenDecoder"), _FC, r"final_layer_norm\..*"),
    "musicgen_melody_decoder": layers(
        _own("musicgen_melody", "MusicgenMelodyDecoder"), _FC, r"final_layer_norm\..*"
    ),
    "pocket_tts": layers("PocketTTSModel", flow_head_config={"condition_dim": 16}),
    "pop2piano": Architecture(_T5 + r"\d+\.DenseReluDense\..*", r"(encoder\.block\.\d+\.layer\.1|decoder\.block\.\d+"
                              r"\.layer\.2)\.layer_norm\.weight", model="Pop2PianoForConditionalGeneration"),
    "pp_formulanet_text": layers(_own("pp_formulanet", "PPFormulaNetTextModel"), _FC,
                                 r"final_layer_norm\..*"),
    "qwen2_5_omni_talker": layers("Qwen2_5OmniTalkerModel", embedding_size=16),
    "qwen3_omni_moe_talker_code_predictor": layers(f"{_TALKER}CodePredictorModel", num_code_groups=2),
    "qwen3_omni_moe_talker_text": layers(
        f"{_TALKER}Model", shared_expert_intermediate_size=20, mlp_only_layers=[1], norm_topk_prob=False
    ),
    "rag": Architecture(
        _PAIR + _FC, _PAIR + r"final_layer_norm\..*",
        {"question_encoder": {"model_type": "dpr"}, "generator": {
            "model_type": "bart", "d_model": 16, "encoder_layers": 2, "decoder_layers": 3, "encoder_ffn_dim": 40,
            "decoder_ffn_dim": 24, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 64,
            "max_position_embeddings": 64,
        }},
        model="BartModel", at="generator",
    ),
    "sam3_lite_text_text_model": layers(
        "Sam3LiteTextTextModel", norm=r"layer_norm2\..*", use_repmixer_blocks=False, projection_dim=16
    ),
    "speech_to_text": Architecture(_PAIR + _FC, _PAIR + r"final_layer_norm\..*",
                                   model="Speech2TextForConditionalGeneration"),
    "speecht5": Architecture(
        r"(?:.*\.)?wrapped_(encoder|decoder)\.layers\.\d+\.feed_forward\..*",
        r"(?:.*\.)?wrapped_(encoder|decoder)\.layers\.\d+\.final_layer_norm\..*",
        model="SpeechT5ForSpeechToText", drop=("conv_kernel",),
    ),
    "splinter": bert("SplinterModel"),
    "t5gemma2_decoder": layers(_own("t5gemma2", "T5Gemma2Decoder"), norm=_GEMMA, dropout_rate=0.0),
    "t5gemma2_text": layers(_own("t5gemma2", "T5Gemma2TextEncoder"), norm=_GEMMA, dropout_rate=0.0),
    "tvp": layers(
        "TvpModel", r"(intermediate|output)\.dense\..*", r"output\.layer_norm\..*", visual_prompt_size=2,
        max_img_size=64, num_frames=2,
        backbone_config={"model_type": "resnet", "embedding_size": 8, "hidden_sizes": [8, 8, 8, 8],
                         "depths": [1, 1, 1, 1], "out_features": ["stage4"]},
    ),
    "udop": Architecture(_T5 + r"\d+\.DenseReluDense\..*", r"(encoder\.block\.\d+\.layer\.1|decoder\.block\.\d+"
                         r"\.layer\.2)\.layer_norm\.weight", model="UdopForConditionalGeneration"),
    "videoprism_text_model": layers("VideoPrismTextModel", norm=r"layernorm_after\..*"),
    "vilt": layers("ViltModel", _DENSE, r"layernorm_after\..*"),
    "visual_bert": bert("VisualBertModel"),
    "voxtral_realtime_text": layers(_own("voxtral_realtime", "VoxtralRealtimeTextModel"), norm=r"(?!)"),
}  # fmt: skip
MEDIA: Mapping[str, Architecture] = _CASES | {
    name: replace(_CASES[name], second=pattern) for name, pattern in _SECOND.items()
}
