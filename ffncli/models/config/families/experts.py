"""Mixtures whose experts differ from an FFN: they work in a narrower space, between norms, or share a bias."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from ffncli.block.activations import hard_limits
from ffncli.errors import FFNError
from ffncli.models.config.families.routing import after_prefix, corrected, named, only
from ffncli.models.config.family import Extra, Family, MoEFields, Stack
from ffncli.models.files.fields import Fields

_EPS5 = ("rms_norm_eps", 1e-5)
_Silu = partial(Family, default_activation="silu", eps=_EPS5)


def _kimi(config: Fields) -> Extra:
    """Kimi-Linear's routing; in Kimi-K3 the experts' sum is normalised before it is widened."""
    latent = config.integer("routed_expert_hidden_size", None)
    normed = config.flag("latent_moe_use_norm", False)
    if normed and latent is None:
        raise FFNError(f"{config.where}: latent_moe_use_norm = true without routed_expert_hidden_size")
    return {**corrected(2.446)(config), "latent": latent, "mixed_norm": normed}


def _kimi_block(config: Fields) -> Extra:
    """Kimi-K3 mixes the outputs of earlier layers instead of adding to them: the block ends before that."""
    return {} if config.get("routed_expert_hidden_size", None) is None else {"residual": False}


def _spark(config: Fields) -> Extra:
    return {
        "score": "sigmoid", "correction": True, "eps": 1e-15, "latent": config.integer("moe_hidden_size", 4096),
        "scale": config.number("routed_scaling_factor", 1.0), "latent_norm": True, "expert_norm": True,
        "router_scale": config.number("output_multiplier", 0.1767766952966369),
    }  # fmt: skip


def _spark_norms(config: Fields) -> Extra:
    """The residual is mixed with learned weights that add up to one: the block ends before it."""
    return {"residual": False, "post_norm_weigh": "input", **_glimmer(config)}


def _glimmer(config: Fields) -> Extra:
    return {"post_norm_eps": config.number("post_norm_eps", 1e-8)}


def _privacy(config: Fields) -> Extra:
    """gpt-oss's experts: g · sigmoid(1.702 g) · (u + 1), with limits."""
    only(config, "swiglu_alpha", 1.702, "only 1.702 (quick_gelu) is")
    return {"activation": "quick_gelu", "limits": hard_limits(config.number("swiglu_limit", 7.0), 1.0)}


_AXK2_LAYERS = named(after_prefix(1))


def _gated_norms(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """In layers with experts a gate of low rank multiplies the norm before them."""
    rank, has_experts = config.integer("gated_norm_rank", 16), _AXK2_LAYERS(config, stack)
    return lambda i: {"norm_gate": rank} if has_experts(i) else {}


ROWS: Mapping[str, Family] = {
    "axk2": Family(
        default_activation="silu", layer=_gated_norms,
        moe=MoEFields(layers=_AXK2_LAYERS, routing=lambda config: {**corrected(2.5)(config), "zero_outside": True}),
    ),
    "kimi_linear": _Silu(moe=MoEFields(layers=named(after_prefix(1)), routing=_kimi), adjust=_kimi_block),
    "muse_spark_text": _Silu(
        position="pre+branch", norm_weight="one_plus", adjust=_spark_norms,
        moe=MoEFields(layers=named(after_prefix(0)), routing=_spark),
    ),
    "muse_glimmer_text": _Silu(
        activation="hidden_activation", position="pre+branch", norm_weight="one_plus", adjust=_glimmer,
    ),
    # Its weights are divided by top_k, and the sum is multiplied by it again.
    "openai_privacy_filter": Family(
        activation=None, bias=True, eps=_EPS5, adjust=_privacy,
        moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {"order": "choose_first", "router_bias": True}),
    ),
    "jetmoe": _Silu(
        activation="activation_function", eps=(None, 1e-6),
        moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {"order": "choose_first", "mixed_bias": True}),
    ),
}  # fmt: skip
