"""Dense decoders: one stack, every layer alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ffncli.errors import FFNError
from ffncli.models.family import Extra, Family, Stack
from ffncli.models.fields import Fields

LAYER_NORM_EPS = ("layer_norm_epsilon|layer_norm_eps|layernorm_epsilon|norm_epsilon|norm_eps", 1e-5)


def _opt(config: Fields) -> Extra:
    affine = config.flag("layer_norm_elementwise_affine", True)
    return {
        "norm_position": "pre" if config.flag("do_layer_norm_before", True) else "post",
        "norm_weight": "plain" if affine else "none",
        "norm_bias": affine,
    }


def _gemma1(config: Fields) -> Extra:
    # Early Gemma-1 configs say "gelu" and mean tanh: the weights were trained with it.
    name = config.text("hidden_activation|hidden_act", "gelu_tanh")
    return {"activation": "gelu_tanh" if name == "gelu" else name}


def _falcon(config: Fields) -> Extra:
    parallel = config.flag("parallel_attn", True)
    new = config.flag("new_decoder_architecture", False)
    norms = config.integer("num_ln_in_parallel_attn", 2 if new else 1, 1, 2)
    return {"parallel": parallel or new, "shared_norm": parallel and not (new and norms == 2)}


def _gpt_neox(config: Fields) -> Extra:
    return {"parallel": config.flag("use_parallel_residual", True)}


def _bloom(config: Fields) -> Extra:
    if config.flag("apply_residual_connection_post_layernorm", False):
        raise FFNError(
            f"{config.where}: apply_residual_connection_post_layernorm = true is not covered",
            "its residual takes the norm's output, which no known BLOOM checkpoint does",
        )
    return {"activation": "gelu_tanh"}


_GEMMA = Family(
    activation="hidden_activation", default_activation="gelu_tanh", position="pre+branch", norm_weight="one_plus"
)

ROWS: Mapping[str, Family] = {
    "gpt2": Family(
        gated=False, d_model="n_embd|hidden_size", d_ff="n_inner", multiple=4, activation="activation_function",
        default_activation="gelu_new", bias=True, norm="layernorm", eps=LAYER_NORM_EPS,
    ),
    "opt": Family(
        gated=False, d_ff="ffn_dim", activation="activation_function", default_activation="relu",
        bias=("enable_bias", True), norm="layernorm", eps=(None, 1e-5), adjust=_opt,
    ),
    "bloom": Family(
        gated=False, d_model="n_embed|n_embd|hidden_size", d_ff=None, multiple=4, activation=None, bias=True,
        norm="layernorm", eps=LAYER_NORM_EPS, adjust=_bloom, stacks=(Stack("decoder", "n_layer|num_hidden_layers"),),
    ),
    "gpt_neox": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", eps=LAYER_NORM_EPS, adjust=_gpt_neox
    ),
    "falcon": Family(
        gated=False, d_ff="ffn_hidden_size", multiple=4, activation="activation", default_activation="gelu",
        bias=("bias", False), norm="layernorm", eps=LAYER_NORM_EPS, adjust=_falcon,
    ),
    "phi": Family(
        gated=False, default_activation="gelu_new", bias=True, norm="layernorm", eps=LAYER_NORM_EPS,
        adjust=lambda config: {"parallel": True, "shared_norm": True},
    ),
    "llama": Family(default_activation="silu", bias=("mlp_bias", False)),
    "mistral": Family(default_activation="silu"),
    "qwen2": Family(default_activation="silu"),
    "qwen3": Family(default_activation="silu"),
    "phi3": Family(default_activation="silu", eps=("rms_norm_eps", 1e-5)),
    "olmo2": Family(default_activation="silu", position="branch", eps=("rms_norm_eps", 1e-5)),
    "gemma": Family(
        activation="hidden_activation|hidden_act", default_activation="gelu_tanh", norm_weight="one_plus",
        adjust=_gemma1,
    ),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, aliases=("gemma3",)),
}  # fmt: skip
