"""Composites, which are models with several towers: the text model that a `text_config` means, and text towers with
rows of their own.

Most composites contain a model that has a row elsewhere, so they need no row here. Vision and audio towers are not
counted.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from ffncli.models.config.families import encoders
from ffncli.models.config.family import Extra, Family, Stack, silu
from ffncli.models.files.strict_json import Fields

# The model type of a text_config without a model_type (transformers' defaults): model type → composites.
_TEXT_TOWERS = {
    "bert": "grounding-dino mm-grounding-dino", "bart": "rag", "canary_decoder": "canary",
    "clip_text_model": "omdet-turbo sam3", "clvp_encoder": "clvp", "cohere2": "aya_vision cohere2_vision",
    "deepseek_v3": "kimi_k25 kimi_vl", "esmc": "esmfold2", "exaone4": "exaone4_5", "gemma": "paligemma",
    "gemma3_text": "shieldgemma2", "gemma4_text": "gemma4_assistant", "gemma4_unified_text": "gemma4_unified_assistant",
    "glm4v_text": "glm46v glmga", "granite": "granite_speech granite_speech_plus",
    "hyperclovax": "hyperclovax_vision_v2", "kimi_linear": "kimi_k3", "kosmos_2_5_text_model": "kosmos-2.5",
    "kosmos_2_text_model": "kosmos-2", "lfm2": "lfm2_vl", "lfm3": "lfm3_vl",
    "llama": "deepseek_vl deepseek_vl_hybrid glmasr idefics3 janus llava llava_llama llava_next llava_next_video "
    "perception_lm smolvlm video_llava vipllava voxtral",
    "mistral": "idefics2 llava_mistral mistral3", "modernvbert": "colmodernvbert",
    "modernbert": "modernvbert pe_audio pe_audio_video pe_video", "nemotron_h": "nemo_speechlm nemotron_h_omni",
    "opt": "blip-2 instructblip instructblipvideo", "paligemma": "colpali pi0", "persimmon": "fuyu",
    "qwen2": "audioflamingo3 fast_vlm got_ocr2 internvl llava_onevision llava_qwen musicflamingo ovis2 pp_chart2table "
    "qwen2_audio vibevoice vibevoice_asr video_llama_3",
    "qwen2_5_omni_text": "qwen2_5_omni_thinker",
    "qwen3": "fun_asr_nano lighton_ocr moss_transcribe_diarize qianfan_ocr qwen3_asr", "qwen2_vl": "colqwen2",
    "qwen3_5_text": "jev minicpm_ocr minicpmv4_6 minicpmv4_7", "qwen3_omni_moe_text": "qwen3_omni_moe_thinker",
    "qwen3_vl_text": "cosmos3_omni", "sam3_lite_text_text_model": "sam3_lite_text", "step3p5": "step3p7",
    "t5gemma2_text": "t5gemma2_encoder", "ultrabert": "ultravbert",
}  # fmt: skip
# Composites whose text model has the composite's name plus this ending.
_ENDING = {
    "_text": (
        "cohere_compass cosmos3_edge deepseek_ocr2 embedding_gemma2 ernie4_5_vl_moe gemma3 gemma3n gemma4 "
        "gemma4_unified glm4v glm4v_moe glm5_next glm_image glm_ocr granite4_vision granite_docling hunyuan_vl "
        "minimax_m3_vl mistral_large4 molmo2 muse_glimmer muse_spark paddleocr_vl pp_formulanet qwen2_5_omni "
        "qwen2_5_vl qwen2_vl qwen3_5 qwen3_omni_moe qwen3_vl qwen3_vl_moe unlimited_ocr voxtral_realtime"
    ),
    "_text_model": (
        "aimv2 align altclip blip bridgetower chinese_clip clap clip clipseg emu3 flava groupvit metaclip_2 mllama "
        "owlv2 owlvit pix2struct siglip siglip2 tipsv2 videoprism xclip"
    ),
}
TEXT_TYPES: Mapping[str, str] = {
    **{name: text for text, names in _TEXT_TOWERS.items() for name in names.split()},
    **{name: name + ending for ending, names in _ENDING.items() for name in names.split()},
}
# What a nested text config leaves out: published configs of composites hold only the values that differ from those of
# the text model's class in transformers 5.23 (LLaVA 1.5: nothing but the model type).
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
TEXT_DEFAULTS: Mapping[str, Mapping[str, int]] = {
    name: dict(zip(_SIZES, sizes, strict=True))
    for name, sizes in {
        "cohere2": (8192, 22528, 40, 64, 256_000), "gemma": (3072, 24576, 28, 16, 256_000),
        "gemma2": (2304, 9216, 26, 8, 256_000), "gemma3_text": (2304, 9216, 26, 8, 262_208),
        "granite": (4096, 11008, 32, 32, 32_000), "llama": (4096, 11008, 32, 32, 32_000),
        "mistral": (4096, 14336, 32, 32, 32_000), "mllama_text_model": (4096, 14336, 40, 32, 128_256),
        "persimmon": (4096, 16384, 36, 64, 262_144), "phi3": (3072, 8192, 32, 32, 32_064),
        "qwen2": (4096, 22016, 32, 32, 151_936), "qwen2_5_vl_text": (8192, 29568, 80, 64, 152_064),
        "qwen2_vl_text": (8192, 29568, 80, 64, 152_064), "qwen3": (4096, 22016, 32, 32, 151_936),
        "qwen3_vl_text": (4096, 22016, 32, 32, 151_936), "smollm3": (2048, 11008, 36, 16, 128_256),
    }.items()
} | {"opt": {"hidden_size": 768, "ffn_dim": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
             "vocab_size": 50_272}}  # fmt: skip
REFUSED: Mapping[str, str] = dict.fromkeys(
    ("diffusion_gemma_text", "diffusion_gemma"), "its MLP and its experts run side by side, each between its own norms"
)


def _mllama(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """End the block before the learned gate that scales the FFN's output in layers that attend to the image."""
    listed = config.get("cross_attention_layers", None) is not None
    crossed = config.integers("cross_attention_layers") if listed else (3, 8, 13, 18, 23, 28, 33, 38)
    return lambda i: {"residual": False} if i in crossed else {}


def _blt(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    """Read a Byte Latent Transformer, in which every transformer has its own config; the patcher may be absent."""
    if stack.name == "patcher" and not config.flag("patch_in_forward", True):
        return lambda i: None
    part = config.inside(f"{stack.name}_config")
    d_model = part.integer("hidden_size")
    computed = {"default": int(8 * d_model / 3)} if stack.name == "encoder" else {}  # other parts have a constant
    extra = {
        "d_model": d_model, "d_ff": part.integer("intermediate_size", **computed),
        "activation": part.text("hidden_act", "silu"), "norm_eps": part.number("rms_norm_eps", 1e-5),
    }  # fmt: skip
    return lambda i: extra


_BERT, _CLIP = encoders.ROWS["bert"], encoders.ROWS["clip_text_model"]
# Relatives of CLIP and BERT: the text tower of models that compare text with another medium.
_TEXT_ENCODERS = {
    "align_text_model": replace(_BERT, aliases=("blip_text_model", "chinese_clip_text_model", "clap_text_model")),
    "altclip_text_model": replace(_BERT, eps=("layer_norm_eps", 1e-5), aliases=("bridgetower_text_model",)),
    "flava_text_model": replace(_BERT, position="pre", aliases=()),
    "clipseg_text_model": replace(
        _CLIP, aliases=(
            "groupvit_text_model", "metaclip_2_text_model", "owlv2_text_model", "owlvit_text_model", "xclip_text_model"
        ),
    ),
    "siglip_text_model": replace(
        _CLIP, default_activation="gelu_tanh", eps=("layer_norm_eps", 1e-6), aliases=("siglip2_text_model",)
    ),
    "aimv2_text_model": replace(encoders.ROWS["eurobert"], aliases=()),
}  # fmt: skip

_TRANSFORMERS = ("encoder", "global", "decoder", "patcher")

ROWS: Mapping[str, Family] = {
    **_TEXT_ENCODERS,
    "blt": Family(
        d_model="global_config.hidden_size", d_ff=None, activation=None, layer=_blt,
        stacks=[Stack(name, f"{name}_config.num_hidden_layers") for name in _TRANSFORMERS],
        adjust=lambda config: {"activation": "silu"},
    ),
    "emu3_text_model": silu(1e-5, bias=("mlp_bias", False)),
    "git": replace(_BERT, aliases=()),
    "kosmos_2_text_model": Family(
        gated=False, d_model="embed_dim|hidden_size", d_ff="ffn_dim", activation="activation_function",
        default_activation="gelu", bias=True, norm="layernorm", eps=("layer_norm_eps", 1e-5),
        adjust=lambda config: {"sub_norm": True},  # a norm over d_ff, as in BitNet
        stacks=(Stack(layers="layers|num_hidden_layers"),), aliases=("kosmos_2_5_text_model",),
    ),
    "mllama_text_model": silu(1e-5, layer=_mllama),
    "musicgen_decoder": Family(
        gated=False, d_ff="ffn_dim", activation="activation_function", default_activation="gelu", norm="layernorm",
        eps=(None, 1e-5), aliases=("musicgen_melody_decoder",),
    ),
    "pix2struct_text_model": Family(
        d_ff="d_ff", activation="dense_act_fn", default_activation="gelu_new", eps=("layer_norm_epsilon", 1e-6),
        stacks=(Stack(layers="num_layers|num_hidden_layers"),),
    ),
    "phi4_multimodal": silu(1e-5),
    # The delay's embedding scales every feature between norm and FFN, so the row describes only the FFN.
    "voxtral_realtime_text": silu(norm="none", adjust=lambda config: {"residual": False}),
}  # fmt: skip
