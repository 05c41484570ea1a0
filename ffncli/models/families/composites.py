"""Composites: models of several towers. Which text model a `text_config` means, and text towers of their own kind.

Most nest a model that has its own row and need none. Vision and audio towers are not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ffncli.models.family import Extra, Family, Stack
from ffncli.models.fields import Fields

# What a text_config without a model_type is (transformers' defaults), by what it is.
_TEXT_TOWERS = {
    "cohere2": "aya_vision cohere2_vision",
    "cohere_compass_text": "cohere_compass",
    "deepseek_v3": "kimi_k25",
    "emu3_text_model": "emu3",
    "exaone4": "exaone4_5",
    "gemma": "paligemma",
    "gemma3_text": "gemma3 shieldgemma2",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4 gemma4_assistant",
    "gemma4_unified_text": "gemma4_unified gemma4_unified_assistant",
    "granite": "granite_speech granite_speech_plus",
    "hyperclovax": "hyperclovax_vision_v2",
    "lfm2": "lfm2_vl",
    "lfm3": "lfm3_vl",
    "llama": "deepseek_vl deepseek_vl_hybrid glmasr idefics3 janus llava llava_next llava_next_video perception_lm "
             "smolvlm video_llava vipllava voxtral",
    "mistral": "idefics2 mistral3",
    "mllama_text_model": "mllama",
    "modernbert": "modernvbert",
    "molmo2_text": "molmo2",
    "nemotron_h": "nemo_speechlm nemotron_h_omni",
    "opt": "blip-2 instructblip instructblipvideo",
    "persimmon": "fuyu",
    "qwen2": "audioflamingo3 fast_vlm got_ocr2 internvl llava_onevision musicflamingo ovis2 pp_chart2table qwen2_audio "
             "vibevoice vibevoice_asr video_llama_3",
    "qwen3": "fun_asr_nano lighton_ocr moss_transcribe_diarize qianfan_ocr qwen3_asr",
    "qwen3_5_text": "qwen3_5 jev minicpm_ocr minicpmv4_6 minicpmv4_7",
    "ultrabert": "ultravbert",
    "voxtral_realtime_text": "voxtral_realtime",
}  # fmt: skip
TEXT_TYPES: Mapping[str, str] = {name: text for text, names in _TEXT_TOWERS.items() for name in names.split()}


def _mllama(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Where a layer attends to the image, a learned gate scales the FFN's output: the block ends before that."""
    given = config.get("cross_attention_layers", None) is not None
    crossed = config.integers("cross_attention_layers") if given else (3, 8, 13, 18, 23, 28, 33, 38)
    return lambda i: {"residual": False} if i in crossed else {}


def _blt(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    """Every transformer of a Byte Latent Transformer has a config of its own; the patcher may be left out."""
    if stack.name == "patcher" and not config.flag("patch_in_forward", True):
        return lambda i: None
    part = config.inside(f"{stack.name}_config")
    d_model: int = part.integer("hidden_size")
    computed = {"default": int(8 * d_model / 3)} if stack.name == "encoder" else {}  # the others' default is a number
    extra = {
        "d_model": d_model, "d_ff": part.integer("intermediate_size", **computed),
        "activation": part.text("hidden_act", "silu"), "norm_eps": part.number("rms_norm_eps", 1e-5),
    }  # fmt: skip
    return lambda i: extra


_TRANSFORMERS = ("encoder", "global", "decoder", "patcher")

ROWS: Mapping[str, Family] = {
    "blt": Family(
        d_model="global_config.hidden_size", d_ff=None, activation=None, layer=_blt,
        stacks=[Stack(name, f"{name}_config.num_hidden_layers") for name in _TRANSFORMERS],
        adjust=lambda config: {"activation": "silu"},
    ),
    "emu3_text_model": Family(default_activation="silu", bias=("mlp_bias", False), eps=("rms_norm_eps", 1e-5)),
    "git": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", position="post",
        eps=("layer_norm_eps", 1e-12), stacks=(Stack("encoder"),),
    ),
    "mllama_text_model": Family(default_activation="silu", eps=("rms_norm_eps", 1e-5), layer=_mllama),
    "musicgen_decoder": Family(
        gated=False, d_ff="ffn_dim", activation="activation_function", default_activation="gelu", norm="layernorm",
        eps=(None, 1e-5), aliases=("musicgen_melody_decoder",),
    ),
    "phi4_multimodal": Family(default_activation="silu", eps=("rms_norm_eps", 1e-5)),
    # Between norm and FFN the delay's embedding scales every feature: what is said here is the FFN alone.
    "voxtral_realtime_text": Family(
        default_activation="silu", norm="none", adjust=lambda config: {"residual": False}
    ),
}  # fmt: skip
