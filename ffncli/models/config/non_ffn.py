"""What a model has outside its FFN blocks, from the config alone: attention, norms, embeddings and head.

One row of RESTS per model family, as in `families.FAMILIES`: fields are read, nothing is built. What is counted is the
base model, with its language-model head if it is a language model: BERT and its relatives with their pooler (as
published: 109,482,240 for bert-base), ViT without pooler and classifier. Facts: transformers 5.23 `modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.block.cost import step_costs
from ffncli.block.steps import input_shapes
from ffncli.models.config.attention import Attention, flag
from ffncli.models.config.non_ffn_rows import PAPERS, RESTS, Rest, StackRow
from ffncli.models.files.fields import Fields
from ffncli.models.model import Group, LayerParams, NonFFN


def non_ffn(config: Fields, model_type: str, groups: Sequence[Group]) -> NonFFN | None:
    """The parameters around the FFN blocks `groups` of a model of that `model_type`, as spelled in its config.json;
    None if the family's attention is unknown, or the config lacks a field for it.

    Raises FFNError, naming file, field and value, for an impossible value.
    """
    row = RESTS.get(model_type) or PAPERS.get(model_type)
    if row is None:
        return None
    row = row.adjust(config, row)
    needed = (row.d_model, *row.attention.needs, *row.needs, *([row.vocabulary] if row.vocabulary else []))
    if any(config.get(names, None) is None for names in needed):
        return None
    d_model: int = config.integer(row.d_model)
    tied = row.head is not None and config.flag("tie_word_embeddings", row.tied)
    vocabulary: int = config.integer(row.vocabulary) if row.vocabulary else 0
    table = vocabulary * int(config.integer(row.embedding, d_model) if row.embedding else d_model)
    head = 0 if row.head is None or tied else table
    bias = vocabulary if row.head is not None and flag(config, row.head) else 0
    layers: dict[str, dict[int, LayerParams]] = {}
    tables = row.tables(config, d_model)
    parts = {("", "input embedding"): table, ("", "other embeddings"): row.other(config, d_model),
             ("", "tables"): tables, ("", "head"): head + bias}  # fmt: skip
    for stack in row.stacks:
        if those := [group for group in groups if group.stack == stack.name]:
            layers[stack.name] = _layers(config, row, stack, d_model, those)
            parts[stack.name, "layers"] = sum(layer.params for layer in layers[stack.name].values())
            parts[stack.name, "positions"] = stack.positions(config, d_model)
            parts[stack.name, "final norm"] = row.norm_vectors * d_model if row.final_norm else 0
            parts[stack.name, "stem"] = stack.stem(config, d_model)
    names = {"vocabulary": config.name(row.vocabulary or ""),
             "attention": ", ".join(dict.fromkeys(map(config.name, row.attention.fields)))}  # fmt: skip
    return NonFFN(layers, parts if row.complete else None, tables + (0 if tied else table), vocabulary, names)


def _layers(
    config: Fields, row: Rest, stack: StackRow, d_model: int, groups: Sequence[Group]
) -> dict[int, LayerParams]:
    """FFN block → its layer. Attention of one kind is counted once."""
    mixer = row.mixers(config) if row.mixers else lambda i: row.attention
    extra = row.extra(config, d_model)
    sizes: dict[Attention, int] = {}
    out: dict[int, LayerParams] = {}
    for group in groups:
        norms = (row.norms + stack.cross) * row.norm_vectors * d_model + _inner_norms(group)
        for i in group.layers:
            if (attention := mixer(i)) not in sizes:
                cross = attention.params(config, d_model, cross=True) if stack.cross else 0
                sizes[attention] = attention.params(config, d_model) + cross
            out[i] = LayerParams(sizes[attention], norms, extra(i))
    return out


def _inner_norms(group: Group) -> int:
    """Norms inside the FFN (of a latent, of every expert), which are in no matrix of it: a row counts the outer two."""
    costs = step_costs(group.steps, input_shapes(group.steps, (1,)))
    return sum(one.norm_params for name, one in costs.items() if name not in ("norm", "post_norm"))
