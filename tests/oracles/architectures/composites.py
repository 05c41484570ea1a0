"""Cases of composites: how each is built tiny, and which parameters are its FFN's. Only text towers are counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tests.oracles.architectures import Architecture

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
    """A model whose text_config (and audio_config) are of these model types."""
    nested = {"text_config": {"model_type": text}} if text else {}
    nested |= {"audio_config": {"model_type": audio}} if audio else {}
    values = nested | said.pop("values", {})
    return Architecture(_TOWER + r"mlp\..*", norm if norm == _NONE else _TOWER + norm, values, **said)


def _musicgen(name: str) -> Architecture:
    """A decoder of audio tokens, conditioned on T5; only the decoder is counted."""
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


CASES: Mapping[str, Architecture] = {
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
    # Layer 1 attends to the image; a gate of its own, which is no FFN parameter, scales its FFN's output.
    "mllama": _composite(
        values={"text_config": {"cross_attention_layers": [1]}}, model="MllamaForConditionalGeneration"
    ),
    # The whole has an image tokenizer without a tiny size.
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
    # Its audio config's width follows from a nested one, and cannot be given; the speaker model has no tiny size.
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
