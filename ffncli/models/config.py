"""config.json → Model. One row of FAMILIES per model family says which fields hold what, and what the code fixes.

Gatedness and most biases stand in no config field: the family's row says them (they follow from `model_type`), and
tensor names, where there are any, overrule it (`layout.inspect`). Facts: transformers 5.23
`configuration_*.py` and `modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ffncli.block import activations, dtypes
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError, did_you_mean, shown
from ffncli.models.family import Extra, Family, MoEFields, Stack
from ffncli.models.fields import REQUIRED, Fields
from ffncli.models.model import Group, Model, grouped
from ffncli.models.strict_json import read_object, shown_path

MOST_CONFIG_BYTES = 10_000_000  # real ones stay below 100 kB
MOST_LAYERS = 10_000  # the deepest known model has 126


# --- what is no plain field -------------------------------------------------------------------------------------------


def _opt(config: Fields) -> Extra:
    affine = config.flag("layer_norm_elementwise_affine", True)
    return {
        "norm_position": "pre" if config.flag("do_layer_norm_before", True) else "post",
        "norm_weight": "plain" if affine else "none",
        "norm_bias": affine,
    }


def _t5(config: Fields) -> Extra:
    newer = config.values.get("model_type") in ("mt5", "umt5")
    form = config.text("feed_forward_proj", "gated-gelu" if newer else "relu")
    gated, name = form.startswith("gated-"), form.removeprefix("gated-")
    # T5 v1.1 means the tanh approximation when it says gated-gelu (transformers' T5Config turns it into gelu_new).
    return {"gated": gated, "activation": "gelu_tanh" if form == "gated-gelu" else name, "bias": False}


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


def _gpt_oss(config: Fields) -> Extra:
    alpha = config.number("swiglu_alpha", 1.702)
    if alpha != 1.702:
        raise FFNError(f"{config.where}: swiglu_alpha = {alpha:g} is not covered", "only 1.702 (quick_gelu) is")
    # hidden_act says silu; the code runs (up + 1) · gate · sigmoid(1.702 gate), clamped.
    return {"activation": "quick_gelu", "clamp": config.number("swiglu_limit", 7.0), "up_plus": 1.0}


def _sparse(config: Fields) -> Callable[[int], bool]:
    step: int = config.integer("decoder_sparse_step", 1)
    dense = frozenset(config.integers("mlp_only_layers"))
    return lambda i: i not in dense and (i + 1) % step == 0


def _after_prefix(default: int) -> Callable[[Fields], Callable[[int], bool]]:
    """DeepSeek's rule: the first layers are dense (`default` of them where the config does not say)."""

    def rule(config: Fields) -> Callable[[int], bool]:
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


def _deepseek_v3(config: Fields) -> Extra:
    return _deepseek(config, 2.5, 1) | {
        "score": "sigmoid", "correction": True, "group_best": 2, "renormalise": config.flag("norm_topk_prob", True),
        "groups": config.integer("n_group", 8), "top_groups": config.integer("topk_group", 4),
    }  # fmt: skip


# --- the families -----------------------------------------------------------------------------------------------------

_LN = ("layer_norm_epsilon|layer_norm_eps|layernorm_epsilon", 1e-5)
_ENCODER = (Stack("encoder"),)
_PAIR = (Stack("encoder", "num_layers"), Stack("decoder", "num_decoder_layers|num_layers"))
_WHISPER = (
    Stack("encoder", "encoder_layers", "encoder_ffn_dim"),
    Stack("decoder", "decoder_layers", "decoder_ffn_dim"),
)

_GEMMA = Family(
    activation="hidden_activation", default_activation="gelu_tanh", position="pre+branch", norm_weight="one_plus"
)

FAMILIES: Mapping[str, Family] = {
    "gpt2": Family(
        gated=False, d_model="n_embd|hidden_size", d_ff="n_inner", multiple=4, activation="activation_function",
        default_activation="gelu_new", bias=True, norm="layernorm", eps=_LN,
    ),
    "bert": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", position="post", stacks=_ENCODER,
        eps=("layer_norm_eps", 1e-12), aliases=("roberta", "xlm-roberta", "electra", "camembert"),
    ),
    "vit": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", eps=("layer_norm_eps", 1e-12),
        stacks=_ENCODER,
    ),
    "t5": Family(
        gated=None, d_model="d_model", d_ff="d_ff", activation="feed_forward_proj", default_activation="relu",
        eps=("layer_norm_epsilon", 1e-6), stacks=_PAIR, adjust=_t5, aliases=("mt5", "umt5"),
    ),
    "whisper": Family(
        gated=False, d_model="d_model", d_ff=None, activation="activation_function", default_activation="gelu",
        bias=True, norm="layernorm", eps=(None, 1e-5), stacks=_WHISPER,
    ),
    "opt": Family(
        gated=False, d_ff="ffn_dim", activation="activation_function", default_activation="relu",
        bias=("enable_bias", True), norm="layernorm", eps=(None, 1e-5), adjust=_opt,
    ),
    "bloom": Family(
        gated=False, d_model="n_embed|n_embd|hidden_size", d_ff=None, multiple=4, activation=None, bias=True,
        norm="layernorm", eps=_LN, adjust=_bloom, stacks=(Stack("decoder", "n_layer|num_hidden_layers"),),
    ),
    "gpt_neox": Family(
        gated=False, default_activation="gelu", bias=True, norm="layernorm", eps=_LN, adjust=_gpt_neox
    ),
    "falcon": Family(
        gated=False, d_ff="ffn_hidden_size", multiple=4, activation="activation", default_activation="gelu",
        bias=("bias", False), norm="layernorm", eps=_LN, adjust=_falcon,
    ),
    "phi": Family(
        gated=False, default_activation="gelu_new", bias=True, norm="layernorm", eps=_LN,
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
    "mixtral": Family(
        default_activation="silu", eps=("rms_norm_eps", 1e-5), moe=MoEFields("num_local_experts", "intermediate_size")
    ),
    "qwen2_moe": Family(
        default_activation="silu",
        moe=MoEFields("num_experts|num_local_experts", "moe_intermediate_size", layers=_sparse, routing=_qwen2_moe),
    ),
    "qwen3_moe": Family(
        default_activation="silu",
        moe=MoEFields(
            "num_experts|num_local_experts", "moe_intermediate_size", layers=_sparse,
            routing=lambda config: {"renormalise": config.flag("norm_topk_prob", False)},
        ),
    ),
    "deepseek_v2": Family(
        default_activation="silu", bias=("mlp_bias", False),
        moe=MoEFields("n_routed_experts|num_local_experts", "moe_intermediate_size", layers=_after_prefix(0),
                      routing=_deepseek_v2),
    ),
    "deepseek_v3": Family(
        default_activation="silu",
        moe=MoEFields("n_routed_experts|num_local_experts", "moe_intermediate_size", layers=_after_prefix(3),
                      routing=_deepseek_v3),
    ),
    "gpt_oss": Family(
        activation=None, bias=True, eps=("rms_norm_eps", 1e-5), adjust=_gpt_oss,
        moe=MoEFields("num_local_experts|num_experts", "intermediate_size", routing=lambda config: {
            "order": "choose_first", "router_bias": True, "score_dtype": "input"}),
    ),
}  # fmt: skip

_BY_TYPE = {alias: name for name, row in FAMILIES.items() for alias in (name, *row.aliases)}


def read_config(path: Path, source: str) -> Model:
    """The Model in a config.json. Raises FFNError naming the file, the field and the value."""
    return from_config(read_object(path, MOST_CONFIG_BYTES), source, shown_path(path))


def from_config(values: Mapping[str, Any], source: str, where: str, name: str | None = None) -> Model:
    """The Model that a config's values describe; a multimodal config's text tower (`text_config`) is meant."""
    config, evidence = _text_tower(Fields(values, where))
    if config.values.get("model_type") is None:
        raise FFNError(
            f"{config.where}: model_type {'is null' if 'model_type' in config.values else 'is missing'}",
            "it says which family's fields these are: llama, gpt2, ...",
        )
    model_type = config.text("model_type")
    family_name = _BY_TYPE.get(model_type)
    if family_name is None:
        hint = did_you_mean(model_type, list(_BY_TYPE), "known: " + ", ".join(FAMILIES))
        raise FFNError(f"{config.where}: model_type {shown(model_type)} is not known", hint)
    family = FAMILIES[family_name]
    groups = [g for stack in family.stacks for g in _stack(config, family, stack)]
    spec = groups[0].spec
    evidence.append(f"{'gated' if spec.gated else 'plain'}: model_type {model_type}")
    dtype = dtypes.find(config.get("dtype|torch_dtype", None))
    title = name or _short_name(source)
    return Model(
        title, source, tuple(groups), model_type=family_name, dtype=dtype.name if dtype else None,
        evidence=(*evidence, *_width_evidence(config, family, groups)),
    )  # fmt: skip


def _text_tower(config: Fields) -> tuple[Fields, list[str]]:
    """The config itself, or its `text_config` where that holds the numbers."""
    inner = config.values.get("text_config")
    if inner is None:
        return config, []
    if not isinstance(inner, dict):
        raise config.wrong("text_config", inner, "an object")
    outer = {name: config.values[name] for name in ("model_type", "dtype", "torch_dtype") if config.values.get(name)}
    values = {**outer, **inner}
    return Fields(values, f"{config.where}: text_config"), ["widths: text_config of the multimodal config"]


def _stack(config: Fields, family: Family, stack: Stack) -> list[Group]:
    count = config.integer(stack.layers, high=MOST_LAYERS)
    if family.moe is None:
        return [Group(stack.name, tuple(range(count)), _dense(config, family, stack.d_ff))]
    has_experts = family.moe.layers(config)
    kinds = [has_experts(i) for i in range(count)]
    specs = {kind: (_experts(config, family) if kind else _dense(config, family, stack.d_ff)) for kind in set(kinds)}
    return grouped(stack.name, [specs[kind] for kind in kinds])


def _common(config: Fields, family: Family) -> dict[str, Any]:
    """The keyword arguments of FFNSpec that dense and MoE layers share."""
    eps, default = family.eps
    known: dict[str, Any] = {
        "d_model": config.integer(family.d_model),
        "gated": family.gated,
        "norm": family.norm,
        "norm_position": family.position,
        "norm_weight": family.norm_weight,
        "norm_eps": config.number(eps, default) if eps else default,
        "residual": True,
    }
    if family.activation:
        known["activation"] = config.text(family.activation, family.default_activation)
    known["bias"] = family.bias if isinstance(family.bias, bool) else config.flag(*family.bias)
    known |= family.adjust(config)
    label = config.name(family.activation or "activation")
    said = known["activation"]
    known["activation"], implied = activations.resolve(said, f"{config.where}: {label}")
    if implied and not known["gated"]:
        raise FFNError(f"{config.where}: {label} {shown(said)} is a gated unit", "this family's blocks have no gate")
    return known


def _dense(config: Fields, family: Family, d_ff: str | None) -> FFNSpec:
    known = _common(config, family)
    default = REQUIRED if family.multiple is None else family.multiple * known["d_model"]
    name = d_ff or family.d_ff
    return _spec(config, d_ff=config.integer(name, default) if name else default, **known)


def _experts(config: Fields, family: Family) -> FFNSpec:
    row = family.moe
    assert row is not None
    experts = config.integer(row.experts)
    top_k = config.integer(row.top_k, high=experts)
    moe = MoE(experts, top_k, **row.routing(config))
    return _spec(config, d_ff=config.integer(row.d_ff), moe=moe, **_common(config, family))


def _spec(config: Fields, **choices: Any) -> FFNSpec:
    """FFNSpec, whose errors then name the config."""
    try:
        return FFNSpec(**choices)
    except FFNError as error:
        raise FFNError(f"{config.where}: {error.message}", error.hint) from None


def _width_evidence(config: Fields, family: Family, groups: Sequence[Group]) -> list[str]:
    """Which fields the widths and the function came from, and which tempting one was not used."""
    dense = [n for n in (family.d_ff, *(s.d_ff for s in family.stacks)) if n]
    kinds = {group.spec.moe is not None for group in groups}
    names = [
        family.d_model,
        *(dense if False in kinds else []),
        *([family.moe.d_ff] if family.moe and True in kinds else []),
    ]
    used = [n for names_ in dict.fromkeys(names) for n in names_.split("|") if config.values.get(n) is not None]
    out = ["widths: " + ", ".join(f"{n} = {shown(config.values[n])}" for n in dict.fromkeys(used))]
    unused = [n for n in dense if n not in used and config.values.get(n) is not None]
    out += [f"widths: {n} = {shown(config.values[n])} is not used, every layer is MoE" for n in unused]
    if family.multiple and not any(n in used for n in dense):
        out.append(
            f"widths: d_ff = {family.multiple} × d_model, the family's rule"
            + (f" ({family.d_ff} not given)" if family.d_ff else "")
        )
    said, runs = config.values.get("hidden_act"), groups[0].spec.activation
    if isinstance(said, str) and activations.CANONICAL.get(said.lower()) != runs:
        out.append(f"activation: {runs}; hidden_act says {shown(said)}, which this family's code does not run")
    return out


def _short_name(source: str) -> str:
    """The directory's name: what a config says of its own name is often that of its parent model."""
    path = Path(source)
    return (path.absolute().parent.name if path.suffix == ".json" else path.absolute().name) or source
