"""Encoders: BERT and its relatives, vision transformers (ROWS), and text towers with blocks of their own in models that
also process sound, images or documents (MEDIA).

Towers whose blocks equal another family's blocks are aliases of that family. Decoders of audio codes also read tokens,
so they are in MEDIA.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ffncli.models.config.families import decoders, moe
from ffncli.models.config.family import Extra, Family, MoEFields, Stack, not_covered, only, runs_only, silu, softmax
from ffncli.models.files.strict_json import REQUIRED, Fields

_ENCODER = (Stack("encoder"),)


def _albert_runs(config: Fields) -> tuple[int, ...]:
    """Return the runs of each stored layer: the depth is divided among groups, which run as a whole."""
    depth, groups = config.integer("num_hidden_layers", high=10_000), config.integer("num_hidden_groups", 1)
    # divided in floating point like transformers, so that layers fall into the same groups
    often = Counter(int(i / (depth / groups)) for i in range(depth))
    inner = config.integer("inner_group_num", 1)
    return tuple(often[i // inner] for i in range(groups * inner))  # as many runs as `stacks` has layers


def _mobilebert(config: Fields) -> Extra:
    why = "its norms would differ within one layer; published MobileBERTs have no_norm"
    only(config, "normalization_type", "no_norm", why)
    # "no_norm" is x ⊙ weight + bias after the residual, not a norm, so the row describes the FFN between two "no_norm"
    # steps.
    width = "intra_bottleneck_size" if config.flag("use_bottleneck", True) else "hidden_size"
    d_model = config.integer("true_hidden_size", config.integer(width))  # read by the code if present
    return {"norm": "none", "residual": False, "d_model": d_model}


def _ungrouped(*fields: str, default: Any = REQUIRED) -> Callable[[Fields], Extra]:
    """Build a check that refuses grouped (block-diagonal) projections, which Linear cannot express."""

    def adjust(config: Fields) -> Extra:
        why = "a projection in groups is a block-diagonal matrix, which no step of a block can express"
        for field in fields:
            if (groups := config.integer(field, default)) != 1:
                raise not_covered(config, field, groups, why)
        return {}

    return adjust


def _xmod(config: Fields) -> Extra:
    # A language's adapter is between residual and norm, and may use the same norm; it does not belong to the FFN.
    pre = config.flag("pre_norm", False)
    reused = config.flag("adapter_reuse_layer_norm", True) and not config.flag("adapter_layer_norm", False)
    return {"norm": "layernorm" if pre else "none", "shared_norm": pre and reused}


def _neomme(config: Fields) -> Extra:
    depth = config.integer("num_hidden_layers")
    return {"norm_weight": "none", "residual_scale": config.number("residual_multiplier", (2 * depth) ** -0.5)}


def _perceiver(config: Fields) -> Extra:
    made = config.get("architectures", [])
    if made and made != ["PerceiverForMaskedLM"]:
        why = "a Perceiver's decoder follows from its task, and only PerceiverForMaskedLM is known here"
        raise not_covered(config, "architectures", made, why)
    return {}


def _perceiver_layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read the widths: multiples of the latents' width. The decoder's queries are as wide as the embeddings."""
    decoder = stack.name == "decoder"
    d_model = config.integer("d_model" if decoder else "d_latents")
    widening: int = 1 if decoder else config.integer(f"{stack.name}_attention_widening_factor", 1)
    return lambda i: {"d_model": d_model, "d_ff": widening * d_model}


def _ibert(config: Fields) -> Extra:
    runs_only(config, "quant_mode", False, "its FFN would compute in integers")
    return {}


_BERT = Family(
    gated=False, default_activation="gelu", bias=True, norm="layernorm", position="post", stacks=_ENCODER,
    eps=("layer_norm_eps", 1e-12),
)  # fmt: skip
_PRE = replace(_BERT, position="pre")
_MODERNBERT = Family(
    activation="hidden_activation", default_activation="gelu", bias=("mlp_bias", False), norm="layernorm",
    eps=("norm_eps", 1e-5), adjust=lambda config: {"norm_bias": config.flag("norm_bias", False)},
)  # fmt: skip
_LLAMA = silu(bias=("mlp_bias", False), stacks=_ENCODER)
ROWS: Mapping[str, Family] = {
    "bert": replace(
        _BERT,
        aliases=(
            "roberta", "xlm-roberta", "electra", "camembert", "bert-generation", "data2vec-text", "ernie", "layoutlm",
            "longformer", "luke", "mpnet", "rembert", "roc_bert", "roformer", "tapas", "yoso", "bros", "dpr",
            "markuplm", "splinter", "tvp", "visual_bert",
            "layoutlmv2",
        ),
    ),
    "big_bird": replace(_BERT, default_activation="gelu_new", aliases=("fnet",)),
    "mra": replace(_BERT, eps=("layer_norm_eps", 1e-5), aliases=("jina_embeddings_v3",)),
    "nystromformer": replace(_BERT, default_activation="gelu_new", eps=("layer_norm_eps", 1e-5)),
    "deberta": replace(_BERT, eps=("layer_norm_eps", 1e-7), aliases=("deberta-v2",)),
    "distilbert": replace(
        _BERT, d_model="dim|hidden_size", d_ff="hidden_dim", activation="activation", eps=(None, 1e-12),
        stacks=(Stack("encoder", "n_layers|num_hidden_layers"),),
    ),
    "albert": replace(
        _BERT, default_activation="gelu_new", stacks=(
            Stack("encoder", lambda config: len(_albert_runs(config)), runs=_albert_runs),
        ),
    ),
    "mobilebert": replace(
        _BERT, d_model="intra_bottleneck_size", default_activation="relu", adjust=_mobilebert,
        stacks=(Stack("encoder", times="num_feedforward_networks"),),
    ),
    "convbert": replace(_BERT, adjust=_ungrouped("num_groups", default=1)),
    "squeezebert": replace(_BERT, eps=(None, 1e-12), adjust=_ungrouped("intermediate_groups", "output_groups")),
    "ibert": replace(_BERT, adjust=_ibert),
    "xmod": replace(_BERT, position="pre", adjust=_xmod),
    "megatron-bert": replace(_PRE, aliases=("roberta-prelayernorm",)),
    "xlm-roberta-xl": replace(_PRE, eps=("layer_norm_eps", 1e-5)),
    "esm": replace(_PRE, activation=None, adjust=lambda config: {"activation": "gelu"}),
    "clip_text_model": replace(_PRE, default_activation="quick_gelu", eps=("layer_norm_eps", 1e-5)),
    "tipsv2_text_model": replace(_PRE, default_activation="relu", eps=("layer_norm_eps", 1e-5)),
    "vit": replace(_PRE, aliases=("vilt",)),
    "gte": replace(_BERT, gated=True, bias=False, adjust=lambda config: {"down_bias": True}),
    "nomic_bert": replace(_BERT, gated=True, bias=False, default_activation="silu"),
    "modernbert": replace(_MODERNBERT, stacks=_ENCODER),
    "modernbert-decoder": _MODERNBERT,
    "eurobert": replace(_LLAMA, eps=("rms_norm_eps", 1e-5)),
    "ultrabert": _LLAMA,
    "esmc": replace(
        _LLAMA, norm="layernorm", eps=(None, 1e-5),
        adjust=lambda config: {"residual_scale": (36 / config.integer("num_hidden_layers")) ** 0.5},
    ),
    "neomme": replace(_LLAMA, gated=False, default_activation="relu2", eps=("norm_eps", 1e-6), adjust=_neomme),
    "perceiver": replace(
        _PRE, d_model="d_latents", d_ff=None, eps=(None, 1e-5), adjust=_perceiver, layer=_perceiver_layer,
        stacks=(
            Stack("cross", lambda config: 1),
            Stack("self", "num_self_attends_per_block", runs=lambda config: config.integer("num_blocks", 1)),
            Stack("decoder", lambda config: 1),
        ),
    ),
}  # fmt: skip
_CONVOLVED = "its FFNs are convolutions over several tokens"
_RECURRENT = "its text side is a recurrent network: no FFN reads its tokens"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("fastspeech2_conformer", "fastspeech2_conformer_with_hifigan", "vits"), _CONVOLVED),
    **dict.fromkeys(("nemotron3_5_asr", "nemotron_asr_streaming", "parakeet_rnnt", "parakeet_tdt"), _RECURRENT),
    "inkling_audio": "it only embeds audio tokens: it has no layers and thus no FFN",
    "moshi_depth": "every codebook's position has FFN weights of its own",
}


def _bark(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read Bark's blocks, which use its own GELU; in its causal models, norms have a bias if projections do."""
    fine = config.values.get("model_type") == "fine_acoustics"
    return lambda i: {"activation": "gelu", "norm_bias": fine or config.flag("bias", True)}


def _csm(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    bias = config.flag("mlp_bias", False)
    return lambda i: {"bias": bias}


def _moonshine(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read a plain encoder and a gated decoder."""
    if stack.name == "encoder":
        plain = {"gated": False, "activation": config.text("encoder_hidden_act", "gelu")}
        return lambda i: plain
    gated = {"activation": config.text("decoder_hidden_act|hidden_act", "silu")}
    return lambda i: gated


def _no_convolution(config: Fields) -> Extra:
    if config.flag("use_repmixer_blocks", True):
        why = "the FFNs of its first and last layer begin with a convolution over several tokens"
        raise not_covered(config, "use_repmixer_blocks", True, why)
    return {}


_CLIP, _MOE = ROWS["clip_text_model"], moe.ROWS["qwen2_moe"]
_ASR = Family(
    gated=False, default_activation="relu", bias=True, norm="layernorm", eps=(None, 1e-5),
    aliases=("cohere_asr",),
)  # fmt: skip
_TTS = Family(gated=False, default_activation="gelu", norm="layernorm", eps=("layer_norm_eps", 1e-5))
_MOONSHINE = replace(
    _ASR, gated=True, activation=None, adjust=lambda config: {"activation": "silu", "norm_bias": False}, aliases=()
)
MEDIA: Mapping[str, Family] = {
    "blt_patcher": silu(1e-5, aliases=("blt_local_decoder", "blt_local_encoder")),
    "canary_decoder": _ASR,
    "canine": replace(
        ROWS["bert"], aliases=(),
        stacks=(  # one layer over characters before the deep encoder, and one layer after it
            Stack("initial_char_encoder", lambda config: 1), Stack("encoder"),
            Stack("final_char_encoder", lambda config: 1),
        ),
    ),
    "clvp_decoder": replace(decoders.ROWS["gpt2"], d_model="hidden_size", aliases=()),
    "clvp_encoder": Family(default_activation="gelu", bias=True, eps=("layer_norm_eps", 1e-5)),
    "csm_depth_decoder_model": silu(1e-5, bias=("mlp_bias", False)),
    "csm": silu(1e-5, layer=_csm, stacks=(Stack("decoder"), Stack("depth_decoder", at="depth_decoder_config"))),
    "decision_transformer": replace(
        decoders.ROWS["gpt2"], d_model="hidden_size|n_embd", default_activation="relu", aliases=()
    ),
    "dia": Family(
        default_activation="silu", eps=("norm_eps", 1e-5),
        stacks=(Stack("encoder", at="encoder_config"), Stack("decoder", at="decoder_config")),
    ),
    "dia_decoder": Family(default_activation="silu", eps=("norm_eps", 1e-5)),
    "dia_encoder": Family(default_activation="silu", eps=("norm_eps", 1e-5), stacks=(Stack("encoder"),)),
    "evolla": silu(1e-5, bias=("mlp_bias", False)),
    "higgs_audio_v2": silu(1e-5, bias=("mlp_bias", False)),
    # Layers that attend to the image scale the FFN's output by a learned gate; their block ends before the gate.
    "idefics": silu(
        layer=lambda config, stack: lambda i: {"residual": False} if stack.name == "cross" else {},
        stacks=(
            Stack(),
            Stack("cross", lambda config: (
                config.integer("num_hidden_layers") // config.integer("cross_layer_interval", 1))),
        ),
    ),
    "imagegpt": replace(decoders.ROWS["gpt2"], default_activation="quick_gelu", norm="rmsnorm", aliases=()),
    "instructblip_qformer": replace(ROWS["bert"], aliases=("instructblipvideo_qformer",)),
    "layoutlmv3": replace(ROWS["bert"], eps=("layer_norm_eps", 1e-5), aliases=()),
    "lilt": replace(ROWS["bert"], aliases=()),
    "lxmert": replace(
        ROWS["bert"], eps=(None, 1e-12), aliases=(),
        stacks=(Stack("language", "l_layers"), Stack("cross_encoder", "x_layers")),
    ),
    "moonshine": replace(
        _MOONSHINE, layer=_moonshine,
        stacks=(Stack("encoder", "encoder_num_hidden_layers"),
                Stack("decoder", "decoder_num_hidden_layers|num_hidden_layers")),
    ),
    # Its encoder has another tower's config; only the decoder reads tokens.
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
        decoders.PAIRS["bart"], d_model="hidden_size", activation="hidden_act", eps=("layer_norm_eps", 1e-5), aliases=()
    ),
    "videoprism_text_model": replace(
        _CLIP, default_activation="relu", norm_weight="one_plus", eps=("layer_norm_eps", 1e-6), aliases=()
    ),
}  # fmt: skip
