"""Mixtures of experts: the layers that have experts, the routing of tokens, and what runs besides the experts."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ffncli.block.activations import NO_LIMITS, hard_limits
from ffncli.models.config.family import (
    TOP_K,
    Extra,
    Family,
    MoEFields,
    Routing,
    Stack,
    after_choice,
    after_prefix,
    agree,
    clamped,
    corrected,
    expert_limits,
    fixed_prefix,
    named,
    only,
    requires,
    residual_multiplier,
    runs_only,
    shared_count,
    shared_width,
    silu,
    softmax,
    sparse_step,
    swiglu_limits,
    ungrouped,
    where_dense,
)
from ffncli.models.files.strict_json import REQUIRED, Fields


def _ernie_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    start = config.integer("moe_layer_start_index", 1, low=0)
    end = config.integer("moe_layer_end_index", -1, low=-1)
    step = config.integer("moe_layer_interval", 1)
    return lambda i: (i + 1) % step == 0 and i >= start and (end == -1 or i <= end)


def _ernie(config: Fields) -> Extra:
    if not 0 <= config.number("moe_norm_min", 1e-12) <= 1e-6:
        runs_only(config, "moe_norm_min", 1e-12, "its minimum for the sum of scores is large enough to change results")
    return {"correction": True, **shared_count(2)(config)}


def _ernie_width(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read the experts' width; the config lists two widths, for text tokens and for image tokens."""
    widths = config.integers("moe_intermediate_size") if config.get("moe_intermediate_size", None) else (1536, 512)
    sparse = named(_ernie_layers)(config, stack)
    return lambda i: {"d_ff": widths[0]} if sparse(i) else {}


def _llama4_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    step = config.integer("interleave_moe_layer_step", 1)
    listed = None if config.get("moe_layers", None) is None else frozenset(config.integers("moe_layers"))
    return lambda i: (i + 1) % step == 0 if listed is None else i in listed


def _deepseek_v2(config: Fields) -> Extra:
    if (config.get("topk_method", None), config.get("scoring_func", None)) == ("noaux_tc", "sigmoid"):
        # DeepSeek-VL2's code, which routes as DeepSeek-V3 does
        return corrected(shared=2, renormalise=False)(config)
    agree(config, scoring_func="softmax")
    grouped_choice = config.text("topk_method", "greedy") == "group_limited_greedy"
    if not grouped_choice:
        only(config, "topk_method", "greedy", "only greedy and group_limited_greedy are covered")
    groups = {"groups": config.integer("n_group"), "top_groups": config.integer("topk_group")} if grouped_choice else {}
    why = "the implementations of deepseek_v2 disagree about it, and no published checkpoint uses it"
    runs_only(config, "norm_topk_prob", False, why)
    scale = config.number("routed_scaling_factor", 1.0)
    return {"scale": scale, "renormalise": False, **shared_count(2)(config), **groups}


def _dots3(config: Fields) -> Extra:
    width = config.integer("moe_shared_expert_intermediate_size|shared_experts_intermediate_size", 1536)
    routing = corrected()(config)
    return {**routing, "shared_d_ff": width * routing["shared_experts"]} if routing["shared_experts"] else routing


def _cohere2(config: Fields) -> Extra:
    sigmoid = config.text("expert_selection_fn", "softmax") == "sigmoid"
    if not sigmoid:
        runs_only(config, "expert_selection_fn", "softmax", "only softmax and sigmoid are covered")
    if config.text("shared_expert_combination_strategy", "average") == "average":
        # (experts + shared) / 2 equals experts / 2 + shared / 2 to the last bit
        half = {"scale": 0.5, "shared_scale": 0.5}
    else:
        runs_only(config, "shared_expert_combination_strategy", "sum", "only sum and average are covered")
        half = {}
    shared = config.integer("num_shared_experts", 0, low=0)
    # a sigmoid preserves the order of the logits, so it may also be applied before the choice
    how = {"score": "sigmoid", "renormalise": config.flag("norm_topk_prob", True)} if sigmoid else {}
    return {"order": "score_first" if sigmoid else "choose_first", "shared_experts": shared} | how | (
        half if shared else {}
    )  # fmt: skip


def _dbrx(config: Fields) -> Extra:
    ffn = config.inside("ffn_config")
    null = "moe_normalize_expert_weights" in ffn.values and ffn.values["moe_normalize_expert_weights"] is None
    if not null and ffn.number("moe_normalize_expert_weights", 1.0) != 1:
        runs_only(ffn, "moe_normalize_expert_weights", 1.0, "only the 1-norm and null (none) are covered")
    return {"renormalise": not null, "score_dtype": "input"}


def _hunyuan(config: Fields) -> Extra:
    shared = _alike(config, "num_shared_expert", 1) if config.flag("use_mixed_mlp_moe", True) else 0
    return {"top_k": _alike(config, TOP_K), "shared_experts": shared}


def _alike(config: Fields, name: str, default: Any = REQUIRED) -> int:
    """Read a number that may be given for every layer; it is equal for all layers in every published model."""
    value = config.get(name, default)
    if type(value) is not list:
        return int(config.integer(name, default))
    if not value or any(type(one) is not int or one != value[0] or one < 1 for one in value):
        raise config.wrong(name, value, "one number for all layers")
    return int(value[0])


def _kolibri(config: Fields) -> Extra:
    runs_only(config, "norm_topk_prob", False, "only unnormalised sigmoid weights are covered")
    # the correction is added to the logits, and the sigmoid is applied to the chosen logits
    return {
        "score": "sigmoid", "order": "choose_first", "correction": True, "renormalise": False, **shared_width(config)
    }  # fmt: skip


def _laguna(config: Fields) -> Extra:
    runs_only(config, "moe_apply_router_weight_on_input", False, "transformers does not support it either")
    if config.number("moe_router_logit_softcapping", 0.0) > 0:
        runs_only(config, "moe_router_logit_softcapping", 0.0, "a soft cap on router logits is not a block op")
    return ungrouped("moe_routed_scaling_factor", shared=shared_width)(config)


def _mistral4(renormalise: bool | None, score_dtype: str = "fp32") -> Routing:
    """Build DeepSeek-V3's choice among groups, with softmax instead of sigmoid scores, and without a correction."""

    def routing(config: Fields) -> Extra:
        agree(config, scoring_func="softmax")
        made = corrected(renormalise=renormalise)(config)
        return {**made, "score": "softmax", "correction": False, "score_dtype": score_dtype}

    return routing


def _longcat(config: Fields) -> Extra:
    only(config, "router_bias", False, "transformers stores that bias and does not add it")
    agree(config, norm_topk_prob=False)
    null = "zero_expert_num" in config.values and config.values["zero_expert_num"] is None
    return {
        "renormalise": False, "correction": True, "scale": config.number("routed_scaling_factor", 6.0),
        "identity_experts": 0 if null else config.integer("zero_expert_num", 256, low=0),
    }  # fmt: skip


def _step_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Read the layers with experts from `moe_layers_enum`, which may also be a single string: "3,4,5"."""
    listed = config.get("moe_layers_enum", None)
    if listed is None:
        first = config.integer("first_k_dense_replace", 3, low=0)
        return lambda i: i >= first
    parts = listed.split(",") if type(listed) is str else listed
    if type(parts) is not list or not all(str(part).strip().isdecimal() for part in parts):
        raise config.wrong("moe_layers_enum", listed, "layer numbers: a list, or a string with commas")
    layers = frozenset(int(part) for part in parts)
    return lambda i: i in layers


def _step_routing(config: Fields) -> Extra:
    agree(config, moe_router_activation="sigmoid", use_moe_router_bias=True, norm_expert_weight=True)
    agree(config, need_fp32_gate=True, use_moe=True, n_shared_experts=1)
    shared = partial(shared_width, name="share_expert_dim|share_expert_dims", default=1280)
    return ungrouped("moe_router_scaling_factor", 1.0, shared)(config)


# --- other fixed choices ----------------------------------------------------------------------------------------------


def _unbiased(name: str) -> Routing:
    """Build a check for code in which the flag adds biases to dense and shared MLPs, but not to experts."""
    return requires(name, False, "its experts have no biases, but its other MLPs would")


def _aria(config: Fields) -> Extra:
    runs_only(config, "hidden_act", "silu", "its experts always run silu")
    return _unbiased("mlp_bias")(config)


def _cohere2_norm(config: Fields) -> Extra:
    rms = config.get("rms_norm_eps", None) is not None
    eps = config.number("rms_norm_eps", 0.0) if rms else config.number("layer_norm_eps", 1e-5)
    kind = "rmsnorm" if rms else "layernorm"
    return {"norm": kind, "norm_eps": eps, "norm_bias": False, "parallel": True, "shared_norm": True}


def _limited(config: Fields) -> Extra:
    runs_only(config, "hidden_act", "silu", "its experts always run silu")
    limits = hard_limits(config.number("swiglu_limit", 10.0))
    return {"limits": limits, "residual": False}  # the output is added by a hyper-connection


def _step(config: Fields) -> Extra:
    return {**_unbiased("mlp_bias")(config), "activation": "silu"}  # whatever hidden_act says


_PREFIX_1 = named(after_prefix(1))


ROWS: Mapping[str, Family] = {
    # softmax over all experts
    "mixtral": silu(1e-5, moe=MoEFields(d_ff="intermediate_size")),
    # The residual takes the norm's output (times mlp_alpha_factor), so the block ends before the sum.
    "minimax": silu(1e-5, moe=MoEFields(d_ff="intermediate_size"), adjust=lambda config: {"residual": False}),
    "olmoe": silu(1e-5, moe=MoEFields(d_ff="intermediate_size", routing=softmax(False))),
    "flex_olmo": silu(position="branch", moe=MoEFields(d_ff="intermediate_size", routing=softmax(False))),
    "qwen2_moe": silu(moe=MoEFields(layers=sparse_step, routing=softmax(False, shared=True, gate=True))),
    "qwen3_moe": silu(moe=MoEFields(layers=sparse_step, routing=softmax(False))),
    "qwen3_next": silu(
        norm_weight="one_plus", moe=MoEFields(layers=sparse_step, routing=softmax(True, shared=True, gate=True))
    ),
    "qwen3_5_moe_text": silu(
        norm_weight="one_plus", moe=MoEFields(routing=softmax(None, shared=True, gate=True)), aliases=("qwen3_5_moe",)
    ),
    # Hyper-connections mix, normalise and add its streams; the block is the part between them.
    "qwen4_exp_text": silu(
        norm="none", moe=MoEFields(routing=softmax(True, shared=True, gate=True)), aliases=("qwen4_exp",),
        adjust=lambda config: {"residual": False},
    ),
    "qwen3_vl_moe_text": silu(moe=MoEFields(layers=sparse_step, routing=softmax(None))),
    "qwen3_omni_moe_text": silu(moe=MoEFields(layers=sparse_step, routing=softmax(True))),
    "mistral4": silu(moe=MoEFields(layers=after_prefix(0), routing=_mistral4(True, "input"))),
    "mistral_large4_text": silu(1e-5, moe=MoEFields(layers=_PREFIX_1, routing=_mistral4(None))),
    "mellum": silu(moe=MoEFields(layers=fixed_prefix(0), routing=softmax(True))),
    "hunyuan_v1_moe": silu(1e-5, aliases=("hunyuan",), moe=MoEFields(d_ff="intermediate_size", routing=_hunyuan)),
    "dbrx": Family(
        d_model="d_model|hidden_size", activation="ffn_config.ffn_act_fn.name", default_activation="silu",
        norm="layernorm", eps=(None, 1e-5), adjust=lambda config: {"norm_bias": False},
        moe=MoEFields("ffn_config.moe_num_experts", "ffn_config.ffn_hidden_size", "ffn_config.moe_top_k",
                      routing=_dbrx),
    ),
    "ernie4_5_moe": silu(1e-5, adjust=_unbiased("use_bias"), moe=MoEFields(layers=_ernie_layers, routing=_ernie)),
    "ernie4_5_vl_moe_text": silu(
        1e-5, adjust=_unbiased("use_bias"), layer=_ernie_width,
        moe=MoEFields(
            layers=named(_ernie_layers), routing=_ernie
        ),
    ),
    "deepseek_v2": silu(adjust=_unbiased("mlp_bias"), moe=MoEFields(layers=after_prefix(0), routing=_deepseek_v2)),
    **{
        name: silu(
            adjust=_unbiased("mlp_bias"), moe=MoEFields(layers=named(after_prefix(dense)), routing=_deepseek_v2)
        )
        for name, dense in (("deepseek_ocr2_text", 0), ("unlimited_ocr_text", 1))
    },
    # Each layer has two attentions, each with a dense MLP. The experts read the input of the first MLP, and their
    # output is added after the second MLP.
    "longcat_flash": silu(
        1e-5, d_ff="ffn_hidden_size|intermediate_size",
        stacks=(Stack("decoder", "num_layers", kind="dense", times=2), Stack("experts", "num_layers", kind="moe")),
        layer=lambda config, stack: lambda i: {} if stack.kind == "dense" else {"shared_norm": True, "residual": False},
        moe=MoEFields("n_routed_experts|num_local_experts", "expert_ffn_hidden_size|moe_intermediate_size",
                      layers=lambda config, stack: lambda i: stack.kind == "moe", routing=_longcat),
    ),
    # softmax over the chosen experts
    "gpt_oss": Family(
        activation=None, bias=True, eps=("rms_norm_eps", 1e-5), adjust=clamped,
        moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {
            "order": "choose_first", "router_bias": True, "score_dtype": "input"}),
    ),
    "aria_text": silu(
        adjust=_aria, aliases=("aria",), moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {
            "order": "choose_first", "score_dtype": "input", **shared_count(2)(config)}),
    ),
    "cohere2_moe": silu(
        d_ff="prefix_dense_intermediate_size|intermediate_size", adjust=_cohere2_norm,
        moe=MoEFields(d_ff="intermediate_size", layers=named(after_prefix(0)), routing=_cohere2),
    ),
    **dict.fromkeys(("granitemoe", "granitemoeshared", "granitemoe_swa"), silu(
        adjust=residual_multiplier,
        moe=MoEFields(d_ff="intermediate_size", routing=after_choice),
    )),
    # sigmoid scores
    "flint": silu(moe=MoEFields(layers=partial(sparse_step, dense_layers=(0, 1)), routing=lambda config: {
        "score": "sigmoid", "renormalise": config.flag("norm_topk_prob", True), **shared_width(config)})),
    "llama4_text": silu(
        1e-5, d_ff="intermediate_size_mlp", aliases=("llama4",),
        moe=MoEFields(d_ff="intermediate_size", layers=_llama4_layers, routing=lambda config: {
            "score": "sigmoid", "renormalise": False, "weigh": "input", "shared_experts": 1}),
    ),
    "kolibri1": silu(position="pre+branch", moe=MoEFields(routing=_kolibri)),
    # sigmoid scores with a correction that affects only the choice: DeepSeek-V3 and its relatives
    "deepseek_v3": silu(
        moe=MoEFields(layers=after_prefix(3), routing=corrected(2.5, (8, 4))),
        aliases=("kimi_k2",),  # remote code; described by its published config
    ),
    "deepseek_v32": silu(moe=MoEFields(layers=named(after_prefix(3)), routing=corrected(2.5, (8, 4)))),
    # The norm on the branch is part of the experts' module: it normalises what leaves it, and dense layers have none.
    "axk1": silu(
        layer=where_dense(_PREFIX_1, {"norm_position": "pre+branch", "post_norm_inside": True}, {}),
        moe=MoEFields(layers=_PREFIX_1, routing=corrected(2.5, (8, 4))),
    ),
    "bailing_hybrid": silu(
        layer=expert_limits(named(after_prefix(2))),
        moe=MoEFields(layers=named(after_prefix(2)), routing=corrected(2.5, (8, 4))),
    ),
    "beam": silu(  # its residual is weighted by depth on both sides; the block ends before the sum
        position="pre+branch", adjust=lambda config: {"residual": False},
        moe=MoEFields(layers=fixed_prefix(3), routing=corrected(2.5, (8, 4), None)),
    ),
    "dots1": silu(moe=MoEFields(layers=after_prefix(0), routing=corrected(shared=REQUIRED, renormalise=False))),
    "dots3_note_text": silu(1e-5, aliases=("dots3_note",), moe=MoEFields(layers=_PREFIX_1, routing=_dots3)),
    "exaone_moe": silu(1e-5, moe=MoEFields(layers=_PREFIX_1, routing=corrected(2.5))),
    "glm4_moe": silu(1e-5, moe=MoEFields(layers=after_prefix(1), routing=corrected()), aliases=("glm4v_moe_text",)),
    "glm4_moe_lite": silu(1e-5, moe=MoEFields(layers=fixed_prefix(1), routing=corrected(1.8))),
    "glm_moe_dsa": silu(1e-5, moe=MoEFields(layers=named(after_prefix(3)), routing=corrected(2.5))),
    "mimo_v2_flash": silu(1e-5, moe=MoEFields(layers=fixed_prefix(1), routing=corrected(shared=None))),
    "solar_open": silu(1e-5, moe=MoEFields(routing=corrected())),
    "glm5_next_text": silu(1e-5, adjust=_limited, moe=MoEFields(layers=fixed_prefix(3), routing=corrected(2.5))),
    "hy_v4": silu(
        1e-5, adjust=_limited,
        layer=where_dense(fixed_prefix(1), {"shared_limits": NO_LIMITS}, {"limits": NO_LIMITS}),
        moe=MoEFields(layers=fixed_prefix(1), routing=corrected(2.827)),
    ),
    "afmoe": silu(
        1e-5, position="pre+branch",
        moe=MoEFields(
            layers=after_prefix(1, "num_dense_layers"), routing=ungrouped("route_scale", 1.0, shared_count(2))
        ),
    ),
    "hy_v3": silu(
        1e-5, adjust=_unbiased("mlp_bias"),
        moe=MoEFields(layers=fixed_prefix(1), routing=ungrouped("router_scaling_factor", 2.826, shared_count(1))),
    ),
    "step3p5": silu(
        1e-5, norm_weight="one_plus", adjust=_step, layer=swiglu_limits(named(_step_layers)),
        moe=MoEFields("n_routed_experts|moe_num_experts|num_local_experts|num_experts", layers=named(_step_layers),
                      routing=_step_routing),
    ),
    "laguna": silu(moe=MoEFields(layers=fixed_prefix(1), routing=_laguna)),
    "minimax_m2": silu(moe=MoEFields(d_ff="intermediate_size", routing=ungrouped())),
    "minimax_m3_vl_text": Family(
        activation=None, d_ff="dense_intermediate_size", norm_weight="one_plus", adjust=clamped,
        aliases=("minimax_m3_vl",),
        moe=MoEFields(d_ff="moe_intermediate_size|intermediate_size", layers=named(after_prefix(0)), routing=ungrouped(
            "routed_scaling_factor", 2.0, lambda config: shared_width(config, "shared_intermediate_size"))),
    ),
}  # fmt: skip
