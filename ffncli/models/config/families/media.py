"""Text towers with blocks of their own, of models that also hear, speak, see or read documents.

Those whose blocks are another family's are aliases there. Decoders of audio codes read tokens too, and are here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ffncli.errors import FFNError
from ffncli.models.config.families import decoders, encoders, moe, pairs
from ffncli.models.config.families.routing import softmax
from ffncli.models.config.family import Extra, Family, MoEFields, Stack
from ffncli.models.files.fields import Fields

_CONVOLVED = "its FFNs are convolutions over several tokens"
_RECURRENT = "its text side is a recurrent network: no FFN reads its tokens"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan", "vits"), _CONVOLVED),
    **dict.fromkeys(("nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_rnnt", "parakeet_tdt"), _RECURRENT),
    "inkling_audio": "it embeds audio tokens: it has no layers, so no FFN",
    "moshi_depth": "every codebook's position has FFN weights of its own",
}


def _bark(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Its own GELU; the norms of its causal models have a bias where their projections do."""
    fine = config.values.get("model_type") == "fine_acoustics"
    return lambda i: {"activation": "gelu", "norm_bias": fine or config.flag("bias", True)}


def _canine_ends(config: Fields) -> int:
    return 1  # one layer over characters before the deep encoder, one after it


def _csm(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    bias = config.flag("mlp_bias", False)
    return lambda i: {"bias": bias}


def _idefics(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """A learned gate scales the FFN's output in layers that attend to the image: the block ends before it."""
    return lambda i: {"residual": False} if stack.name == "cross" else {}


def _idefics_crossed(config: Fields) -> int:
    count: int = config.integer("num_hidden_layers") // config.integer("cross_layer_interval", 1)
    return count


def _moonshine(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """A plain encoder, a gated decoder."""
    if stack.name == "encoder":
        plain = {"gated": False, "activation": config.text("encoder_hidden_act", "gelu")}
        return lambda i: plain
    gated = {"activation": config.text("decoder_hidden_act|hidden_act", "silu")}
    return lambda i: gated


def _no_convolution(config: Fields) -> Extra:
    if config.flag("use_repmixer_blocks", True):
        raise FFNError(
            f"{config.where}: use_repmixer_blocks = true is not covered",
            "the FFNs of its first and last layer begin with a convolution over several tokens",
        )
    return {}


_BERT, _CLIP, _MOE = encoders.ROWS["bert"], encoders.ROWS["clip_text_model"], moe.ROWS["qwen2_moe"]
_ASR = Family(
    gated=False, default_activation="relu", bias=True, norm="layernorm", eps=(None, 1e-5),
    aliases=("cohere_asr",),
)  # fmt: skip
_TTS = Family(gated=False, default_activation="gelu", norm="layernorm", eps=("layer_norm_eps", 1e-5))
_MOONSHINE = replace(
    _ASR, gated=True, activation=None, adjust=lambda config: {"activation": "silu", "norm_bias": False}, aliases=()
)

ROWS: Mapping[str, Family] = {
    "blt_patcher": Family(
        default_activation="silu", eps=("rms_norm_eps", 1e-5), aliases=("blt_local_decoder", "blt_local_encoder")
    ),
    "canary_decoder": _ASR,
    "canine": replace(
        _BERT, aliases=(),
        stacks=(
            Stack("initial_char_encoder", _canine_ends), Stack("encoder"), Stack("final_char_encoder", _canine_ends)
        ),
    ),
    "clvp_decoder": replace(decoders.ROWS["gpt2"], d_model="hidden_size", aliases=()),
    "clvp_encoder": Family(default_activation="gelu", bias=True, eps=("layer_norm_eps", 1e-5)),
    "csm_depth_decoder_model": Family(default_activation="silu", bias=("mlp_bias", False), eps=("rms_norm_eps", 1e-5)),
    "csm": Family(
        default_activation="silu", eps=("rms_norm_eps", 1e-5), layer=_csm,
        stacks=(Stack("decoder"), Stack("depth_decoder", at="depth_decoder_config")),
    ),
    "decision_transformer": replace(
        decoders.ROWS["gpt2"], d_model="hidden_size|n_embd", default_activation="relu", aliases=()
    ),
    "dia": Family(
        default_activation="silu", eps=("norm_eps", 1e-5),
        stacks=(Stack("encoder", at="encoder_config"), Stack("decoder", at="decoder_config")),
    ),
    "dia_decoder": Family(default_activation="silu", eps=("norm_eps", 1e-5)),
    "dia_encoder": Family(default_activation="silu", eps=("norm_eps", 1e-5), stacks=(Stack("encoder"),)),
    "evolla": Family(default_activation="silu", bias=("mlp_bias", False), eps=("rms_norm_eps", 1e-5)),
    "higgs_audio_v2": Family(default_activation="silu", bias=("mlp_bias", False), eps=("rms_norm_eps", 1e-5)),
    "idefics": Family(
        default_activation="silu", layer=_idefics, stacks=(Stack(), Stack("cross", _idefics_crossed)),
    ),
    "imagegpt": replace(decoders.ROWS["gpt2"], default_activation="quick_gelu", norm="rmsnorm", aliases=()),
    "instructblip_qformer": replace(_BERT, aliases=("instructblipvideo_qformer",)),
    "layoutlmv3": replace(_BERT, eps=("layer_norm_eps", 1e-5), aliases=()),
    "lilt": replace(_BERT, aliases=()),
    "lxmert": replace(
        _BERT, eps=(None, 1e-12), stacks=(Stack("language", "l_layers"), Stack("cross_encoder", "x_layers")), aliases=()
    ),
    "moonshine": replace(
        _MOONSHINE, layer=_moonshine,
        stacks=(Stack("encoder", "encoder_num_hidden_layers"),
                Stack("decoder", "decoder_num_hidden_layers|num_hidden_layers")),
    ),
    # Its encoder is another tower's config; the decoder alone reads tokens.
    "moonshine_streaming": replace(_MOONSHINE, activation="hidden_act", default_activation="silu",
                                   adjust=lambda config: {"norm_bias": False}),
    "gradium_phonon_tts": _TTS,
    "pocket_tts": replace(_TTS, default_activation="gelu_tanh"),
    "pp_formulanet_text": replace(decoders.ROWS["trocr"], position="pre"),
    "qwen3_omni_moe_talker_text": replace(  # every layer has experts, whatever decoder_sparse_step says
        _MOE, moe=MoEFields(routing=softmax(False, shared=True, gate=True)), aliases=()
    ),
    "sam3_lite_text_text_model": replace(_CLIP, default_activation="gelu", adjust=_no_convolution, aliases=()),
    "semantic": Family(
        gated=False, d_ff=None, multiple=4, activation=None, bias=("bias", True), norm="layernorm", eps=(None, 1e-5),
        adjust=lambda config: {"activation": "gelu"}, layer=_bark,
        stacks=(Stack(layers="num_layers|num_hidden_layers"),), aliases=("coarse_acoustics", "fine_acoustics"),
    ),
    "speecht5": replace(
        pairs.ROWS["bart"], d_model="hidden_size", activation="hidden_act", eps=("layer_norm_eps", 1e-5), aliases=()
    ),
    "videoprism_text_model": replace(
        _CLIP, default_activation="relu", norm_weight="one_plus", eps=("layer_norm_eps", 1e-6), aliases=()
    ),
}  # fmt: skip
