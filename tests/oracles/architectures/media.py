"""Cases of text towers of models that hear, speak, see or read documents, each built as the class that takes its ids.

What transformers builds only inside a composite is built alone; `reason` says of the others why they are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ffncli.models.config.families import REFUSED
from tests.oracles.architectures import Architecture, text_architectures
from tests.oracles.architectures.text_towers import bert, layers

_DENSE = r"(intermediate|output)\.dense\..*"
_GEMMA = r"(pre|post)_feedforward_layernorm\.weight"
_GPT = r"(?:.*\.)?h\.\d+\."
_FC = r"fc[12]\..*"
_T5 = r"(?:.*\.)?(encoder|decoder)\.block\.\d+\.layer\."
_PAIR = r"(?:.*\.)?(encoder|decoder)\.layers\.\d+\."


def _own(folder: str, kind: str) -> str:
    """A class that transformers does not export."""
    return f"models.{folder}.modeling_{folder}.{kind}"


def _bark(kind: str) -> Architecture:
    return layers(
        _own("bark", f"Bark{kind}Model"), norm=r"layernorm_2\..*", num_heads=4, input_vocab_size=64,
        output_vocab_size=64, block_size=64,
    )  # fmt: skip


_TALKER = "models.qwen3_omni_moe.modeling_qwen3_omni_moe.Qwen3OmniMoeTalker"
_CODEC = {"model_type": "encodec", "num_filters": 2, "codebook_dim": 8, "codebook_size": 64}

_QUERIES = r"encoder\.layer\.\d+\.(intermediate|output)_query\..*"
# FFNs of other tokens in the text's layers, their norms included.
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
CASES: Mapping[str, Architecture] = _CASES | {
    name: replace(_CASES[name], second=pattern) for name, pattern in _SECOND.items()
}
