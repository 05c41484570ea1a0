"""Mixtures whose routers do more than score the experts and keep the best (ROWS): they look experts up in a table,
weight shared experts together with routed experts, or choose one expert at a time. Also mixtures whose experts differ
from an FFN (EXPERTS): they work in a narrower space, are surrounded by norms, or share a bias.

Facts: transformers 5.23, `modeling_deepseek_v4.py`, `modeling_inkling.py`, `modeling_phimoe.py`, `modeling_zaya.py`.
"""

from collections.abc import Callable, Mapping

from ffncli.block.activations import Limits, hard_limits
from ffncli.errors import FFNError
from ffncli.models.config.family import (
    Extra,
    Family,
    MoEFields,
    Stack,
    after_prefix,
    agree,
    clamped,
    corrected,
    named,
    only,
    per_layer,
    runs_only,
    silu,
)
from ffncli.models.files.strict_json import Fields

SCORES = ("softmax", "sigmoid", "sqrtsoftplus")
_TABLED = "hash_moe"  # DeepSeek-V4's name for layers whose experts are listed in a table of token ids


def _score(config: Fields, default: str) -> str:
    score: str = config.text("scoring_func", default)
    if score not in SCORES:
        raise config.wrong("scoring_func", score, f"one of {', '.join(SCORES)}")
    return score


def _deepseek_v4(config: Fields) -> Extra:
    agree(config, norm_topk_prob=True, topk_method="noaux_tc")
    only(config, "n_shared_experts", 1, "its code always has one shared expert")
    return {
        "score": _score(config, "sqrtsoftplus"), "correction": True, "eps": 1e-20, "shared_experts": 1,
        "scale": config.number("routed_scaling_factor", 1.5), "score_dtype": "input",
    }  # fmt: skip


def _deepseek_v4_block(config: Fields) -> Extra:
    only(config, "mlp_bias", False, "its experts have no biases, but its shared expert would")
    limits = hard_limits(config.number("swiglu_limit", 10.0))
    return {"limits": limits, "residual": False}  # four residual streams; the block ends before they are mixed


def tabled_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Find the layers of DeepSeek-V4 that choose experts by token id: those in `mlp_layer_types`, else the first few
    layers."""
    if config.get("mlp_layer_types", None) is None:
        first = config.integer("num_hash_layers", 3, low=0)
        return lambda i: i < first
    config.pass_over("num_hash_layers")
    kinds = per_layer(config, stack, "mlp_layer_types", (_TABLED, "moe"))
    return lambda i: kinds[i] == _TABLED


def _by_token(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    tabled, vocab = tabled_layers(config, stack), config.integer("vocab_size", 129_280)
    return lambda i: {"moe.lookup": vocab, "moe.correction": False} if tabled(i) else {}


def _inkling_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    dense = config.integer("dense_mlp_idx", 0, low=0)
    return lambda i: i >= dense


def _inkling_width(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read the experts' width, which is `intermediate_size` whenever the config has `dense_intermediate_size`."""
    if config.get("dense_intermediate_size", None) is None:
        return lambda i: {}
    config.pass_over("moe_intermediate_size")
    sparse, width = named(_inkling_layers)(config, stack), config.integer("intermediate_size")
    return lambda i: {"d_ff": width} if sparse(i) else {}


def _inkling(config: Fields) -> Extra:
    runs_only(config, "shared_expert_sink", True, "its code always weighs shared and routed experts together")
    shared = config.integer("n_shared_experts", 2, low=1)
    return {
        "score": "sigmoid", "correction": True, "scale": config.number("route_scale", 8.0), "shared_experts": shared,
        "shared_routed": True,
    }  # fmt: skip


def _inkling_block(config: Fields) -> Extra:
    config.pass_over("dense_mlp_idx")  # mlp_layer_types decides if it is present
    return {"learned_scale": True, "residual": False}  # the residual is added after a convolution over tokens


def _inkling2(config: Fields) -> Extra:
    return {
        "score": _score(config, "sigmoid"), "correction": True, "eps": 1e-20,
        "scale": config.number("route_scale|routed_scaling_factor", 8.0),
    }  # fmt: skip


def _inkling2_block(config: Fields) -> Extra:
    gate, up = config.number("mlp_gate_softcap", 4.0), config.number("mlp_up_softcap", 25.0)
    # the residual is added after a convolution over the tokens, and blocks of layers attend to each other
    return {"activation": "silu", "limits": Limits(gate_cap=gate, up_cap=up), "residual": False}


def _phimoe(config: Fields) -> Extra:
    runs_only(config, "num_experts_per_tok", 2, "its router always chooses two experts")
    config.pass_over("input_jitter_noise")  # noise in training
    threshold = 2 * config.number("router_jitter_noise", 0.01)
    return {"order": "one_by_one", "renormalise": False, "score_dtype": "input", "threshold": threshold}


def _zaya(config: Fields) -> Extra:
    runs_only(config, "num_experts_per_tok", 1, "its code chooses one expert per token")
    return {
        "correction": True, "renormalise": False, "score_dtype": "input", "skip_experts": 1,
        "router_width": config.integer("router_hidden_size", 256),
    }  # fmt: skip


ROWS: Mapping[str, Family] = {
    "deepseek_v4": silu(adjust=_deepseek_v4_block, layer=_by_token, moe=MoEFields(routing=_deepseek_v4)),
    "inkling_text": silu(
        d_ff="dense_intermediate_size|intermediate_size", adjust=_inkling_block,
        layer=_inkling_width, aliases=("inkling_mm_model",),
        moe=MoEFields(layers=named(_inkling_layers), routing=_inkling),
    ),
    "inkling2_text": Family(
        activation=None, adjust=_inkling2_block, aliases=("inkling2",), moe=MoEFields(routing=_inkling2)
    ),
    "phimoe": silu(1e-5, norm="layernorm", moe=MoEFields(d_ff="intermediate_size", routing=_phimoe)),
    # Every router except the first receives the state of the previous router. Learned scales and biases are applied
    # before the residual, so the block ends before them.
    "zaya": silu(
        1e-5, layer=lambda config, stack: lambda i: {"moe.router_carries": i > 0},
        adjust=lambda config: {"residual": False}, moe=MoEFields(routing=_zaya),
    ),
}  # fmt: skip


def _kimi(config: Fields) -> Extra:
    """Read Kimi-Linear's routing; in Kimi-K3, the sum over experts is normalised before it is widened."""
    latent = config.integer("routed_expert_hidden_size", None)
    normed = config.flag("latent_moe_use_norm", False)
    if normed and latent is None:
        raise FFNError(f"{config.where}: latent_moe_use_norm = true without routed_expert_hidden_size")
    return {**corrected(2.446)(config), "latent": latent, "mixed_norm": normed}


def _kimi_block(config: Fields) -> Extra:
    """End Kimi-K3's block before its residual, which mixes it with earlier layers' outputs by learned weights."""
    return {} if config.get("routed_expert_hidden_size", None) is None else {"residual": False}


def _spark(config: Fields) -> Extra:
    return {
        "score": "sigmoid", "correction": True, "eps": 1e-15, "latent": config.integer("moe_hidden_size", 4096),
        "scale": config.number("routed_scaling_factor", 1.0), "latent_norm": True, "expert_norm": True,
        "router_scale": config.number("output_multiplier", 0.1767766952966369),
    }  # fmt: skip


def _spark_norms(config: Fields) -> Extra:
    """End the block before the residual, which is a mix with learned weights that sum to one."""
    return {"residual": False, "post_norm_weigh": "input", **_glimmer(config)}


def _glimmer(config: Fields) -> Extra:
    return {"post_norm_eps": config.number("post_norm_eps", 1e-8)}


_AXK2_LAYERS = named(after_prefix(1))


def _gated_norms(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Add the low-rank gate that multiplies the norm before the FFN in layers with experts."""
    rank, has_experts = config.integer("gated_norm_rank", 16), _AXK2_LAYERS(config, stack)
    return lambda i: {"norm_gate": rank} if has_experts(i) else {}


EXPERTS: Mapping[str, Family] = {
    "axk2": silu(
        layer=_gated_norms,
        moe=MoEFields(layers=_AXK2_LAYERS, routing=lambda config: {**corrected(2.5)(config), "zero_outside": True}),
    ),
    "kimi_linear": silu(1e-5, moe=MoEFields(layers=named(after_prefix(1)), routing=_kimi), adjust=_kimi_block),
    "muse_spark_text": silu(
        1e-5, position="pre+branch", norm_weight="one_plus", adjust=_spark_norms,
        moe=MoEFields(layers=named(after_prefix(0)), routing=_spark),
    ),
    "muse_glimmer_text": silu(
        1e-5, activation="hidden_activation", position="pre+branch", norm_weight="one_plus", adjust=_glimmer,
    ),
    # Weights are divided by top_k, and the sum is multiplied by top_k again.
    "openai_privacy_filter": Family(
        activation=None, bias=True, eps=("rms_norm_eps", 1e-5), adjust=clamped,
        moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {"order": "choose_first", "router_bias": True}),
    ),
    "jetmoe": Family(
        activation="activation_function", default_activation="silu", eps=(None, 1e-6),
        moe=MoEFields(d_ff="intermediate_size", routing=lambda config: {"order": "choose_first", "mixed_bias": True}),
    ),
}  # fmt: skip
