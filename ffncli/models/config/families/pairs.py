"""Encoder-decoders: two stacks, each with its own depth and often its own d_ff."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ffncli.errors import FFNError, shown
from ffncli.models.config.family import Extra, Family, MoEFields, Stack
from ffncli.models.files.fields import Fields


def _t5(config: Fields) -> Extra:
    newer = config.values.get("model_type") in ("mt5", "umt5")
    form = config.text("feed_forward_proj", "gated-gelu" if newer else "relu")
    # T5 v1.1 means the tanh approximation by gated-gelu (transformers' T5Config turns it into gelu_new).
    name = "gelu_tanh" if form == "gated-gelu" else form.removeprefix("gated-")
    # Newer files also spell out what follows from it; if the two differ, transformers uses the spelled-out fields.
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
    """How often each encoder layer runs: as often as its block's entry in block_repeats."""
    sizes = _block_sizes(config)
    repeats = config.integers("block_repeats") or (1,) * len(sizes)
    if len(repeats) != len(sizes) or min(repeats) < 1:
        raise config.wrong("block_repeats", list(repeats), f"one number from 1 per block ({len(sizes)})")
    return tuple(times for layers, times in zip(sizes, repeats, strict=True) for _ in range(layers))


def _funnel_layer(config: Fields, stack: Stack) -> Callable[[int], Extra | None]:
    # Some of its models have only the encoder, yet their configs count decoder layers.
    made = config.get("architectures", [])
    short = ("FunnelBaseModel", "FunnelForSequenceClassification", "FunnelForMultipleChoice")
    ends = isinstance(made, list) and bool(made) and all(name in short for name in made)
    return lambda i: None if ends and stack.name == "decoder" else {}


def _switch_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    """Layer 1 and every `step`-th after it; newer files have a field for the step, older ones imply it."""
    depth = config.integer("num_layers" if stack.name == "encoder" else "num_decoder_layers")
    sparse = config.integer(f"num_sparse_{stack.name}_layers", 3, low=0)
    # Without sparse layers the step is the depth; transformers still makes one layer sparse, layer 1.
    step: int = config.integer(f"{stack.name}_sparse_step", depth // sparse if sparse else depth, low=0)
    return lambda i: step == 1 or (step > 0 and i % step == 1)


def _nllb_layers(config: Fields, stack: Stack) -> Callable[[int], bool]:
    step: int = config.integer(f"{stack.name}_sparse_step", 4, low=0)
    return lambda i: step > 0 and (i + 1) % step == 0


def _nllb_widths(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    width: int = config.integer(f"{stack.name}_ffn_dim")
    return lambda i: {"d_ff": width}


def _fixed(config: Fields, name: str, wanted: str, why: str) -> None:
    """Raises FFNError unless the field has the one value for which tokens are independent."""
    if (text := config.text(name, wanted)) != wanted:
        raise FFNError(f"{config.where}: {name} = {shown(text)} is not covered", f"{why}; only {wanted} is")


def _switch_routing(config: Fields) -> Extra:
    """One expert by its probability. A capacity that drops tokens depends on all tokens and is not modelled."""
    _fixed(config, "router_dtype", "float32", "the router's numbers would be rounded")
    return {"top_k": 1, "renormalise": False, "router_bias": config.flag("router_bias", False)}


def _nllb_routing(config: Fields) -> Extra:
    """Two experts, renormalised; in evaluation their outputs shrink by the share that training drops.

    transformers 5.23 encodes the choice twice and so sends every first choice to expert 1, every second one to
    expert 0; here the router's weights decide.
    """
    _fixed(config, "router_dtype", "float32", "the router's numbers would be rounded")
    _fixed(config, "second_expert_policy", "all", "the second expert would be chosen at random")
    kept = 1 - config.number("moe_token_dropout", 0.2)
    return {"top_k": 2, "scale": kept, "router_bias": config.flag("router_bias", False)}


_PAIR = (
    Stack("encoder", "num_layers|num_hidden_layers"),
    Stack("decoder", "num_decoder_layers|num_layers|num_hidden_layers"),
)
_TWO_WIDTHS = (
    Stack("encoder", "encoder_layers|num_hidden_layers", "encoder_ffn_dim"),
    Stack("decoder", "decoder_layers", "decoder_ffn_dim"),
)
_NESTED = Family(
    activation="hidden_activation", default_activation="gelu_tanh", position="pre+branch", norm_weight="one_plus"
)
_PRE = Family(
    gated=False, d_model="d_model|hidden_size", d_ff=None, activation="activation_function", default_activation="gelu",
    bias=True, norm="layernorm", eps=(None, 1e-5), stacks=_TWO_WIDTHS,
)  # fmt: skip
_POST = replace(_PRE, position="post")

_T5 = Family(
    gated=None, d_model="d_model|hidden_size", d_ff="d_ff", activation="feed_forward_proj", default_activation="relu",
    eps=("layer_norm_epsilon", 1e-6), stacks=_PAIR, adjust=_t5,
)  # fmt: skip

ROWS: Mapping[str, Family] = {
    "t5": replace(_T5, aliases=("mt5", "umt5", "longt5", "udop")),
    "pop2piano": replace(_T5, activation=None, adjust=_pop2piano),
    "whisper": _PRE,
    "mbart": replace(_PRE, aliases=("blenderbot", "pegasus", "pegasus_x")),
    "m2m_100": replace(_PRE, default_activation="relu", aliases=("speech_to_text",)),
    "bigbird_pegasus": replace(_PRE, default_activation="gelu_new"),
    "seamless_m4t": replace(
        _PRE, d_model="hidden_size", default_activation="relu", aliases=("seamless_m4t_v2",),
        stacks=(
            Stack("encoder", "encoder_layers", "encoder_ffn_dim"),
            Stack("decoder", "decoder_layers|num_hidden_layers", "decoder_ffn_dim"),
        ),
    ),
    "bart": replace(_POST, aliases=("blenderbot-small", "led", "marian", "mvp", "plbart")),
    "fsmt": replace(_POST, default_activation="relu"),
    "prophetnet": replace(
        _POST, d_model="hidden_size",
        stacks=(
            Stack("encoder", "num_encoder_layers", "encoder_ffn_dim"),
            Stack("decoder", "num_decoder_layers", "decoder_ffn_dim"),
        ),
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
        # A missing layer count means 12 here, a null one means num_layers.
        stacks=(Stack("encoder", "num_layers"), Stack("decoder", "num_decoder_layers")),
        moe=MoEFields(d_ff="d_ff", layers=_switch_layers, routing=_switch_routing),
    ),
    "nllb-moe": replace(
        _PRE, default_activation="relu", layer=_nllb_widths,
        moe=MoEFields(d_ff="encoder_ffn_dim|decoder_ffn_dim", layers=_nllb_layers, routing=_nllb_routing),
    ),
    "t5gemma2_text": replace(_NESTED, aliases=("t5gemma2_decoder", "t5_gemma_module")),
    "t5gemma": replace(_NESTED, stacks=(Stack("encoder", at="encoder"), Stack("decoder", at="decoder"))),
    "t5gemma2": replace(
        _NESTED, stacks=(Stack("encoder", at="encoder.text_config"), Stack("decoder", at="decoder"))
    ),
    "encoder-decoder": Family(stacks=(), parts=("encoder", "decoder")),
}  # fmt: skip
