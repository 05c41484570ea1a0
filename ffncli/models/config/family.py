"""The format of a row in `families/`: the meaning of the config fields, and the properties that the family's code
fixes.

This module also has building blocks for mixtures of experts: rules for which layers have experts, routings (keyword
arguments of `MoE`, read from a config), and limits of gated units. Facts: transformers 5.23, `modeling_*.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, Literal, TypeAlias

from ffncli.block import activations
from ffncli.block.activations import NO_LIMITS, Limits, hard_limits, limits_after
from ffncli.block.recipe import NormPosition
from ffncli.errors import FFNError, shown
from ffncli.models.files.strict_json import REQUIRED, Fields

Extra: TypeAlias = Mapping[str, Any]  # keyword arguments of FFNSpec, or of MoE if it describes a routing
EXPERTS = "num_experts|n_routed_experts|num_local_experts|moe_num_experts"
TOP_K = "num_experts_per_tok|moe_topk|moe_k|moe_top_k|top_k_experts|num_experts_per_token"


@dataclass(frozen=True)
class Stack:
    """A stack of layers: its name, the field with its layer count, and the field with its d_ff if the stack has its own
    field.

    `layers` may be a function if no field holds the count (Funnel: the sum of its blocks). `at` names a nested config
    that holds the stack's fields. `kind` selects only the dense or only the MoE layers, for models whose layers contain
    both kinds (LongCat-Flash); `times` is then the number of FFNs of that kind per layer, or the field that holds the
    number. `runs` overrides the family's `runs` for this stack; it may return one count per layer.
    """

    name: str = "decoder"
    layers: str | Callable[[Fields], int] = "num_hidden_layers|n_layer|n_layers|num_layers"
    d_ff: str | None = None
    at: str = ""
    kind: Literal["any", "dense", "moe"] = "any"
    times: int | str = 1
    runs: Callable[[Fields], int | tuple[int, ...]] | None = None


LayerRule: TypeAlias = Callable[[Fields, Stack], Callable[[int], bool]]
LayerExtra: TypeAlias = Callable[[Fields, Stack], Callable[[int], Extra | None]]


def every_layer(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Give every layer experts: the rule for models whose layers are all alike."""
    return lambda i: True


@dataclass(frozen=True)
class MoEFields:
    """The fields of a family's row that concern experts. `layers` returns the rule for which layers have experts."""

    experts: str = EXPERTS
    d_ff: str = "moe_intermediate_size"
    top_k: str = TOP_K
    layers: LayerRule = every_layer
    routing: Callable[[Fields], Extra] = lambda config: {}


@dataclass(frozen=True, kw_only=True)
class Family:
    """One model family. Strings are field names; `multiple` is d_ff / d_model if d_ff is null or absent.

    `gated` None: the activation field decides (T5). `bias` is a fixed value, or a flag's name and default. `adjust`
    computes further keyword arguments of FFNSpec; `layer` does so for single layers (`moe.lookup` is an argument of
    MoE), and returns None for a layer without an FFN (hybrids). A `d_ff` field may hold one width per layer. `runs` is
    how often the stored layers run in one forward pass (ALBERT shares one layer). `text` names nested configs that may
    hold the text model's fields; `parts` names nested configs that are whole models with rows of their own
    (encoder-decoder) and are not in `stacks`.
    """

    gated: bool | None = True
    d_model: str = "hidden_size"
    d_ff: str | None = "intermediate_size"
    multiple: int | None = None
    activation: str | None = "hidden_act"
    default_activation: str = REQUIRED
    bias: bool | tuple[str, bool] = False
    norm: Literal["none", "layernorm", "rmsnorm"] = "rmsnorm"
    position: NormPosition = "pre"
    norm_weight: Literal["none", "plain", "one_plus"] = "plain"
    eps: tuple[str | None, float] = ("rms_norm_eps", 1e-6)
    stacks: Sequence[Stack] = (Stack(),)
    adjust: Callable[[Fields], Extra] = lambda config: {}
    layer: LayerExtra = lambda config, stack: lambda i: {}
    runs: Callable[[Fields], int] = lambda config: 1
    moe: MoEFields | None = None
    text: tuple[str, ...] = ("text_config",)
    parts: tuple[str, ...] = ()
    aliases: tuple[str, ...] = ()


def silu(eps: float = 1e-6, **fields: Any) -> Family:
    """Build the row for Llama's block: SiLU-gated, with RMSNorm before it."""
    return Family(default_activation="silu", eps=("rms_norm_eps", eps), **fields)


Routing = Callable[[Fields], Extra]
SHARED = "n_shared_experts|num_shared_experts|moe_num_shared_experts"


def residual_multiplier(config: Fields, default: float = 1.0) -> Extra:
    """Read Granite's factor for the block's output."""
    return {"residual_scale": config.number("residual_multiplier", default)}


def only(config: Fields, name: str, allowed: object, why: str) -> None:
    """Raise FFNError unless a field is absent or has the value `allowed`, the only one that the row counts."""
    value = config.get(name, allowed)
    if value != allowed or type(value) is not type(allowed):
        raise not_covered(config, name, value, why)


def runs_only(config: Fields, name: str, allowed: object, why: str) -> None:
    """Record that the model is counted but not run, unless a field is absent or has the value `allowed`. For a field
    that changes what the block computes, but none of its parameters."""
    value = config.get(name, allowed)
    if value != allowed or type(value) is not type(allowed):
        not_run(config, name, value, why)


def not_run(config: Fields, name: str, value: object, why: str) -> None:
    """Record why the model cannot be run: a field's value, which its row does not compute."""
    config.not_run[f"{config.name(name)} = {_field_value(value)} is not covered: {why}"] = None


def requires(name: str, allowed: object, why: str) -> Routing:
    """Build a function that adds nothing to a block, and raises FFNError like `only`."""

    def check(config: Fields) -> Extra:
        only(config, name, allowed, why)
        return {}

    return check


def not_covered(config: Fields, name: str, value: object, why: str) -> FFNError:
    """Build the error for a value that the family's row cannot describe."""
    return FFNError(f"{config.where}: {config.name(name)} = {_field_value(value)} is not covered", why)


def _field_value(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else shown(value)


def agree(config: Fields, **settled: object) -> None:
    """Mark fields as read if their values describe what this family's code always does; `unread` refuses any other
    value."""
    for name, value in settled.items():
        if config.values.get(name) == value:
            config.pass_over(name)


# --- which layers have experts ----------------------------------------------------------------------------------------


def sparse_step(config: Fields, stack: Stack, dense_layers: tuple[int, ...] = ()) -> Callable[[int], bool]:
    """Build Qwen's rule: every `decoder_sparse_step`-th layer has experts, except those listed as dense."""
    step = config.integer("decoder_sparse_step", 1)
    listed = config.get("mlp_only_layers", None) is not None
    dense = frozenset(config.integers("mlp_only_layers") if listed else dense_layers)
    return lambda i: i not in dense and (i + 1) % step == 0


def after_prefix(default: int, field: str = "first_k_dense_replace") -> LayerRule:
    """Build DeepSeek's rule: the first layers are dense (`default` of them if the config does not specify how many).

    `moe_layer_freq` is a step, or a list with one flag per layer.
    """

    def rule(config: Fields, stack: Stack) -> Callable[[int], bool]:
        prefix = config.integer(field, default, low=0)
        if type(config.get("moe_layer_freq", 1)) is list:
            listed = frozenset(i for i, v in enumerate(per_layer(config, stack, "moe_layer_freq", (0, 1))) if v)
            return lambda i: i >= prefix and i in listed
        frequency = config.integer("moe_layer_freq", 1)
        return lambda i: i >= prefix and i % frequency == 0

    return rule


def named(rule: LayerRule) -> LayerRule:
    """Build a rule that reads `mlp_layer_types` (sparse or dense) if the config has it, else applies `rule`."""

    def chosen(config: Fields, stack: Stack) -> Callable[[int], bool]:
        if config.get("mlp_layer_types", None) is None:
            return rule(config, stack)
        kinds = per_layer(config, stack, "mlp_layer_types", ("dense", "sparse"))
        config.pass_over("first_k_dense_replace", "moe_layer_freq")
        return lambda i: kinds[i] == "sparse"

    return chosen


def fixed_prefix(dense: int) -> LayerRule:
    """Build the rule for models whose code makes the first `dense` layers dense. Only `mlp_layer_types` can override
    this; older fields must give the same count."""

    def rule(config: Fields, stack: Stack) -> Callable[[int], bool]:
        sparse = config.integer("num_hidden_layers") - dense
        agree(config, first_k_dense_replace=dense, moe_layer_freq=[0] * dense + [1] * sparse)
        return lambda i: i >= dense

    return named(rule)


def per_layer(config: Fields, stack: Stack, name: str, choices: tuple[object, ...]) -> list[Any]:
    """Read a list with one of `choices` for each layer. Raises FFNError with the field's name."""
    value = config.get(name, kind="a list")
    count = config.integer(stack.layers) if isinstance(stack.layers, str) else stack.layers(config)
    if type(value) is not list or len(value) < count or any(v not in choices for v in value):
        raise config.wrong(name, value, f"a list of {count} out of {', '.join(map(str, choices))}")
    return value


def where_dense(rule: LayerRule, sparse: Extra, dense: Extra) -> Callable[[Fields, Stack], Callable[[int], Extra]]:
    """Build a layer function that returns `sparse` for layers with experts and `dense` for the others."""

    def layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
        has_experts = rule(config, stack)
        return lambda i: sparse if has_experts(i) else dense

    return layer


# --- how tokens are routed --------------------------------------------------------------------------------------------


def shared_width(config: Fields, name: str = "shared_expert_intermediate_size", default: Any = None) -> Extra:
    """Describe the shared experts as one MLP with a separate width; empty if the width is 0."""
    width = config.integer(name, low=0) if default is None else config.integer(name, default, low=0)
    return {"shared_experts": 1, "shared_d_ff": width} if width else {}


def softmax(renormalise: bool | None, shared: bool = False, gate: bool = False) -> Routing:
    """Build Qwen's routing: a softmax over all experts; the weights of the chosen experts are renormalised if
    `norm_topk_prob` is true.

    `renormalise` is the flag's default, or None if the code always renormalises. `gate`: the shared expert has a
    sigmoid gate.
    """

    def routing(config: Fields) -> Extra:
        more = {**shared_width(config), "shared_gate": gate} if shared else {}
        if renormalise is None:
            agree(config, norm_topk_prob=True)
            return {"renormalise": True, **more}
        return {"renormalise": config.flag("norm_topk_prob", renormalise), **more}

    return routing


def after_choice(config: Fields) -> Extra:
    """Return Granite's routing: top_k logits are chosen, and a softmax over these in float32 weights the experts."""
    return {"order": "choose_first", **shared_width(config, "shared_intermediate_size", 0)}


def corrected(
    scale: float = 1.0, groups: tuple[int, int] = (1, 1), shared: int | None = 1, renormalise: bool | None = True
) -> Routing:
    """Build DeepSeek-V3's routing: sigmoid scores, a correction that affects only the choice, and groups ranked by the
    sum of their two best scores.

    The arguments are the defaults of the config fields. `shared` None: the family has no shared experts. `renormalise`
    None: the code always renormalises.
    """

    def routing(config: Fields) -> Extra:
        agree(config, scoring_func="sigmoid", topk_method="noaux_tc")
        agree(config, moe_router_activation_func="sigmoid", use_grouped_topk=True, moe_router_dtype="float32")
        if renormalise is None:
            agree(config, norm_topk_prob=True)
        return {
            "score": "sigmoid", "correction": True, "group_best": 2,
            "renormalise": renormalise is None or config.flag("norm_topk_prob|moe_renormalize", renormalise),
            "scale": config.number("routed_scaling_factor", scale),
            "groups": config.integer("n_group|num_expert_group", groups[0]),
            "top_groups": config.integer("topk_group", groups[1]),
            "shared_experts": 0 if shared is None else config.integer(SHARED, shared, low=0),
        }  # fmt: skip

    return routing


def ungrouped(scale: str | None = None, default: float = 1.0, shared: Routing = lambda config: {}) -> Routing:
    """Build DeepSeek-V3's routing without groups, always renormalised; `scale` names the scaling factor's field."""

    def routing(config: Fields) -> Extra:
        agree(config, scoring_func="sigmoid", score_func="sigmoid", use_routing_bias=True, route_norm=True)
        agree(config, n_group=1, topk_group=1, num_expert_groups=1, num_limited_groups=1, norm_topk_prob=True)
        factor = config.number(scale, default) if scale else 1.0
        return {"score": "sigmoid", "correction": True, "scale": factor, **shared(config)}

    return routing


def shared_count(default: int) -> Routing:
    """Read the number of shared experts, each as wide as a routed expert; `default` if it is absent."""
    return lambda config: {"shared_experts": config.integer(SHARED, default, low=0)}


def per_layer_limits(config: Fields, stack: Stack, name: str) -> Callable[[int], Limits]:
    """Read the limits of each layer, applied after silu, from a list with one limit per layer; 0 and null mean no
    limit.

    If the list is longer, it continues with the multi-token prediction layers. Raises FFNError with the field's name.
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
    """Build the layer function for Step-3.5's two lists: limits for routed experts, and limits for the shared expert,
    which also apply to dense layers."""

    def layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
        routed = per_layer_limits(config, stack, "swiglu_limits")
        shared = per_layer_limits(config, stack, "swiglu_limits_shared")
        has_experts = sparse(config, stack)
        return lambda i: {"limits": routed(i), "shared_limits": shared(i)} if has_experts(i) else {"limits": shared(i)}

    return layer


def expert_limits(sparse: LayerRule) -> Callable[[Fields, Stack], Callable[[int], Extra]]:
    """Build the layer function for Ling-3's two lists, for routed and for shared experts. Their meaning for dense
    layers is undocumented, so a limit on a dense layer is refused.

    Sources for the fields, and for applying silu before the limit: sgl-project/sglang#36312, inclusionAI's vLLM
    (jundot/omlx#2571).
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
                        f"layer {i} is dense, but this family's limits apply only to experts",
                    )
            return {}

        return extra

    return layer


def clamped(config: Fields) -> Extra:
    """Return gpt-oss's unit, whatever hidden_act says: (up + 1) · gate · sigmoid(1.702 gate), clamped."""
    runs_only(config, "swiglu_alpha", 1.702, "only 1.702 (quick_gelu) is covered")
    return {"activation": "quick_gelu", "limits": hard_limits(config.number("swiglu_limit", 7.0), 1.0)}


def named_limits(config: Fields, activation: str) -> Limits:
    """Return the limits that a gated unit's name implies; for situ, fields in Kimi-K3's config override them."""
    limits = activations.limits_of(activation) or NO_LIMITS
    if limits.gate_cap is None:
        return limits
    gate = config.number("activation_situ_beta", limits.gate_cap)
    name = "activation_situ_linear_beta"
    open_up = name in config.values and config.get(name, None) is None  # null: up has no cap
    return Limits(gate_cap=gate, up_cap=None if open_up else config.number(name, limits.up_cap or 0.0))
