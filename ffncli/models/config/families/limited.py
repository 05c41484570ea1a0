"""Limits of gated units as configs state them: by name, one for each layer, others for shared experts."""

from __future__ import annotations

from collections.abc import Callable
from itertools import repeat

from ffncli.block import activations
from ffncli.block.activations import NO_LIMITS, Limits, limits_after
from ffncli.errors import FFNError
from ffncli.models.config.family import Extra, LayerRule, Stack
from ffncli.models.files.fields import Fields


def per_layer_limits(config: Fields, stack: Stack, name: str) -> Callable[[int], Limits]:
    """The limits of a layer, after silu, from a list of one number per layer; 0 and null mean none.

    A longer list goes on with the layers that predict further tokens. Raises FFNError naming the field.
    """
    value = config.get(name, None)
    count = config.integer(stack.layers) if isinstance(stack.layers, str) else stack.layers(config)
    if value is None or value == []:
        value = list(repeat(0.0, count))
    wrong = type(value) is not list or len(value) < count
    if wrong or any(type(v) not in (int, float, type(None)) or not 0 <= (v or 0) < 1e30 for v in value):
        raise config.wrong(name, value, f"a list of {count} limits, 0 for none")
    return lambda i: limits_after(float(value[i])) if value[i] else NO_LIMITS


def swiglu_limits(sparse: LayerRule) -> Callable[[Fields, Stack], Callable[[int], Extra]]:
    """Step-3.5's two lists: of the routed experts, and of the shared expert, whose list dense layers use too."""

    def layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
        routed = per_layer_limits(config, stack, "swiglu_limits")
        shared = per_layer_limits(config, stack, "swiglu_limits_shared")
        has_experts = sparse(config, stack)
        return lambda i: {"limits": routed(i), "shared_limits": shared(i)} if has_experts(i) else {"limits": shared(i)}

    return layer


def expert_limits(sparse: LayerRule) -> Callable[[Fields, Stack], Callable[[int], Extra]]:
    """Ling-3's two lists, in the same order as Step's; what they mean for a dense layer nothing says.

    The fields, and silu before the limit: sgl-project/sglang#36312, inclusionAI's vLLM (jundot/omlx#2571).
    """

    def layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
        names = ("expert_swiglu_limit_list", "share_expert_swiglu_limit_list")
        routed, shared = (per_layer_limits(config, stack, name) for name in names)
        has_experts = sparse(config, stack)

        def extra(i: int) -> Extra:
            if has_experts(i):
                return {"limits": routed(i), "shared_limits": shared(i)}
            for name, limits in zip(names, (routed(i), shared(i)), strict=True):
                if limits != NO_LIMITS:
                    raise FFNError(
                        f"{config.where}: {name}[{i}] is not covered",
                        f"layer {i} is dense, and the limits of this family are for experts",
                    )
            return {}

        return extra

    return layer


def named_limits(config: Fields, activation: str) -> Limits:
    """The limits that the name of a gated unit stands for; Kimi-K3's config has fields for those of situ."""
    limits = activations.limits_of(activation) or NO_LIMITS
    if limits.gate_cap is None:
        return limits
    gate = config.number("activation_situ_beta", limits.gate_cap)
    name = "activation_situ_linear_beta"
    open_up = name in config.values and config.get(name, None) is None  # null: up has no cap
    return Limits(gate_cap=gate, up_cap=None if open_up else config.number(name, limits.up_cap or 0.0))
