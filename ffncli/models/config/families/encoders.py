"""Encoders: BERT and its relatives, vision transformers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from ffncli.errors import FFNError, shown
from ffncli.models.config.family import Extra, Family, Stack
from ffncli.models.files.fields import REQUIRED, Fields

_ENCODER = (Stack("encoder"),)


def _albert_layers(config: Fields) -> int:
    count: int = config.integer("num_hidden_groups", 1) * config.integer("inner_group_num", 1)
    return count


def _albert_runs(config: Fields) -> tuple[int, ...]:
    """How often each stored layer runs: the depth is divided among the groups, and each group runs as a whole."""
    depth, groups = config.integer("num_hidden_layers", high=10_000), config.integer("num_hidden_groups", 1)
    often = Counter(int(i / (depth / groups)) for i in range(depth))
    inner: int = config.integer("inner_group_num", 1)
    return tuple(often[i // inner] for i in range(groups * inner))


def _mobilebert(config: Fields) -> Extra:
    if (kind := config.text("normalization_type", "no_norm")) != "no_norm":
        raise FFNError(
            f"{config.where}: normalization_type = {shown(kind)} is not covered",
            "its norms would differ within one layer; published MobileBERTs have no_norm",
        )
    # "no_norm" is x ⊙ weight + bias after the residual, not a norm: the row describes the FFN between the two.
    width = "intra_bottleneck_size" if config.flag("use_bottleneck", True) else "hidden_size"
    d_model = config.integer("true_hidden_size", config.integer(width))  # what the code reads, where a file has it
    return {"norm": "none", "residual": False, "d_model": d_model}


def _ungrouped(*fields: str, default: Any = REQUIRED) -> Callable[[Fields], Extra]:
    """Refuses grouped (block-diagonal) projections, which Linear cannot express."""

    def adjust(config: Fields) -> Extra:
        for field in fields:
            if (groups := config.integer(field, default)) != 1:
                raise FFNError(
                    f"{config.where}: {field} = {groups} is not covered",
                    "a projection in groups is a block-diagonal matrix, which no step of a block can express",
                )
        return {}

    return adjust


def _ibert(config: Fields) -> Extra:
    if config.flag("quant_mode", False):
        raise FFNError(f"{config.where}: quant_mode = true is not covered", "its FFN then computes in integers")
    return {}


def _xmod(config: Fields) -> Extra:
    # A language's adapter is between residual and norm, and may use that same norm: it does not belong to the FFN.
    pre = config.flag("pre_norm", False)
    reused = config.flag("adapter_reuse_layer_norm", True) and not config.flag("adapter_layer_norm", False)
    return {"norm": "layernorm" if pre else "none", "shared_norm": pre and reused}


def _esmc(config: Fields) -> Extra:
    return {"residual_scale": (36 / config.integer("num_hidden_layers")) ** 0.5}


def _neomme(config: Fields) -> Extra:
    depth = config.integer("num_hidden_layers")
    return {"norm_weight": "none", "residual_scale": config.number("residual_multiplier", (2 * depth) ** -0.5)}


def _perceiver(config: Fields) -> Extra:
    made = config.get("architectures", [])
    if made and made != ["PerceiverForMaskedLM"]:
        raise FFNError(
            f"{config.where}: architectures = {shown(made)} is not covered",
            "a Perceiver's decoder follows from its task, and only PerceiverForMaskedLM is known here",
        )
    return {}


def _perceiver_layer(config: Fields, stack: Stack) -> Callable[[int], Extra]:
    """Widths are factors of the latents'; the decoder's queries are as wide as the embeddings, its factor is 1."""
    decoder = stack.name == "decoder"
    d_model: int = config.integer("d_model" if decoder else "d_latents")
    widening: int = 1 if decoder else config.integer(f"{stack.name}_attention_widening_factor", 1)
    return lambda i: {"d_model": d_model, "d_ff": widening * d_model}


def _blocks(config: Fields) -> int:
    blocks: int = config.integer("num_blocks", 1)
    return blocks


_BERT = Family(
    gated=False, default_activation="gelu", bias=True, norm="layernorm", position="post", stacks=_ENCODER,
    eps=("layer_norm_eps", 1e-12),
)  # fmt: skip
_PRE = replace(_BERT, position="pre")
_MODERNBERT = Family(
    activation="hidden_activation", default_activation="gelu", bias=("mlp_bias", False), norm="layernorm",
    eps=("norm_eps", 1e-5), adjust=lambda config: {"norm_bias": config.flag("norm_bias", False)},
)  # fmt: skip
_LLAMA = Family(default_activation="silu", bias=("mlp_bias", False), stacks=_ENCODER)

ROWS: Mapping[str, Family] = {
    "bert": replace(
        _BERT,
        aliases=(
            "roberta", "xlm-roberta", "electra", "camembert", "bert-generation", "data2vec-text", "ernie", "layoutlm",
            "longformer", "luke", "mpnet", "rembert", "roc_bert", "roformer", "tapas", "yoso", "bros", "dpr",
            "markuplm", "splinter", "tvp", "visual_bert",
            "layoutlmv2",
        ),
    ),
    "big_bird": replace(_BERT, default_activation="gelu_new", aliases=("fnet",)),
    "mra": replace(_BERT, eps=("layer_norm_eps", 1e-5), aliases=("jina_embeddings_v3",)),
    "nystromformer": replace(_BERT, default_activation="gelu_new", eps=("layer_norm_eps", 1e-5)),
    "deberta": replace(_BERT, eps=("layer_norm_eps", 1e-7), aliases=("deberta-v2",)),
    "distilbert": replace(
        _BERT, d_model="dim|hidden_size", d_ff="hidden_dim", activation="activation", eps=(None, 1e-12),
        stacks=(Stack("encoder", "n_layers|num_hidden_layers"),),
    ),
    "albert": replace(
        _BERT, default_activation="gelu_new", stacks=(Stack("encoder", _albert_layers, runs=_albert_runs),)
    ),
    "mobilebert": replace(
        _BERT, d_model="intra_bottleneck_size", default_activation="relu", adjust=_mobilebert,
        stacks=(Stack("encoder", times="num_feedforward_networks"),),
    ),
    "convbert": replace(_BERT, adjust=_ungrouped("num_groups", default=1)),
    "squeezebert": replace(_BERT, eps=(None, 1e-12), adjust=_ungrouped("intermediate_groups", "output_groups")),
    "ibert": replace(_BERT, adjust=_ibert),
    "xmod": replace(_BERT, position="pre", adjust=_xmod),
    "megatron-bert": replace(_PRE, aliases=("roberta-prelayernorm",)),
    "xlm-roberta-xl": replace(_PRE, eps=("layer_norm_eps", 1e-5)),
    "esm": replace(_PRE, activation=None, adjust=lambda config: {"activation": "gelu"}),
    "clip_text_model": replace(_PRE, default_activation="quick_gelu", eps=("layer_norm_eps", 1e-5)),
    "tipsv2_text_model": replace(_PRE, default_activation="relu", eps=("layer_norm_eps", 1e-5)),
    "vit": replace(_PRE, aliases=("vilt",)),
    "gte": replace(_BERT, gated=True, bias=False, adjust=lambda config: {"down_bias": True}),
    "nomic_bert": replace(_BERT, gated=True, bias=False, default_activation="silu"),
    "modernbert": replace(_MODERNBERT, stacks=_ENCODER),
    "modernbert-decoder": _MODERNBERT,
    "eurobert": replace(_LLAMA, eps=("rms_norm_eps", 1e-5)),
    "ultrabert": _LLAMA,
    "esmc": replace(_LLAMA, norm="layernorm", eps=(None, 1e-5), adjust=_esmc),
    "neomme": replace(
        _LLAMA, gated=False, default_activation="relu2", eps=("norm_eps", 1e-6), adjust=_neomme
    ),
    "perceiver": replace(
        _PRE, d_model="d_latents", d_ff=None, eps=(None, 1e-5), adjust=_perceiver, layer=_perceiver_layer,
        stacks=(
            Stack("cross", lambda config: 1), Stack("self", "num_self_attends_per_block", runs=_blocks),
            Stack("decoder", lambda config: 1),
        ),
    ),
}  # fmt: skip
