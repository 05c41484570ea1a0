"""Dense decoders, with one stack of equal layers (ROWS), and encoder-decoders, with two stacks that each have their own
depth and often their own d_ff (PAIRS)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod, sqrt
from typing import Any

from ffncli.models.config.family import (
    Extra,
    Family,
    LayerExtra,
    MoEFields,
    Stack,
    not_covered,
    not_run,
    only,
    residual_multiplier,
    runs_only,
    silu,
)
from ffncli.models.files.strict_json import REQUIRED, Fields

LAYER_NORM_EPS = ("layer_norm_epsilon|layer_norm_eps|layernorm_epsilon|norm_epsilon|norm_eps", 1e-5)


def _opt(config: Fields) -> Extra:
    affine = config.flag("layer_norm_elementwise_affine", True)
    return {
        "norm_position": "pre" if config.flag("do_layer_norm_before", True) else "post",
        "norm_weight": "plain" if affine else "none",
        "norm_bias": affine,
    }


def _gemma1(config: Fields) -> Extra:
    # Early Gemma-1 configs say "gelu", but the weights were trained with the tanh form.
    name = config.text("hidden_activation|hidden_act", "gelu_tanh")
    return {"activation": "gelu_tanh" if name == "gelu" else name}


def _falcon(config: Fields) -> Extra:
    parallel = config.flag("parallel_attn", True)
    new = config.flag("new_decoder_architecture", False)
    norms = config.integer("num_ln_in_parallel_attn", 2 if new else 1, 1, 2)
    return {"parallel": parallel or new, "shared_norm": parallel and not (new and norms == 2)}


def _bloom(config: Fields) -> Extra:
    why = "its residual would add to the norm's output, unlike in any known BLOOM checkpoint"
    runs_only(config, "apply_residual_connection_post_layernorm", False, why)
    return {"activation": "gelu_tanh"}


def _hyperclovax(config: Fields) -> Extra:
    position = "pre+branch" if config.flag("use_post_norm", True) else "pre"
    return {**residual_multiplier(config), "norm_position": position}


def _minicpm3(config: Fields) -> Extra:
    # scale_depth is null if the model was trained without it; if it is absent, it is 1.4.
    if "scale_depth" in config.values and config.values["scale_depth"] is None:
        return {}
    return {"residual_scale": config.number("scale_depth", 1.4) / sqrt(config.integer("num_hidden_layers"))}


def _doge(config: Fields) -> Extra:
    only(config, "is_moe", False, "its experts are rows of an embedding, selected by product keys")
    return {"residual": False}  # it adds w ⊙ x, with a weight per feature; the block ends before this sum


def _gemma3n(config: Fields) -> Extra:
    # If the pattern is missing, the first ten layers are sparse, unless the model has at most ten layers.
    name, layers = "activation_sparsity_pattern", config.integer("num_hidden_layers")
    pattern = config.get(name, [0.0] * layers if layers <= 10 else REQUIRED, "a share per layer")
    for share in pattern if isinstance(pattern, list) else [pattern]:
        if share != 0:
            not_run(config, name, share, "its Gaussian top-k depends on the whole row of gate values")
    return {}


def _gemma4_widths(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    """Double the width of layers that reuse keys and values of earlier layers, if the config's flag is set."""
    layers = config.integer("num_hidden_layers")
    first = layers - config.integer("num_kv_shared_layers", 0, low=0)
    wide = {"d_ff": 2 * config.integer("intermediate_size")} if config.flag("use_double_wide_mlp", False) else {}
    return lambda i: wide if i >= first else {}


def _gemma4_routing(config: Fields) -> Extra:
    return {
        "renormalise": True, "router_norm": True, "expert_scale": True,
        "router_scale": config.integer("hidden_size") ** -0.5,
    }  # fmt: skip


def _gemma4_experts(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Give every layer experts besides its MLP, if the config's flag is set."""
    both = config.flag("enable_moe_block", False)
    if both:
        why = "its MLP and its experts run side by side, each between its own norms"
        not_run(config, "enable_moe_block", True, why)
    return lambda i: both and stack.kind == "moe"


def _branch_if(flag: str) -> Callable[[Fields], Extra]:
    """Build a rule that puts the norm after the FFN if the config's flag is set, and otherwise before the FFN."""
    return lambda config: {"norm_position": "branch" if config.flag(flag, False) else "pre"}


def _stablelm(config: Fields) -> Extra:
    parallel = config.flag("use_parallel_residual", False)
    return {"parallel": parallel, "shared_norm": parallel}


def _mpt(config: Fields) -> Extra:
    # MPT's own code reads both fields, but transformers ignores them; we accept only the values that transformers
    # assumes.
    if (ratio := config.get("expansion_ratio", 4)) != 4:
        raise not_covered(config, "expansion_ratio", ratio, "transformers always uses 4")
    only(config, "no_bias", True, "transformers always runs without biases")
    return {"activation": "gelu", "norm_bias": False}


def _neox_japanese(config: Fields) -> Extra:
    return {"d_ff": int(config.integer("hidden_size") * config.number("intermediate_multiple_size", 4))}


def _openai_gpt(config: Fields) -> Extra:
    name = config.text("afn", "gelu")
    return {"activation": "gelu_tanh" if name == "gelu" else name}  # its "gelu" is the tanh form


def gate_and_up(name: str, default: Any = REQUIRED) -> LayerExtra:
    """Read a field that holds the total width of gate and up."""

    def layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
        both = config.integer(name, default)
        if both % 2:
            raise config.wrong(name, both, "an even number")
        return lambda i: {"d_ff": both // 2}

    return layer


def _reformer(config: Fields) -> Extra:
    kinds, layers = config.get("attn_layers", None), config.integer("num_hidden_layers")
    if kinds is not None and (not isinstance(kinds, list) or len(kinds) != layers):
        raise config.wrong("attn_layers", kinds, f"one name per layer ({layers})")
    return {"residual": False}  # reversible: the output is added to the other of two streams, not to the FFN's input


def _xlm(config: Fields) -> dict[str, Any]:
    return {"activation": "gelu" if config.flag("gelu_activation", True) else "relu"}


def _flaubert(config: Fields) -> Extra:
    return _xlm(config) | {"norm_position": "pre" if config.flag("pre_norm", False) else "post"}


def _cycles(names: Sequence[tuple[str, int]]) -> Callable[[Fields], int]:
    """Count the runs of HRM's nested stacks: the low stack H_cycles × L_cycles times, the high stack H_cycles times."""
    return lambda config: prod(config.integer(name, default) for name, default in names)


def _plain(activation: str | None, default: str = REQUIRED, **fields: Any) -> Family:
    """Build the row for GPT's block: no gate, with biases, LayerNorm before it."""
    defaults: dict[str, Any] = {"bias": True, "norm": "layernorm", "eps": LAYER_NORM_EPS}
    return Family(gated=False, activation=activation, default_activation=default, **defaults | fields)


_PARALLEL: dict[str, Any] = {"parallel": True, "shared_norm": True}
_MLP_BIAS = ("mlp_bias", False)
_PER_STACK = "num_layers_per_stack|num_hidden_layers"
_N_EMBD, _D_MODEL = "n_embd|hidden_size", "d_model|hidden_size"
_BY_CODE = (None, 1e-5)  # the code fixes eps and ignores the config
_GEMMA = Family(
    activation="hidden_activation", default_activation="gelu_tanh", position="pre+branch", norm_weight="one_plus"
)
_GPT = {
    "gpt2": _plain(
        "activation_function", "gelu_new", d_model=_N_EMBD, d_ff="n_inner", multiple=4, aliases=("gpt-sw3", "codeshell")
    ),
    "gpt_bigcode": _plain("activation_function", "gelu_tanh", d_model=_N_EMBD, d_ff="n_inner", multiple=4),
    "gpt_neo": _plain("activation_function", "gelu_new", multiple=4),
    "codegen": _plain(
        "activation_function", "gelu_new", d_model=_N_EMBD, d_ff="n_inner", multiple=4,
        adjust=lambda config: _PARALLEL, aliases=("gptj",),
    ),
    "openai-gpt": _plain(None, d_model=_N_EMBD, d_ff=None, multiple=4, position="post", adjust=_openai_gpt),
    "ctrl": _plain(None, d_model=_N_EMBD, d_ff="dff", eps=(None, 1e-6), adjust=lambda config: {"activation": "relu"}),
    "opt": _plain("activation_function", "relu", d_ff="ffn_dim", bias=("enable_bias", True), eps=_BY_CODE, adjust=_opt),
    "xglm": _plain("activation_function", "gelu", d_model=_D_MODEL, d_ff="ffn_dim", eps=_BY_CODE),
    "biogpt": _plain("hidden_act", "gelu", eps=_BY_CODE),  # its layer_norm_eps (1e-12) is not used
    "trocr": _plain(
        "activation_function", "gelu", d_model=_D_MODEL, d_ff="decoder_ffn_dim", eps=_BY_CODE,
        position="post", stacks=(Stack("decoder", "decoder_layers|num_hidden_layers"),),
    ),
    "bloom": _plain(
        None, d_model="n_embed|n_embd|hidden_size", d_ff=None, multiple=4, adjust=_bloom,
        stacks=(Stack("decoder", "n_layer|num_hidden_layers"),),
    ),
    "gpt_neox": _plain(
        "hidden_act", "gelu", adjust=lambda config: {"parallel": config.flag("use_parallel_residual", True)}
    ),
    "gpt_neox_japanese": _plain("hidden_act", "gelu", d_ff=None, bias=False, adjust=_neox_japanese),
    "falcon": _plain("activation", "gelu", d_ff="ffn_hidden_size", multiple=4, bias=("bias", False), adjust=_falcon),
    "mpt": _plain(None, d_model=_D_MODEL, d_ff=None, multiple=4, bias=False, adjust=_mpt),
    "phi": _plain("hidden_act", "gelu_new", adjust=lambda config: _PARALLEL),
    "persimmon": _plain("hidden_act", "relu2"),
    "jais2": _plain("hidden_act", "relu2", bias=("mlp_bias", True)),
    "starcoder2": _plain("hidden_act", "gelu_tanh", bias=("use_bias", True)),
    "nemotron": _plain("hidden_act", "relu2", bias=_MLP_BIAS, norm_weight="one_plus"),
    "xlnet": _plain(
        "ff_activation", "gelu", d_model=_D_MODEL, d_ff="d_inner", position="post", eps=("layer_norm_eps", 1e-12)
    ),
    "reformer": _plain("hidden_act", "relu", d_ff="feed_forward_size", eps=("layer_norm_eps", 1e-12), adjust=_reformer),
    "xlm": _plain(
        None, d_model="emb_dim|hidden_size", d_ff=None, multiple=4, eps=("layer_norm_eps", 1e-12), position="post",
        stacks=(Stack("encoder"),), adjust=_xlm,
    ),
    "flaubert": _plain(
        None, d_model="emb_dim|hidden_size", d_ff=None, multiple=4, eps=("layer_norm_eps", 1e-12),
        stacks=(Stack("encoder"),), adjust=_flaubert,
    ),
}  # fmt: skip
_LLAMA = {
    "llama": silu(bias=_MLP_BIAS, aliases=("smollm3", "seed_oss")),
    "cwm": silu(1e-5, bias=_MLP_BIAS, aliases=("iquestcoder",)),
    "internlm3": silu(1e-5, bias=("mlp_bias|bias", False)),
    "helium": silu(1e-8, bias=_MLP_BIAS),
    "ernie4_5": silu(1e-5, bias=("use_bias", False), aliases=("paddleocr_vl_text", "paddleocr_vl")),
    "mistral": silu(aliases=("ministral", "youtu")),
    "ministral3": silu(1e-5, aliases=("diffllama", "hunyuan_v1_dense", "hunyuan_vl_text", "hunyuan_vl")),
    "qwen2": silu(aliases=("qwen2_5_omni_text", "qwen2_5_omni_talker")),
    "qwen2_vl_text": silu(1e-5, aliases=("qwen2_vl", "qwen2_5_vl_text", "qwen2_5_vl")),
    "qwen3": silu(aliases=("qwen3_vl_text", "qwen3_omni_moe_talker_code_predictor")),
    "phi3": silu(1e-5),
    "glm": silu(1.5625e-7),
    "glm4": silu(1.5625e-7, position="pre+branch"),
    "glm4v_text": silu(1e-5, position="pre+branch", aliases=("glm_image_text", "glm_ocr_text")),
    "olmo": Family(
        default_activation="silu", norm="layernorm", norm_weight="none", eps=_BY_CODE,
        adjust=lambda config: {"norm_bias": False},
    ),
    "olmo2": silu(1e-5, position="branch", aliases=("olmo3", "exaone4")),
    "molmo2_text": Family(
        default_activation="silu", eps=("rms_norm_eps|layer_norm_eps", 1e-6), adjust=_branch_if("norm_after")
    ),
    "granite": silu(bias=_MLP_BIAS, adjust=residual_multiplier, aliases=("granite4_vision_text",)),
    "granite_swa": silu(1e-5, bias=_MLP_BIAS, adjust=residual_multiplier),
    "granite_docling_text": silu(1e-5, bias=_MLP_BIAS, adjust=lambda config: residual_multiplier(config, 0.263)),
    "hyperclovax": silu(bias=_MLP_BIAS, adjust=_hyperclovax),
    "minicpm3": silu(1e-5, bias=_MLP_BIAS, adjust=_minicpm3),
    "doge": silu(bias=_MLP_BIAS, adjust=_doge),
    "moshi": silu(1e-8, d_ff="ffn_dim", layer=gate_and_up("ffn_dim", 22528), aliases=("kyutai_speech_to_text",)),
    "chameleon": silu(1e-5, bias=_MLP_BIAS, adjust=_branch_if("swin_norm")),
    "hrm_text": silu(
        bias=_MLP_BIAS, norm_weight="none",
        stacks=(
            Stack("low", _PER_STACK, runs=_cycles([("H_cycles", 2), ("L_cycles", 3)])),
            Stack("high", _PER_STACK, runs=_cycles([("H_cycles", 2)])),
        ),
    ),
    "cohere": Family(
        default_activation="silu", norm="layernorm", eps=LAYER_NORM_EPS,
        adjust=lambda config: _PARALLEL | {"norm_bias": False}, aliases=("cohere2", "cohere_compass_text"),
    ),
    "stablelm": Family(default_activation="silu", norm="layernorm", eps=LAYER_NORM_EPS, adjust=_stablelm),
    "cpmant": Family(d_ff="dim_ff", activation=None, eps=("eps", 1e-6), adjust=lambda config: {"activation": "gelu"}),
    "bitnet": Family(default_activation="relu2", eps=("rms_norm_eps", 1e-5), adjust=lambda config: {"sub_norm": True}),
    "apertus": Family(gated=False, default_activation="xielu", eps=("rms_norm_eps", 1e-5)),
    "arcee": Family(
        gated=False, default_activation="relu2", bias=_MLP_BIAS, eps=("rms_norm_eps", 1e-5),
        aliases=("cosmos3_edge_text",),
    ),
    "nanochat": Family(gated=False, default_activation="relu2", norm_weight="none"),
}  # fmt: skip
_GEMMAS = {
    "gemma": Family(
        activation="hidden_activation|hidden_act", default_activation="gelu_tanh", norm_weight="one_plus",
        adjust=_gemma1,
    ),
    "gemma2": _GEMMA,
    "gemma3_text": replace(_GEMMA, aliases=("gemma3",)),
    "vaultgemma": replace(_GEMMA, position="pre"),
    "gemma3n_text": replace(_GEMMA, norm_weight="plain", adjust=_gemma3n),
    "embedding_gemma2_text": replace(_GEMMA, norm_weight="plain"),
    "gemma4_text": replace(
        _GEMMA, norm_weight="plain", layer=_gemma4_widths, aliases=("gemma4_unified_text",),
        stacks=(Stack("decoder", kind="dense"), Stack("experts", kind="moe")),
        moe=MoEFields(top_k="top_k_experts", layers=_gemma4_experts, routing=_gemma4_routing),
    ),
}  # fmt: skip
ROWS: Mapping[str, Family] = {**_GPT, **_LLAMA, **_GEMMAS}


def _t5(config: Fields) -> Extra:
    newer = config.values.get("model_type") in ("mt5", "umt5")
    form = config.text("feed_forward_proj", "gated-gelu" if newer else "relu")
    # In T5 v1.1, gated-gelu means the tanh form (transformers' T5Config turns it into gelu_new).
    name = "gelu_tanh" if form == "gated-gelu" else form.removeprefix("gated-")
    # Newer files also contain is_gated_act and dense_act_fn, which transformers prefers to feed_forward_proj.
    gated = config.flag("is_gated_act", form.startswith("gated-"))
    return {"gated": gated, "activation": config.text("dense_act_fn", name), "bias": False}


def _pop2piano(config: Fields) -> Extra:
    form = config.text("feed_forward_proj", "gated-gelu")
    gated = config.flag("is_gated_act", form.startswith("gated-"))
    return {"gated": gated, "activation": config.text("dense_act_fn", "relu"), "bias": False}


def _block_sizes(config: Fields) -> tuple[int, ...]:
    sizes = config.integers("block_sizes") or (4, 4, 4)
    if min(sizes) < 1:
        raise config.wrong("block_sizes", list(sizes), "numbers from 1")
    return sizes


def _funnel_runs(config: Fields) -> tuple[int, ...]:
    """Return the number of runs of each encoder layer, which is its block's entry in block_repeats."""
    sizes = _block_sizes(config)
    repeats = config.integers("block_repeats") or (1,) * len(sizes)
    if len(repeats) != len(sizes) or min(repeats) < 1:
        raise config.wrong("block_repeats", list(repeats), f"one number from 1 per block ({len(sizes)})")
    return tuple(times for layers, times in zip(sizes, repeats, strict=True) for _ in range(layers))


def _funnel_layer(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    # Some Funnel models have only the encoder, although their configs count decoder layers.
    made = config.get("architectures", [])
    short = ("FunnelBaseModel", "FunnelForSequenceClassification", "FunnelForMultipleChoice")
    ends = isinstance(made, list) and bool(made) and all(name in short for name in made)
    return lambda i: None if ends and stack.name == "decoder" else {}


def _switch_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Select layer 1 and every `step`-th layer after it; older files do not have the step, but the number of sparse
    layers."""
    depth = config.integer("num_layers" if stack.name == "encoder" else "num_decoder_layers")
    sparse = config.integer(f"num_sparse_{stack.name}_layers", 3, low=0)
    # Without sparse layers, the step is the depth; even then, transformers makes layer 1 sparse.
    step = config.integer(f"{stack.name}_sparse_step", depth // sparse if sparse else depth, low=0)
    return lambda i: step == 1 or (step > 0 and i % step == 1)


def _nllb_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    step = config.integer(f"{stack.name}_sparse_step", 4, low=0)
    return lambda i: step > 0 and (i + 1) % step == 0


def _nllb_widths(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    width = config.integer(f"{stack.name}_ffn_dim")
    return lambda i: {"d_ff": width}


def _switch_routing(config: Fields) -> Extra:
    """Route to one expert, weighted by its probability; the capacity, which drops tokens, is not modelled."""
    runs_only(config, "router_dtype", "float32", "the router's numbers would be rounded; only float32 is covered")
    return {"top_k": 1, "renormalise": False, "router_bias": config.flag("router_bias", False)}


def _nllb_routing(config: Fields) -> Extra:
    """Route to two experts with renormalised weights. As in evaluation, the experts' outputs are multiplied by the
    share that training keeps.

    transformers 5.23 one-hot encodes the choice a second time, so it sends every first choice to expert 1 and every
    second choice to expert 0; here, the router's weights decide.
    """
    runs_only(config, "router_dtype", "float32", "the router's numbers would be rounded; only float32 is covered")
    runs_only(config, "second_expert_policy", "all", "the second expert would be chosen at random; only all is covered")
    kept = 1 - config.number("moe_token_dropout", 0.2)
    return {"top_k": 2, "scale": kept, "router_bias": config.flag("router_bias", False)}


def _two_widths(encoder: str, decoder: str) -> tuple[Stack, Stack]:
    """Build two stacks, each with its own field for d_ff; the arguments name the fields for their layer counts."""
    return Stack("encoder", encoder, "encoder_ffn_dim"), Stack("decoder", decoder, "decoder_ffn_dim")


_PAIR = (
    Stack("encoder", "num_layers|num_hidden_layers"),
    Stack("decoder", "num_decoder_layers|num_layers|num_hidden_layers"),
)
_PRE = Family(
    gated=False, d_model="d_model|hidden_size", d_ff=None, activation="activation_function", default_activation="gelu",
    bias=True, norm="layernorm", eps=(None, 1e-5),
    stacks=_two_widths("encoder_layers|num_hidden_layers", "decoder_layers"),
)  # fmt: skip
_POST = replace(_PRE, position="post")
_T5 = Family(
    gated=None, d_model="d_model|hidden_size", d_ff="d_ff", activation="feed_forward_proj", default_activation="relu",
    eps=("layer_norm_epsilon", 1e-6), stacks=_PAIR, adjust=_t5,
)  # fmt: skip
PAIRS: Mapping[str, Family] = {
    "t5": replace(_T5, aliases=("mt5", "umt5", "longt5", "udop")),
    "pop2piano": replace(_T5, activation=None, adjust=_pop2piano),
    "whisper": _PRE,
    "mbart": replace(_PRE, aliases=("blenderbot", "pegasus", "pegasus_x")),
    "m2m_100": replace(_PRE, default_activation="relu", aliases=("speech_to_text",)),
    "bigbird_pegasus": replace(_PRE, default_activation="gelu_new"),
    "seamless_m4t": replace(
        _PRE, d_model="hidden_size", default_activation="relu", aliases=("seamless_m4t_v2",),
        stacks=_two_widths("encoder_layers", "decoder_layers|num_hidden_layers"),
    ),
    "bart": replace(_POST, aliases=("blenderbot-small", "led", "marian", "mvp", "plbart")),
    "fsmt": replace(_POST, default_activation="relu"),
    "prophetnet": replace(
        _POST, d_model="hidden_size", stacks=_two_widths("num_encoder_layers", "num_decoder_layers")
    ),
    "funnel": replace(
        _POST, d_ff="d_inner", activation="hidden_act", default_activation="gelu_new", eps=("layer_norm_eps", 1e-9),
        layer=_funnel_layer,
        stacks=(
            Stack("encoder", lambda config: sum(_block_sizes(config)), runs=_funnel_runs),
            Stack("decoder", "num_decoder_layers"),
        ),
    ),
    "switch_transformers": Family(
        gated=False, d_model="d_model|hidden_size", d_ff="d_ff", activation="dense_act_fn", default_activation="relu",
        eps=("layer_norm_epsilon", 1e-6),
        # If the layer count is missing, it is 12; if it is null, it is num_layers.
        stacks=(Stack("encoder", "num_layers"), Stack("decoder", "num_decoder_layers")),
        moe=MoEFields(d_ff="d_ff", layers=_switch_layers, routing=_switch_routing),
    ),
    "nllb-moe": replace(
        _PRE, default_activation="relu", layer=_nllb_widths,
        moe=MoEFields(d_ff="encoder_ffn_dim|decoder_ffn_dim", layers=_nllb_layers, routing=_nllb_routing),
    ),
    "t5gemma2_text": replace(_GEMMA, aliases=("t5gemma2_decoder", "t5_gemma_module")),
    "t5gemma": replace(_GEMMA, stacks=(Stack("encoder", at="encoder"), Stack("decoder", at="decoder"))),
    "t5gemma2": replace(_GEMMA, stacks=(Stack("encoder", at="encoder.text_config"), Stack("decoder", at="decoder"))),
    "encoder-decoder": Family(stacks=(), parts=("encoder", "decoder")),
}  # fmt: skip
