"""Families whose code is not in transformers, but in their repositories (`auto_map`): rows from that code and from
published configs, checked against published totals."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import sqrt

from ffncli.block.activations import hard_limits
from ffncli.models.config.families import decoders
from ffncli.models.config.families.decoders import LAYER_NORM_EPS, gate_and_up
from ffncli.models.config.family import (
    EXPERTS,
    TOP_K,
    Extra,
    Family,
    MoEFields,
    Stack,
    after_prefix,
    agree,
    corrected,
    not_covered,
    not_run,
    only,
    runs_only,
    shared_count,
    shared_width,
    silu,
    sparse_step,
)
from ffncli.models.files.strict_json import Fields

_FALCON = decoders.ROWS["falcon"]


def _qwen(config: Fields) -> Extra:
    return {"activation": "silu", "bias": not config.flag("no_bias", True)}


def _chatglm(config: Fields) -> Extra:
    # The first ChatGLM has other fields (inner_hidden_size) and no gate; a config without ffn_hidden_size is refused.
    why = "its residual would add to the norm's output, unlike in any known ChatGLM checkpoint"
    runs_only(config, "apply_residual_connection_post_layernorm", False, why)
    return {"activation": "silu", "norm": "rmsnorm" if config.flag("rmsnorm", True) else "layernorm"}


def _minicpm(config: Fields) -> Extra:
    return {"residual_scale": config.number("scale_depth", 1.0) / sqrt(config.integer("num_hidden_layers"))}


def _phi3small(config: Fields) -> Extra:
    """Describe gegelu: (up + 1) · gate · sigmoid(1.702 gate), both clamped, as in gpt-oss."""
    runs_only(config, "hidden_act", "gegelu", "its code computes gegelu")
    limit = config.number("gegelu_limit", 20.0)
    config.pass_over("gegelu_pad_to_256")
    return {"activation": "quick_gelu", "limits": hard_limits(limit, 1.0)}


def _olmo1(config: Fields) -> Extra:
    """Read the first OLMo: `mlp_hidden_size` is the width of gate and up together."""
    name = config.text("activation_type", "swiglu").lower()
    both = config.integer("mlp_hidden_size", None) or config.integer("mlp_ratio", 4) * config.integer("d_model")
    gated = name.endswith("glu")
    if gated and both % 2:
        raise config.wrong("mlp_hidden_size", both, "an even number")
    config.pass_over("mlp_ratio")
    affine = config.flag("layer_norm_with_affine", True)
    norm = "rmsnorm" if config.text("layer_norm_type", "default") == "rms" else "layernorm"
    return {
        "activation": name, "gated": gated, "d_ff": both // 2 if gated else both, "norm": norm,
        "norm_weight": "plain" if affine else "none",
        "norm_bias": norm == "layernorm" and affine and config.flag("bias_for_layer_norm", False),
    }  # fmt: skip


def _llada(config: Fields) -> Extra:
    """Read LLaDA, OLMo 1's code with Llama's block: `mlp_hidden_size` is the width of gate alone."""
    only(config, "block_type", "llama", "only its gated block is covered")
    config.pass_over("mlp_ratio")
    return {}


def _nas_widths(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    """Read a width for each layer of Nemotron-NAS: ⅔ · ffn_mult · d_model, rounded up to a multiple of 256."""
    layers, d_model = config.integer("num_hidden_layers"), config.integer("hidden_size")
    blocks = config.get("block_configs", kind="a list with an entry for each layer")
    if type(blocks) is not list or len(blocks) != layers or not all(isinstance(block, dict) for block in blocks):
        raise config.wrong("block_configs", blocks, f"a list of {layers} objects")

    def width(i: int) -> Extra | None:
        block = Fields({"ffn": blocks[i].get("ffn")}, f"{config.where}: block_configs[{i}]")
        ffn = block.inside("ffn")
        if ffn.flag("no_op", False):
            return None
        if ffn.flag("replace_with_linear", False):
            raise not_covered(ffn, "replace_with_linear", True, "a single matrix takes the place of this layer's FFN")
        if ffn.get("ffn_mult", None) is None:
            return {"d_ff": ffn.integer("intermediate_size")}
        return {"d_ff": -(-int(2 * ffn.number("ffn_mult", 0.0) * d_model / 3) // 256) * 256}

    return width


def _openelm_widths(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Read a width for each layer: its multiple of d_model, rounded to a multiple of ffn_dim_divisor."""
    layers, d_model = config.integer("num_transformer_layers"), config.integer("model_dim")
    divisor = config.integer("ffn_dim_divisor", 256)
    only(config, "ffn_with_glu", True, "only its gated block is covered")
    given = config.get("ffn_multipliers", 4.0)
    factors = given if type(given) is list else [given] * layers
    if len(factors) != layers or not all(type(factor) in (int, float) and 0 < factor < 1e6 for factor in factors):
        raise config.wrong("ffn_multipliers", given, f"{layers} numbers above 0")

    def width(i: int) -> Extra:
        wanted = factors[i] * d_model
        rounded = max(divisor, int(wanted + divisor / 2) // divisor * divisor)
        return {"d_ff": rounded + divisor * (rounded < 0.9 * wanted)}

    return width


def _grok(config: Fields) -> Extra:
    """Read Grok's routing; Grok-2 has an MLP of intermediate_size as well as narrower experts."""
    config.pass_over("router_logit_softcapping")
    if not config.flag("residual_moe", False):
        return {"renormalise": False}
    not_run(config, "residual_moe", True, "router logits have a soft cap, and the sum with the MLP is divided by √2")
    return {"renormalise": False, "shared_experts": 1, "shared_d_ff": config.integer("intermediate_size")}


def _pangu(config: Fields) -> Extra:
    not_run(config, "num_experts_per_tok", config.get(TOP_K), "the best expert of each group of experts is chosen")
    return {"renormalise": False, "expert_scale": True, **shared_width(config)}


def _deepseek(config: Fields) -> Extra:
    agree(config, scoring_func="softmax")
    return {"renormalise": config.flag("norm_topk_prob", False), **shared_count(0)(config)}


def _bailing2(config: Fields) -> Extra:
    """Read Ling 2.0's routing, DeepSeek-V3's with other names."""
    agree(config, score_function="sigmoid", moe_router_enable_expert_bias=True, router_dtype="fp32")
    agree(config, moe_shared_expert_intermediate_size=config.integer("moe_intermediate_size"))
    return corrected(2.5, (8, 4))(config)


def _if_several(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Give experts to all layers of a config that has several experts, and to none of another."""
    experts = config.get(EXPERTS, None)
    several = experts is not None and config.integer(EXPERTS, low=0) > 1
    return lambda i: several


def _every(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Give experts to every `moe_layer_frequency`-th layer of Arctic, and a dense MLP as wide as d_model."""
    step = config.integer("moe_layer_frequency", 2)
    return lambda i: stack.kind == "moe" and (i + 1) % step == 0


def _arctic_widths(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    """Build Arctic's layers: a mixture besides a dense MLP (`parallel_attn_mlp_res`), or a dense MLP alone."""
    step, both = config.integer("moe_layer_frequency", 2), config.flag("parallel_attn_mlp_res", False)

    def layer(i: int) -> Extra | None:
        mixture = (i + 1) % step == 0
        if stack.kind == "moe":
            return {} if mixture else None
        if mixture:
            return {"d_ff": config.integer("hidden_size")} if both else None
        return {"d_ff": config.integer("intermediate_size")}

    return layer


ROWS: Mapping[str, Family] = {
    "baichuan": silu(aliases=("baichuan_m1", "Yi", "aquila", "solar", "mimo", "internlm", "deci")),
    # XVERSE-MoE and Skywork-MoE have the model_type of their dense models, and more fields.
    **dict.fromkeys(("xverse", "skywork"), silu(
        moe=MoEFields(d_ff="intermediate_size", layers=_if_several, routing=shared_count(0))
    )),
    "internlm2": silu(),  # its `bias` applies to the attention
    "exaone": Family(
        activation="activation_function|hidden_act", default_activation="silu", eps=("layer_norm_epsilon", 1e-5)
    ),
    "minicpm": silu(
        adjust=_minicpm, moe=MoEFields(d_ff="intermediate_size", layers=_if_several)  # MiniCPM-MoE
    ),
    "llada": Family(
        d_model="d_model", d_ff="mlp_hidden_size", multiple=4, activation="activation_type", default_activation="silu",
        bias=("include_bias", False), eps=("rms_norm_eps", 1e-5), adjust=_llada,
    ),
    "telechat": Family(
        d_model="hidden_size|n_embed", d_ff="ffn_hidden_size", activation=None, eps=("layer_norm_epsilon", 1e-5),
        adjust=lambda config: {"activation": "silu", "down_bias": True}, aliases=("telechat2",),
    ),
    "jais": Family(
        gated=None, bias=True, norm="layernorm", eps=LAYER_NORM_EPS, d_model="n_embd", d_ff="n_inner", multiple=4,
        activation="activation_function", default_activation="gelu_new", aliases=("btlm",),
        adjust=lambda config: {"gated": config.text("activation_function", "").endswith("glu")},
    ),
    "plamo": silu(adjust=lambda config: {"parallel": True, "shared_norm": True}),
    "orion": Family(default_activation="silu", norm="layernorm", eps=("rms_norm_eps", 1e-5)),
    "stablelm_epoch": Family(default_activation="silu", norm="layernorm", eps=("norm_eps|layer_norm_eps", 1e-5)),
    "phi-msft": Family(
        gated=False, bias=True, norm="layernorm", eps=LAYER_NORM_EPS, d_model="n_embd", d_ff="n_inner", multiple=4,
        activation="activation_function", default_activation="gelu_new",
        adjust=lambda config: {"parallel": True, "shared_norm": True}, aliases=("mixformer-sequential",),
    ),
    "phi3small": Family(
        d_ff="ff_intermediate_size", activation=None, bias=True, norm="layernorm", eps=LAYER_NORM_EPS, adjust=_phi3small
    ),
    "hf_olmo": Family(
        gated=None, d_model="d_model", d_ff=None, activation=None, bias=("include_bias", False), eps=(None, 1e-5),
        adjust=_olmo1,
    ),
    "nemotron-nas": silu(1e-5, d_ff=None, layer=_nas_widths),
    "openelm": Family(
        d_model="model_dim", d_ff=None, activation="activation_fn_name", default_activation="swish", eps=(None, 1e-6),
        stacks=(Stack("decoder", "num_transformer_layers"),), layer=_openelm_widths,
    ),
    "chatglm": Family(
        d_ff="ffn_hidden_size", activation=None, bias=("add_bias_linear", False), eps=("layernorm_epsilon", 1e-5),
        adjust=_chatglm,
    ),
    "qwen": Family(
        activation=None, eps=("layer_norm_epsilon", 1e-6), adjust=_qwen, layer=gate_and_up("intermediate_size")
    ),
    # Falcon before it was added to transformers; 40B has two norms.
    "RefinedWeb": replace(_FALCON, adjust=lambda config: {"parallel": True, "shared_norm": False}),
    "RefinedWebModel": _FALCON,
    "deepseek": silu(aliases=("bailing_moe",), moe=MoEFields(layers=after_prefix(0), routing=_deepseek)),
    "bailing_moe_v2": silu(moe=MoEFields(layers=after_prefix(0), routing=_bailing2)),
    "grok-1": Family(
        activation=None, position="pre+branch", eps=("rms_norm_eps", 1e-5),
        adjust=lambda config: {"activation": "gelu"},
        moe=MoEFields(d_ff="moe_intermediate_size|intermediate_size", routing=_grok),
    ),
    "PanguProMoE": silu(1e-5, moe=MoEFields(layers=sparse_step, routing=_pangu)),
    "cogvlm": silu(),  # the FFNs of its text tokens; image tokens have their own
    "arctic": silu(
        1e-5, d_ff=None, layer=_arctic_widths,
        stacks=(Stack("decoder", kind="dense"), Stack("experts", kind="moe")),
        moe=MoEFields(d_ff="intermediate_size", layers=_every),
    ),
}  # fmt: skip
