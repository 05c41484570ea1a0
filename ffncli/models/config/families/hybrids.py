"""Hybrids: stacks whose layers differ in width, or in which some layers have no FFN (Mamba next to attention, ...)."""

from collections.abc import Callable, Mapping, Sequence

from ffncli.errors import FFNError, shown
from ffncli.models.config.family import Extra, Family, MoEFields, Stack, agree, only, residual_multiplier, silu
from ffncli.models.files.strict_json import Fields

_MIXERS_ALONE = "its layers are only sequence mixers: it has no FFN"
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(("mamba", "mamba2", "falcon_mamba"), _MIXERS_ALONE),
    "rwkv": "its channel mix also reads the previous token (a time shift), which no step of a block can express",
    "zamba2": "each use of its shared FFN adds another adapter to the shared weights",
}

_PATTERN = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_FIRST = ["linear_attention", "linear_attention", "hybrid"]  # for Zamba configs that do not name their layers


def _kinds(config: Fields, default: Sequence[str]) -> list[str]:
    """Return the kind of each layer in the config's words. The field has two names, whose values must not differ."""
    kinds, other = config.get("layers_block_type|layer_types", None), config.get("layer_types", None)
    if other is not None and other != kinds:
        raise config.wrong("layer_types", other, f"the same as layers_block_type ({shown(kinds)})")
    if kinds is None:
        return list(default)
    if type(kinds) is not list or not kinds or any(type(kind) is not str for kind in kinds):
        raise config.wrong("layers_block_type|layer_types", kinds, "a list with a name per layer")
    return kinds


def _multipliers(config: Fields) -> Extra:
    """Read Falcon-H1's factors: one for the gate inside the activation, one for the block's output."""
    pair = config.get("mlp_multipliers", [1.0, 1.0])
    if type(pair) is not list or len(pair) != 2 or any(type(v) not in (int, float) for v in pair):
        raise config.wrong("mlp_multipliers", pair, "two numbers")
    return {"gate_scale": pair[0], "residual_scale": pair[1]}


def _granite_experts(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Return whether layers have experts; without them, layers have only the shared MLP (Granite 4.0 H-Micro)."""
    some = config.integer("num_local_experts|num_experts", 8, low=0) > 0
    return lambda i: some


def _jamba_experts(config: Fields, stack: Stack) -> Callable[[int], bool]:
    period = config.integer("expert_layer_period", 2)
    offset = config.integer("expert_layer_offset", 1, low=0)
    several = config.integer("num_experts|num_local_experts", 16) > 1
    return lambda i: several and i % period == offset


def _lfm2(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Compute d_ff by Llama's rule from the config's 4·d: two thirds of it, times a factor, rounded up."""
    width = config.integer("block_ff_dim|intermediate_size")
    if not config.flag("block_auto_adjust_ff_dim", True):
        return lambda i: {"d_ff": width}
    width = int(2 * width / 3)
    factor = "block_ffn_dim_multiplier"
    if not (factor in config.values and config.values[factor] is None):  # null: no factor and no rounding
        multiple = config.integer("block_multiple_of", 256)
        width = -(int(config.number(factor, 1.0) * width) // -multiple) * multiple
    return lambda i: {"d_ff": width}


def _lfm2_experts(config: Fields, stack: Stack) -> Callable[[int], bool]:
    dense = config.integer("num_dense_layers", 2, low=0)
    return lambda i: i >= dense


def _lfm2_routing(config: Fields) -> Extra:
    return {
        "score": "sigmoid", "score_dtype": "input", "correction": config.flag("use_expert_bias", True),
        "renormalise": config.flag("norm_topk_prob", True), "scale": config.number("routed_scaling_factor", 1.0),
        "eps": 1e-6,
    }  # fmt: skip


def _lfm3(config: Fields) -> Extra:
    return {"activation": "silu", "norm_position": "pre+branch" if config.flag("use_sandwich_norm", True) else "pre"}


def nemotron_kinds(config: Fields) -> list[str]:
    """Return the kind of each layer: a mixer, an MLP or a mixture of experts, each with one norm and one residual.
    Lists take precedence over patterns."""
    pattern = config.text("hybrid_override_pattern", "ME*-")
    if not set(pattern) <= set(_PATTERN):
        raise config.wrong("hybrid_override_pattern", pattern, f"made of {' '.join(_PATTERN)}")
    kinds = _kinds(config, [_PATTERN[letter] for letter in pattern])
    agree(config, num_hidden_layers=len(kinds))
    return kinds


def _nemotron_layers(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    kinds = nemotron_kinds(config)
    return lambda i: {} if kinds[i] in ("mlp", "moe") else None


def _nemotron_experts(config: Fields, stack: Stack) -> Callable[[int], bool]:
    kinds = nemotron_kinds(config)
    return lambda i: kinds[i] == "moe"


def _nemotron_routing(config: Fields) -> Extra:
    # The shared expert has one width, whatever n_shared_experts says.
    routing = {
        "score": "sigmoid", "correction": True, "group_best": 2, "groups": config.integer("n_group", 1),
        "top_groups": config.integer("topk_group", 1), "renormalise": config.flag("norm_topk_prob", True),
        "scale": config.number("routed_scaling_factor", 1.0), "shared_experts": 1,
        "shared_d_ff": config.integer("moe_shared_expert_intermediate_size", None),
        "latent": config.integer("moe_latent_size", None),
    }  # fmt: skip
    only(config, "mlp_bias", False, "only its shared expert would have biases")
    config.integer("moe_shared_expert_intermediate_size")  # required
    return routing


def _olmo_layers(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Decide the norm's position: on the branch in layers with full attention (OLMo-2), before the block in layers with
    linear attention."""
    count = config.integer("num_hidden_layers")
    # a model with fewer than four layers has attention in its last layer
    every_fourth = ["full_attention" if i % 4 == 3 or i == count - 1 < 3 else "linear_attention" for i in range(count)]
    kinds = _kinds(config, every_fourth)
    if len(kinds) != count:
        raise config.wrong("layer_types", kinds, f"a name per layer ({count})")
    attends = [kind in ("full_attention", "attention") for kind in kinds]
    return lambda i: {"norm_position": "branch" if attends[i] else "pre"}


def _half(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read RecurrentGemma's intermediate_size, which is the total width of gate and up."""
    both = config.integer("intermediate_size", low=2)
    return lambda i: {"d_ff": both // 2}


def _xlstm(config: Fields) -> Extra:
    multiple = config.integer("ffn_round_up_to_multiple_of", 64)
    width = config.integer("hidden_size") * config.number("ffn_proj_factor", 2.667)
    rounded = int((width + multiple - 1) // multiple * multiple)
    return {"activation": "silu", "d_ff": rounded, "norm_bias": config.flag("use_bias", False)}


def _zamba_runs(config: Fields) -> int:
    """Count the hybrid layers, all of which run the one stored FFN."""
    period, offset = config.integer("attn_layer_period", 6), config.integer("attn_layer_offset", 4, low=0)
    count = config.integer("num_hidden_layers", low=3, high=10_000)
    rest = ["hybrid" if i % period == offset else "linear_attention" for i in range(count - 3)]
    return _kinds(config, _FIRST + rest).count("hybrid")


def _zamba_stored(config: Fields) -> int:
    if not _zamba_runs(config):
        raise FFNError(
            f"{config.where}: layers_block_type has no hybrid layer", "only hybrid layers run the shared FFN"
        )
    return 1


_MLP_BIAS = ("mlp_bias", False)
_LFM_EPS = ("norm_eps", 1e-5)


ROWS: Mapping[str, Family] = {
    "bamba": silu(1e-5, bias=_MLP_BIAS),
    "falcon_h1": silu(1e-5, bias=_MLP_BIAS, adjust=_multipliers),
    "granitemoehybrid": silu(
        d_ff="shared_intermediate_size", adjust=residual_multiplier,
        moe=MoEFields(d_ff="intermediate_size", layers=_granite_experts, routing=lambda config: {
            "order": "choose_first", "shared_experts": 1, "shared_d_ff": config.integer("shared_intermediate_size")}),
    ),
    "jamba": silu(
        moe=MoEFields(
            d_ff="intermediate_size", layers=_jamba_experts, routing=lambda config: {"renormalise": False}
        ),
    ),
    "lfm2": Family(
        d_ff="block_ff_dim|intermediate_size", activation=None, eps=_LFM_EPS, layer=_lfm2,
        adjust=lambda config: {"activation": "silu"},
    ),
    "lfm2_moe": Family(
        activation=None, eps=_LFM_EPS, adjust=lambda config: {"activation": "silu"},
        moe=MoEFields(layers=_lfm2_experts, routing=_lfm2_routing),
    ),
    "lfm3": Family(activation=None, eps=("norm_eps|rms_norm_eps", 1e-5), adjust=_lfm3),
    "nemotron_h": Family(
        gated=False, activation="mlp_hidden_act", default_activation="relu2", bias=_MLP_BIAS,
        eps=("layer_norm_epsilon", 1e-5), stacks=(Stack("decoder", lambda config: len(nemotron_kinds(config))),),
        layer=_nemotron_layers, moe=MoEFields(layers=_nemotron_experts, routing=_nemotron_routing),
    ),
    "olmo_hybrid": silu(layer=_olmo_layers),
    "qwen3_5_text": silu(norm_weight="one_plus"),
    "recurrent_gemma": Family(
        activation="hidden_activation", default_activation="gelu_tanh", bias=True, norm_weight="one_plus", layer=_half
    ),
    "xlstm": Family(
        d_ff=None, activation=None, bias=("use_bias", False),
        eps=("norm_eps", 1e-6), adjust=_xlstm, stacks=(Stack("decoder", "num_hidden_layers|num_blocks"),),
    ),
    # The FFN's output passes through a projection to the mixer's input, so there is no residual around the FFN.
    "zamba": Family(
        default_activation="gelu", eps=("rms_norm_eps", 1e-5), runs=_zamba_runs,
        stacks=(Stack("shared", _zamba_stored),), adjust=lambda config: {"residual": False},
    ),
}  # fmt: skip
