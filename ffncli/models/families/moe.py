"""Mixtures of experts: which layers have them, how tokens are routed, what runs beside them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ffncli.errors import FFNError
from ffncli.models.family import Extra, Family, LayerRule, MoEFields, Stack
from ffncli.models.fields import Fields


def sparse_step(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Qwen's rule: every `decoder_sparse_step`-th layer has experts, but for those listed as dense."""
    step: int = config.integer("decoder_sparse_step", 1)
    dense = frozenset(config.integers("mlp_only_layers"))
    return lambda i: i not in dense and (i + 1) % step == 0


def after_prefix(default: int) -> LayerRule:
    """DeepSeek's rule: the first layers are dense (`default` of them where the config does not say)."""

    def rule(config: Fields, stack: Stack) -> Callable[[int], bool]:
        frequency: int = config.integer("moe_layer_freq", 1)
        prefix: int = config.integer("first_k_dense_replace", default, low=0)
        return lambda i: i >= prefix and i % frequency == 0

    return rule


def _qwen2_moe(config: Fields) -> Extra:
    return {
        "renormalise": config.flag("norm_topk_prob", False),
        "shared_experts": 1,
        "shared_d_ff": config.integer("shared_expert_intermediate_size"),
        "shared_gate": True,
    }


def _gpt_oss(config: Fields) -> Extra:
    alpha = config.number("swiglu_alpha", 1.702)
    if alpha != 1.702:
        raise FFNError(f"{config.where}: swiglu_alpha = {alpha:g} is not covered", "only 1.702 (quick_gelu) is")
    # hidden_act says silu; the code runs (up + 1) · gate · sigmoid(1.702 gate), clamped.
    return {"activation": "quick_gelu", "clamp": config.number("swiglu_limit", 7.0), "up_plus": 1.0}


def _deepseek(config: Fields, scale: float, shared: int) -> dict[str, Any]:
    return {
        "scale": config.number("routed_scaling_factor", scale),
        "shared_experts": config.integer("n_shared_experts", shared, low=0),
    }


def _deepseek_v2(config: Fields) -> Extra:
    grouped_choice = config.text("topk_method", "greedy") == "group_limited_greedy"
    groups = {"groups": config.integer("n_group"), "top_groups": config.integer("topk_group")} if grouped_choice else {}
    if config.flag("norm_topk_prob", False):
        raise FFNError(
            f"{config.where}: norm_topk_prob = true is not covered for deepseek_v2",
            "its implementations disagree on it; no published checkpoint has it",
        )
    return _deepseek(config, 1.0, 2) | groups | {"renormalise": False}


def deepseek_v3(config: Fields) -> Extra:
    """DeepSeek-V3's routing: sigmoid scores, a correction for the choice, groups judged by their two best."""
    return _deepseek(config, 2.5, 1) | {
        "score": "sigmoid", "correction": True, "group_best": 2, "renormalise": config.flag("norm_topk_prob", True),
        "groups": config.integer("n_group", 8), "top_groups": config.integer("topk_group", 4),
    }  # fmt: skip


ROWS: Mapping[str, Family] = {
    "mixtral": Family(
        default_activation="silu", eps=("rms_norm_eps", 1e-5), moe=MoEFields(d_ff="intermediate_size")
    ),
    "qwen2_moe": Family(default_activation="silu", moe=MoEFields(layers=sparse_step, routing=_qwen2_moe)),
    "qwen3_moe": Family(
        default_activation="silu",
        moe=MoEFields(
            layers=sparse_step, routing=lambda config: {"renormalise": config.flag("norm_topk_prob", False)}
        ),
    ),
    "deepseek_v2": Family(
        default_activation="silu", bias=("mlp_bias", False),
        moe=MoEFields(layers=after_prefix(0), routing=_deepseek_v2),
    ),
    "deepseek_v3": Family(
        default_activation="silu", moe=MoEFields(layers=after_prefix(3), routing=deepseek_v3)
    ),
    "gpt_oss": Family(
        activation=None, bias=True, eps=("rms_norm_eps", 1e-5), adjust=_gpt_oss,
        moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {
            "order": "choose_first", "router_bias": True, "score_dtype": "input"}),
    ),
}  # fmt: skip
