"""Count a model's parameters outside its FFN blocks from the config alone: attention, norms, embeddings and head.

RESTS has one row (Rest) per model family, like `families.FAMILIES`; rows only read fields and build no model. The count
covers the base model, plus the language-model head of language models. BERT and its relatives include their pooler (as
in the published 109,482,240 for bert-base); ViT excludes pooler and classifier. MIXED holds the rows of families whose
layers differ, that have tables besides the input embedding, or whose class has no head. Facts: transformers 5.23
`configuration_*.py` and `modeling_*.py`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ffncli.block.cost import step_costs
from ffncli.block.steps import input_shapes
from ffncli.models.config import attention, mixers, state_spaces
from ffncli.models.config.attention import Attention, Flag, Heads, Latent, flag
from ffncli.models.config.delta import GatedDelta, KimiDelta
from ffncli.models.files.strict_json import Fields
from ffncli.models.model import Group, LayerParams, NonFFN, Projection
from ffncli.options.accept import MAX_SIZE


def non_ffn(config: Fields, model_type: str, groups: Sequence[Group]) -> NonFFN | None:
    """Count the parameters around the FFN blocks `groups`; `model_type` is spelled as in config.json. None if the
    family's attention is unknown, or if the config lacks a required field.

    Raises FFNError, with file, field and value, if a value is impossible.
    """
    row = RESTS.get(model_type) or PAPERS.get(model_type)
    if row is None:
        return None
    row = row.adjust(config, row)
    needed = (row.d_model, *row.attention.needs, *row.needs, *([row.vocabulary] if row.vocabulary else []))
    if any(config.get(names, None) is None for names in needed):
        return None
    d_model = config.integer(row.d_model)
    tied = row.head is not None and config.flag("tie_word_embeddings", row.tied)
    vocabulary = config.integer(row.vocabulary) if row.vocabulary else 0
    table = vocabulary * int(config.integer(row.embedding, d_model) if row.embedding else d_model)
    head = 0 if row.head is None or tied else table
    bias = vocabulary if row.head is not None and flag(config, row.head) else 0
    layers: dict[str, dict[int, LayerParams]] = {}
    between = {i: _layer(config, row, mixer, d_model) for i, mixer in row.between(config).items()}
    tables, other = row.tables(config, d_model), row.other(config, d_model)
    parts = {("", "input embedding"): table, ("", "other embeddings"): other,
             ("", "tables"): tables, ("", "head"): head + bias,
             ("", "layers without FFN"): sum(layer.params for layer in between.values())}  # fmt: skip
    for stack in row.stacks:
        if those := [group for group in groups if group.stack == stack.name]:
            layers[stack.name] = _layers(config, row, stack, d_model, those)
            parts[stack.name, "layers"] = sum(layer.params for layer in layers[stack.name].values())
            parts[stack.name, "positions"] = stack.positions(config, d_model)
            parts[stack.name, "final norm"] = row.norm_vectors * d_model if row.final_norm else 0
            parts[stack.name, "stem"] = stack.stem(config, d_model)
    names = {"vocabulary": config.name(row.vocabulary or ""),
             "attention": ", ".join(dict.fromkeys(map(config.name, row.attention.fields)))}  # fmt: skip
    more = row.more_projections and (other or any(one.other for those in layers.values() for one in those.values()))
    lookup = tables + (0 if tied else table)
    return NonFFN(
        layers, parts if row.complete else None, lookup, vocabulary, names, between,
        named=row.names is not None, listed=not more,
    )  # fmt: skip


def _layers(
    config: Fields, row: "Rest", stack: "StackRow", d_model: int, groups: Sequence[Group]
) -> dict[int, LayerParams]:
    """Map each FFN block to the parameters of its layer. Each kind of attention is counted only once."""
    mixer = row.mixers(config) if row.mixers else lambda i: row.attention
    extra = row.extra(config, d_model)
    kinds: dict[Attention, LayerParams] = {}
    out: dict[int, LayerParams] = {}
    for group in groups:
        branch = row.branch_norms and any(step.output == "post_norm" for step in group.steps)
        norms = (row.norms + stack.cross + branch) * row.norm_vectors * d_model + _inner_norms(group)
        for i in group.layers:
            if (attention := mixer(i)) not in kinds:
                kinds[attention] = _layer(config, row, attention, d_model, stack.cross)
            out[i] = replace(kinds[attention], norms=norms, other=extra(i))
    return out


def _layer(config: Fields, row: "Rest", mixer: Attention, d_model: int, cross: bool = False) -> LayerParams:
    """Return the parameters of a layer with one mixer and one norm, and its projections as the family names them."""
    params = mixer.params(config, d_model) + (mixer.params(config, d_model, cross=True) if cross else 0)
    named: dict[str, Projection] = {}
    for one in mixer.matrices(config, d_model):
        name = (row.names or {}).get(one.name, one.name)
        rows = one.rows + (named[name].rows if name in named else 0)  # the parts of a fused projection are added
        named[name] = Projection(name, rows, one.columns)
    return LayerParams(params, row.norm_vectors * d_model, projections=tuple(named.values()))


def _inner_norms(group: Group) -> int:
    """Count the norms inside the FFN (on a latent or in every expert). The outer two norms are counted by the row."""
    costs = step_costs(group.steps, input_shapes(group.steps, (1,)))
    return sum(one.norm_params for name, one in costs.items() if name not in ("norm", "post_norm"))


Once = Callable[[Fields, int], int]


def none(config: Fields, d_model: int) -> int:
    """Return 0: the part is absent."""
    return 0


def nothing(config: Fields, d_model: int) -> Callable[[int], int]:
    """Return 0 for every layer: it has only attention, FFN and norms."""
    return lambda i: 0


@dataclass(frozen=True)
class StackRow:
    """A stack: its name, whether its layers have cross-attention, and its parts outside the layers."""

    name: str = "decoder"
    cross: bool = False
    positions: Once = none
    stem: Once = none


@dataclass(frozen=True, kw_only=True)
class Rest:
    """The parameters of one family outside its FFNs. Each layer has `norms` norms (and one more with cross-attention)
    of `norm_vectors` vectors: 2 with bias, 1 without, 0 for norms without parameters. `embedding` is the field that
    holds the embedding table's width if it differs from d_model. `head` None: there is no head. `adjust` computes the
    row for a config if plain fields cannot express it. `complete` False: only the layers are known.

    If layers differ, `mixers` returns each layer's attention (or its replacement). `extra` counts a layer's parameters
    besides attention, FFN and norms; besides the input embedding, `tables` counts the tables that are looked up by
    token; `between` returns the mixers of the layers without an FFN.

    `names` maps names of projections to the family's own names, if they differ; several that map to one name are one
    fused projection. None: the family's names are not known. `more_projections`: `extra` and `other` count projections.
    """

    attention: Attention = field(default_factory=Heads)
    mixers: Callable[[Fields], Callable[[int], Attention]] | None = None
    extra: Callable[[Fields, int], Callable[[int], int]] = nothing
    tables: Once = none
    between: Callable[[Fields], Mapping[int, Attention]] = lambda config: {}
    names: Mapping[str, str] | None = field(default_factory=dict)
    more_projections: bool = False
    d_model: str = "hidden_size"
    norms: int = 2
    branch_norms: bool = False  # whether a norm on an FFN's branch comes in addition, in the layers that have one
    norm_vectors: int = 1
    final_norm: bool = True
    vocabulary: str | None = "vocab_size"
    embedding: str | None = None
    other: Once = none
    head: Flag | None = False  # whether the head has a bias
    tied: bool = False
    stacks: Sequence[StackRow] = (StackRow(),)
    needs: Sequence[str] = ()
    complete: bool = True
    adjust: "Callable[[Fields, Rest], Rest]" = lambda config, row: row


# --- not in a plain field: computed by code --------------------------------------------------------------------


def _norm(config: Fields, d_model: int) -> int:
    """Count a layer norm on the embeddings."""
    return 2 * d_model


def _table(names: str, default: int | None = None, extra: int = 0) -> Once:
    """Build a function that counts a learned position table: the field's value + `extra` rows of d_model columns."""

    def count(config: Fields, d_model: int) -> int:
        rows = config.integer(names) if default is None else config.integer(names, default)
        return (rows + extra) * d_model

    return count


def _t5_table(config: Fields, d_model: int) -> int:
    """Count T5's relative positions: a logit per head and bucket, stored in layer 0 of each stack and used by all its
    layers."""
    return config.integer("relative_attention_num_buckets", 32) * config.integer("num_heads")


def _whisper_stem(config: Fields, d_model: int) -> int:
    """Count two convolutions of width 3 with bias; the first reads mel bins, the second reads d_model channels."""
    return 3 * d_model * (config.integer("num_mel_bins", 80) + d_model) + 2 * d_model


def _bert_other(pooler: bool, types: int = 2) -> Once:
    """Build a function that counts positions, token types and norm, the embeddings' projection, and the pooler."""

    def count(config: Fields, d_model: int) -> int:
        width = config.integer("embedding_size", d_model)
        rows = config.integer("max_position_embeddings", 512) + int(config.integer("type_vocab_size", types, low=0))
        projection = 0 if width == d_model else (width + 1) * d_model
        return (rows + 2) * width + projection + ((d_model + 1) * d_model if pooler else 0)

    return count


def _sides(config: Fields, name: str, default: int) -> tuple[int, int]:
    """Read height and width in pixels, given as one number for both or as two numbers."""
    value = config.values.get(name)
    if type(value) is not list:
        side = config.integer(name, default)
        return side, side
    if len(value) != 2 or any(type(side) is not int or not 1 <= side <= MAX_SIZE for side in value):
        raise config.wrong(name, value, "a side in pixels, or two")
    return value[0], value[1]


def _vit_positions(config: Fields, d_model: int) -> int:
    """Count one position per patch and one for the class token."""
    (height, width), (tall, wide) = _sides(config, "image_size", 224), _sides(config, "patch_size", 16)
    return ((height // tall) * (width // wide) + 1) * d_model


def _vit_stem(config: Fields, d_model: int) -> int:
    """Count the class token and the projection of patches, with bias."""
    tall, wide = _sides(config, "patch_size", 16)
    return d_model * (config.integer("num_channels", 3) * tall * wide + 1) + d_model


def _opt(config: Fields, row: Rest) -> Rest:
    bias = flag(config, ("enable_bias", True))
    final = config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm", False)
    affine = config.flag("layer_norm_elementwise_affine", True)
    heads = Heads(heads=None, qkv_bias=bias, output_bias=bias)
    return replace(row, attention=heads, final_norm=final, norm_vectors=2 if affine else 0)


def _opt_other(config: Fields, d_model: int) -> int:
    """Count the projections from a narrower embedding table to d_model and back; 0 if the table is not narrower."""
    width = config.integer("word_embed_proj_dim", d_model)
    return 0 if width == d_model else 2 * width * d_model


def _falcon(config: Fields, row: Rest) -> Rest:
    new = config.flag("new_decoder_architecture", False)
    one = config.flag("multi_query", True)
    kv_heads: str | int | None = "num_kv_heads|n_head_kv" if new else 1 if one else None
    norms = config.integer("num_ln_in_parallel_attn", 2 if new else 1, 1, 2)
    sequential = not config.flag("parallel_attn", True)
    return replace(
        row, norms=2 if sequential or (new and norms == 2) else 1,
        attention=Heads(heads="num_attention_heads|n_head", kv_heads=kv_heads, head_dim=None,
                        qkv_bias=("bias", False), output_bias=("bias", False)),
    )  # fmt: skip


def _chatglm(config: Fields, row: Rest) -> Rest:
    biased = config.flag("add_bias_linear", False)
    groups = "multi_query_group_num" if config.flag("multi_query_attention", False) else None
    heads = Heads(
        kv_heads=groups, head_dim="kv_channels", qkv_bias=biased or config.flag("add_qkv_bias", False),
        output_bias=biased,
    )  # fmt: skip
    final = config.flag("post_layer_norm", True)
    return replace(row, attention=heads, final_norm=final, norm_vectors=1 if config.flag("rmsnorm", True) else 2)


def _kimi(config: Fields, row: Rest) -> Rest:
    """Return Kimi-K3's row without names: those of its gates are not known."""
    return replace(row, names=None) if config.flag("mla_use_output_gate", False) else row


def _lfm(config: Fields, row: Rest) -> Rest:
    return replace(row, tied=config.flag("tie_embedding", True))


def _lfm3(config: Fields, row: Rest) -> Rest:
    return replace(row, norms=4 if config.flag("use_sandwich_norm", True) else 2)


def _qwen(config: Fields, row: Rest) -> Rest:
    heads = Heads(kv_heads=None, head_dim="kv_channels", qkv_bias=True, output_bias=not config.flag("no_bias", True))
    return replace(row, attention=heads)


def _renamed(at: str, output: str) -> Mapping[str, str]:
    """Map the projections of attention to a family's names: those of the module, and of the output's projection."""
    return {"self_attn.o_proj": f"{at}.{output}"} | {f"self_attn.{n}_proj": f"{at}.{n}_proj" for n in "qkv"}


def _fused(at: str, into: str, output: str) -> Mapping[str, str]:
    """Map the projections of attention to a family's two: one to queries, keys and values, and one to the output."""
    return {**_renamed(at, output), **dict.fromkeys((f"self_attn.{n}_proj" for n in "qkv"), f"{at}.{into}")}


_GPT2_HEADS = Heads(heads=None, head_dim=None, qkv_bias=True, output_bias=True)


def _gpt_bigcode(config: Fields, row: Rest) -> Rest:
    one = config.flag("multi_query", True)
    return replace(row, attention=replace(_GPT2_HEADS, heads="n_head|num_attention_heads", kv_heads=1 if one else None))


# --- the families -----------------------------------------------------------------------------------------------------

_BIASED: Flag = ("attention_bias", False)
_LLAMA_HEADS = Heads(qkv_bias=_BIASED, output_bias=_BIASED)
_LLAMA = Rest(attention=_LLAMA_HEADS)
_MISTRAL = Rest(attention=Heads(kv_default=8))
_BIASED_HEADS = Heads(qkv_bias=("attention_bias", True), output_bias=("attention_bias", True))
_PHI_HEADS = Heads(head_dim=None, qkv_bias=True, output_bias=True, qk_norm=("qk_layernorm", False), qk_norm_bias=True)
_NORMED_HEADS = replace(_LLAMA_HEADS, qk_norm=True)
_NORMED = Rest(attention=_NORMED_HEADS)
_OLMO2 = Rest(attention=replace(_NORMED_HEADS, qk_norm_per_head=True))
_LATENT = Rest(attention=Latent())
_GEMMA_HEADS = replace(_LLAMA_HEADS, head_dim_default=256)
_GEMMA2_HEADS = replace(_GEMMA_HEADS, kv_default=4)
_GEMMA2 = Rest(attention=_GEMMA2_HEADS, norms=4, tied=True)
_GEMMA3 = replace(_GEMMA2, attention=replace(_GEMMA2_HEADS, qk_norm=True))
_GPT2 = Rest(
    names=None, attention=_GPT2_HEADS, d_model="n_embd|hidden_size", norm_vectors=2, tied=True,
    needs=("n_positions|n_ctx",),
    stacks=(StackRow(positions=_table("n_positions|n_ctx")),),
)  # fmt: skip
_BERT = Rest(
    names=None, attention=_GPT2_HEADS, norm_vectors=2, final_norm=False, head=None, other=_bert_other(pooler=True),
    stacks=(StackRow("encoder"),), needs=("max_position_embeddings",),
)  # fmt: skip
_T5_HEADS = Heads(heads="num_heads", kv_heads=None, head_dim="d_kv", head_dim_default=64)
_T5 = Rest(
    names=None, attention=_T5_HEADS, d_model="d_model", tied=True,
    stacks=(StackRow("encoder", positions=_t5_table), StackRow("decoder", True, _t5_table)),
)  # fmt: skip
_GPTJ = Rest(
    attention=Heads(heads=None), d_model="n_embd|hidden_size", norms=1, norm_vectors=2, head=True,
    names=_renamed("attn", "out_proj"),
)  # fmt: skip
_OUT = _renamed("self_attn", "out_proj")
_FALCON_NAMES = _fused("self_attention", "query_key_value", "dense")
_COHERE = Rest(
    attention=replace(_LLAMA_HEADS, qk_norm=("use_qk_norm", False), qk_norm_per_head=True), norms=1, tied=True
)
_GLM = Rest(attention=Heads(qkv_bias=("attention_bias", True), head_dim_default=128, kv_default=2))
_ERNIE_HEADS = Heads(qkv_bias=("use_bias", False), output_bias=("use_bias", False))
_BART_TABLE = _table("max_position_embeddings", 1024, 2)
_BART = Rest(
    names=None, attention=_GPT2_HEADS, d_model="d_model", norm_vectors=2, tied=True, final_norm=False,
    stacks=(StackRow("encoder", False, _BART_TABLE, _norm), StackRow("decoder", True, _BART_TABLE, _norm)),
)  # fmt: skip
_QWEN = Rest(attention=mixers.QWEN_HEADS, mixers=mixers.qwen(fused=False), needs=GatedDelta().needs)
_INDEXED = Rest(attention=Latent(), mixers=mixers.chosen_tokens, needs=("index_n_heads", "index_head_dim"))
_GEMMA4 = Rest(
    more_projections=True,
    attention=mixers.GemmaHeads(1, 1), mixers=mixers.gemma4, norms=4, tied=True, other=attention.per_layer_projection,
    extra=attention.per_layer_matrices, tables=attention.per_layer_table, needs=("hidden_size_per_layer_input",),
)  # fmt: skip
_SINK_HEADS = replace(_BIASED_HEADS, sinks=True, head_dim_default=64, kv_default=8)
_MUSE_HEADS = Heads(qkv_bias=_BIASED, output_bias=_BIASED, gate=False, kv_default=2, head_dim_default=128)
MIXED: Mapping[str, Rest] = {
    "qwen3_next": replace(_QWEN, mixers=mixers.qwen(fused=True)),
    **dict.fromkeys(("qwen3_5_text", "qwen3_5_moe_text"), _QWEN),
    "qwen4_exp_text": replace(
        _QWEN, attention=mixers.QWEN4_HEADS, mixers=mixers.qwen4, norms=0, final_norm=False, other=mixers.qwen4_last,
        extra=mixers.qwen4_extra, tables=attention.ngram_table, more_projections=True,
    ),
    "kimi_linear": Rest(
        attention=Latent(), mixers=mixers.kimi, extra=mixers.kimi_residuals, other=mixers.kimi_last_residual,
        needs=KimiDelta().needs, adjust=_kimi,
    ),
    "deepseek_v4": Rest(
        attention=mixers.Compressed(), mixers=mixers.deepseek_v4, extra=mixers.streams, other=mixers.last_streams,
        needs=("index_n_heads", "index_head_dim"),
    ),
    "glm_moe_dsa": _INDEXED,
    "glm5_next_text": replace(_INDEXED, mixers=mixers.glm5_next, extra=mixers.streams),
    "hy_v4": replace(_INDEXED, mixers=mixers.hy4, extra=mixers.narrow_streams, other=mixers.last_streams),
    "axk2": replace(_INDEXED, mixers=None, attention=mixers.FromBothLatents(indexer=True), extra=mixers.gated_norm,
                    more_projections=True),
    "bailing_hybrid": Rest(attention=Latent(), mixers=mixers.ling3),
    "gemma3n_text": replace(_GEMMA4, mixers=mixers.gemma3n, extra=mixers.gemma3n_extra, other=mixers.gemma3n_last),
    "gemma4_text": _GEMMA4,
    "muse_spark_text": Rest(attention=replace(_MUSE_HEADS, kv_default=16, head_dim_default=64), norms=3,
                            extra=lambda config, d_model: lambda i: 2 * d_model),  # the gates of the two residuals
    "muse_glimmer_text": Rest(attention=_MUSE_HEADS, norms=4),
    "gemma4_unified_text": Rest(attention=mixers.GemmaHeads(1, 1), mixers=mixers.gemma4, norms=4, tied=True),
    "deepseek_v32": replace(_INDEXED, mixers=None, attention=Latent(indexer=True)),
    "mistral4": _LATENT,
    "longcat_flash": replace(_LATENT, names=None),  # two attentions in a layer
    "axk1": replace(_LATENT, branch_norms=True),
    "dots3_note_text": Rest(attention=Latent(), mixers=mixers.dots3),
    "mistral_large4_text": Rest(attention=Latent(), mixers=mixers.mistral_large4),
    "minimax_m3_vl_text": Rest(attention=Heads(), mixers=mixers.minimax),
    "mimo_v2_flash": Rest(attention=Heads(), mixers=mixers.mimo),
    "step3p5": Rest(attention=Heads(), mixers=mixers.step),
    "bamba": Rest(attention=Heads(), mixers=state_spaces.bamba),
    "granitemoehybrid": Rest(attention=Heads(), mixers=state_spaces.granite),
    "jamba": Rest(attention=Heads(), mixers=state_spaces.jamba),
    **dict.fromkeys(("lfm2", "lfm2_moe"),
                    Rest(attention=Heads(), mixers=state_spaces.lfm2, tied=True, adjust=_lfm, names=_OUT)),
    "lfm3": Rest(attention=Heads(), mixers=state_spaces.lfm3, tied=True, adjust=_lfm3),
    "olmo_hybrid": Rest(attention=Heads(), mixers=state_spaces.olmo),
    "nemotron_h": Rest(
        attention=state_spaces.Absent(), norms=1, between=state_spaces.nemotron, needs=("num_attention_heads",)
    ),
    "openai_privacy_filter": Rest(attention=replace(_SINK_HEADS, kv_default=2), head=None),
}  # fmt: skip
RESTS: Mapping[str, Rest] = {
    "gpt2": _GPT2,
    "openai-gpt": replace(_GPT2, final_norm=False),
    "gpt_neo": Rest(
        names=_renamed("attn.attention", "out_proj"),
        attention=Heads(heads=None, output_bias=True), norm_vectors=2, tied=True,
        stacks=(StackRow(positions=_table("max_position_embeddings", 2048)),),
    ),
    "gpt_bigcode": replace(_GPT2, adjust=_gpt_bigcode, names=_fused("attn", "c_attn", "c_proj")),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert"), _BERT),
    "electra": replace(_BERT, embedding="embedding_size", other=_bert_other(pooler=False)),
    "vit": Rest(
        names=None,
        attention=Heads(heads=None, qkv_bias=("qkv_bias", True), output_bias=True), norm_vectors=2, vocabulary=None,
        head=None, stacks=(StackRow("encoder", positions=_vit_positions, stem=_vit_stem),),
    ),
    "t5": _T5,
    "mt5": _T5,
    "umt5": replace(
        _T5, stacks=(StackRow("encoder"), StackRow("decoder", True)),
        attention=replace(_T5_HEADS, buckets=("relative_attention_num_buckets", 32)),
    ),
    "whisper": Rest(
        names=None,
        attention=replace(_GPT2_HEADS, key_bias=False), d_model="d_model", norm_vectors=2, tied=True,
        stacks=(StackRow("encoder", positions=_table("max_source_positions", 1500), stem=_whisper_stem),
                StackRow("decoder", True, _table("max_target_positions", 448))),
    ),
    "opt": Rest(
        names=_OUT, more_projections=True,
        norm_vectors=2, tied=True, embedding="word_embed_proj_dim", other=_opt_other, adjust=_opt,
        stacks=(StackRow(positions=_table("max_position_embeddings", 2048, 2)),),
    ),
    "biogpt": Rest(
        names=_OUT,
        attention=_GPT2_HEADS, norm_vectors=2, tied=True,
        stacks=(StackRow(positions=_table("max_position_embeddings", 1024, 2)),),
    ),
    "xglm": Rest(names=_OUT, attention=_GPT2_HEADS, d_model="d_model|hidden_size", norm_vectors=2, tied=True),
    "bart": _BART,
    "mbart": replace(_BART, final_norm=True),
    "modernbert": Rest(
        names=None,  # the embedding norm replaces layer 0's first norm
        attention=Heads(heads=None, qkv_bias=_BIASED, output_bias=_BIASED), head=None, stacks=(StackRow("encoder"),),
        adjust=lambda config, row: replace(row, norm_vectors=2 if config.flag("norm_bias", False) else 1),
    ),
    "bloom": Rest(
        attention=_GPT2_HEADS, d_model="n_embed|n_embd|hidden_size", norm_vectors=2, tied=True, other=_norm,
        names=_FALCON_NAMES,
    ),
    "gpt_neox": Rest(
        attention=replace(_BIASED_HEADS, heads=None), norm_vectors=2,
        names=_fused("attention", "query_key_value", "dense"),
    ),
    **dict.fromkeys(("falcon", "RefinedWebModel"),
                    Rest(norm_vectors=2, tied=True, adjust=_falcon, names=_FALCON_NAMES)),
    "RefinedWeb": Rest(
        attention=Heads(heads="n_head", kv_heads="n_head_kv", head_dim=None), norm_vectors=2, tied=True,
        names=_FALCON_NAMES,
    ),
    "phi": Rest(
        attention=_PHI_HEADS, norms=1, norm_vectors=2, head=True, names=_renamed("self_attn", "dense"),
    ),
    **dict.fromkeys(("llama", "granite", "granitemoe", "granitemoeshared", "arcee", "aria_text"), _LLAMA),
    "smollm3": replace(_LLAMA, tied=True, attention=replace(_LLAMA_HEADS, kv_default=4)),
    **dict.fromkeys(("mistral", "ministral", "mixtral"), _MISTRAL),
    **dict.fromkeys(("ministral3", "cwm"), Rest(attention=Heads(kv_default=8, head_dim_default=128))),
    "phi3": Rest(names=_fused("self_attn", "qkv_proj", "o_proj")),
    "qwen2": Rest(attention=Heads(qkv_bias=True, kv_default=32)),
    "qwen2_moe": Rest(attention=Heads(qkv_bias=("qkv_bias", True), kv_default=16)),
    "qwen3": Rest(attention=replace(_NORMED_HEADS, head_dim_default=128, kv_default=32)),
    "qwen3_moe": Rest(attention=replace(_NORMED_HEADS, kv_default=4)),
    **dict.fromkeys(("olmo2", "olmo3", "olmoe", "flex_olmo"), _OLMO2),
    **dict.fromkeys(("olmo", "nanochat"), replace(_LLAMA, norm_vectors=0)),
    "gemma": Rest(attention=replace(_GEMMA_HEADS, kv_default=16), tied=True),
    "gemma2": _GEMMA2,
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "vaultgemma": replace(_GEMMA2, norms=2),
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2"), _LATENT),
    **dict.fromkeys(("minicpm3", "youtu"), replace(_LATENT, tied=True)),
    "gpt_oss": Rest(attention=_SINK_HEADS),
    "cohere": _COHERE,
    "cohere2": replace(_COHERE, attention=_LLAMA_HEADS),
    "cohere2_moe": replace(_COHERE, attention=replace(_LLAMA_HEADS, head_dim_default=128)),
    "stablelm": Rest(
        attention=Heads(head_dim=None, qkv_bias=("use_qkv_bias", False), qk_norm=("qk_layernorm", False),
                        qk_norm_per_head=True, kv_default=32),
        norm_vectors=2,
        adjust=lambda config, row: replace(row, norms=1 if config.flag("use_parallel_residual", False) else 2),
    ),
    "starcoder2": Rest(
        attention=Heads(qkv_bias=("use_bias", True), output_bias=("use_bias", True), kv_default=2), norm_vectors=2,
        tied=True,
    ),
    "glm": _GLM,
    "glm4": replace(_GLM, norms=4),
    "glm4_moe": Rest(attention=Heads(qkv_bias=_BIASED, qk_norm=("use_qk_norm", False), kv_default=8)),
    "seed_oss": Rest(
        attention=replace(_BIASED_HEADS, output_bias=("attention_out_bias", False), kv_default=8, head_dim_default=128),
    ),
    **dict.fromkeys(("exaone4", "exaone_moe"), Rest(attention=Heads(qk_norm=True, kv_default=32))),
    "nemotron": replace(_LLAMA, norm_vectors=2),
    "jais2": Rest(attention=_BIASED_HEADS, norm_vectors=2),
    "helium": Rest(attention=Heads(qkv_bias=_BIASED, head_dim_default=128, kv_default=20)),
    "solar_open": Rest(attention=Heads(qkv_bias=_BIASED, head_dim_default=128, kv_default=8)),
    "phimoe": replace(
        _LLAMA, norm_vectors=2, head=("lm_head_bias", False), attention=replace(_LLAMA_HEADS, kv_default=8)
    ),
    "afmoe": Rest(
        attention=Heads(qk_norm=True, gate=False, qkv_bias=_BIASED, output_bias=_BIASED, head_dim_default=128), norms=4
    ),
    "kolibri1": Rest(attention=Heads(qk_norm=True, kv_default=4, head_dim_default=128), norms=4),
    "internlm3": Rest(attention=replace(_LLAMA_HEADS, head_dim_default=128, kv_default=2)),
    "iquestcoder": Rest(attention=replace(_LLAMA_HEADS, head_dim_default=128, kv_default=8)),
    "minimax_m2": Rest(attention=Heads(qk_norm=True, qk_norm_per_head=True, kv_default=8, head_dim_default=128)),
    **dict.fromkeys(("hunyuan_v1_dense", "hunyuan_v1_moe", "apertus"), _NORMED),
    "dots1": Rest(attention=replace(_NORMED_HEADS, kv_default=32)),
    "hy_v3": Rest(attention=replace(_NORMED_HEADS, head_dim_default=128, kv_default=8)),
    "mellum": Rest(attention=replace(_NORMED_HEADS, head_dim_default=128, kv_default=4)),
    "llama4_text": replace(_LLAMA, attention=replace(_LLAMA_HEADS, head_dim_default=128, kv_default=8)),
    "ernie4_5": Rest(attention=replace(_ERNIE_HEADS, kv_default=2, head_dim_default=128), tied=True),
    "ernie4_5_moe": Rest(attention=replace(_ERNIE_HEADS, kv_default=4), head=("use_bias", False), tied=True),
    "gptj": _GPTJ,
    "codegen": replace(_GPTJ, names=_fused("attn", "qkv_proj", "out_proj")),
    "persimmon": Rest(
        attention=replace(_PHI_HEADS, kv_heads=None, qk_norm=("qk_layernorm", True)), norm_vectors=2,
        names=_fused("self_attn", "query_key_value", "dense"),
    ),
    "mpt": Rest(
        attention=Heads(heads=None), d_model="d_model", tied=True, names=_fused("attn", "Wqkv", "out_proj"),
    ),
    # Remote code that is not in transformers; these rows were checked against published totals.
    "baichuan": Rest(names=None, attention=Heads(kv_heads=None, head_dim=None)),
    "internlm2": Rest(
        attention=Heads(head_dim=None, qkv_bias=("bias", True), output_bias=("bias", True)), names=None,
    ),
    "chatglm": Rest(vocabulary="padded_vocab_size", adjust=_chatglm, needs=("kv_channels",), names=None),
    "qwen": Rest(adjust=_qwen, needs=("kv_channels",), names=None),
    "grok-1": Rest(attention=Heads(), norms=4, needs=("head_dim",), names=None),  # Grok-2; Grok-1's head may be tied
    "PanguProMoE": Rest(attention=Heads(qkv_bias=True, output_bias=True), names=None),
    "distilbert": replace(_BERT, d_model="dim|hidden_size", other=_bert_other(pooler=False, types=0)),
    **MIXED,
}  # fmt: skip
# Models from papers, without a config.json. Vaswani et al. (2017): attention matrices have no biases (§3.2.2), norms
# follow each residual sum (§3.1), positions are sines. The paper gives no exact totals. With its "about 37000 tokens"
# (§5.1), and one table for both embeddings and the head, the totals would be 63.0 and 214.2 million; its table 3 says
# 65 and 213.
PAPERS: Mapping[str, Rest] = {
    "transformer": Rest(
        names=None,
        attention=Heads(kv_heads=None, head_dim=None), d_model="d_model", norm_vectors=2, final_norm=False,
        vocabulary=None, head=None, stacks=(StackRow("encoder"), StackRow("decoder", True)), complete=False,
    ),
}  # fmt: skip
