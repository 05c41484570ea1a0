"""The whole model around its FFN blocks: attention, norms, embeddings and head, from the config alone.

One row of RESTS per model family, as in `config.FAMILIES`: fields are read, nothing is built. What is counted is the
base model, with its language-model head where it is a language model: BERT and its kin with their pooler (as published:
109,482,240 for bert-base), ViT without pooler and classifier. Facts: transformers 5.23 `modeling_*.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from ffncli.models.attention import flag
from ffncli.models.fields import Fields
from ffncli.models.rest import PAPERS, RESTS, Rest, StackRow


@dataclass(frozen=True)
class StackRest:
    """One stack beside its FFN. `attention` (cross-attention included) and `norms` (all, also those that only the FFN
    uses) are of one layer; position table, final norm and `stem` (convolutions or patches at its input) come once.
    """

    name: str
    attention: int
    norms: int
    positions: int
    final_norm: int
    stem: int

    def params(self, layers: int) -> int:
        """The stack's parameters beside the FFN, with so many layers."""
        return layers * (self.attention + self.norms) + self.positions + self.final_norm + self.stem


@dataclass(frozen=True)
class Whole:
    """Every parameter of a model beside its FFN blocks. A tied `head` counts 0: it is the input embedding.

    `vocabulary` is the config's, `fields` are its names of that and of what makes the attention, for messages.
    Not `complete`: its embeddings are not known, so there are no totals.
    """

    stacks: tuple[StackRest, ...]
    input_embedding: int
    other_embeddings: int
    head: int
    tied: bool
    vocabulary: int = 0
    fields: tuple[str, str] = ("", "")
    complete: bool = True

    def stack(self, name: str) -> StackRest | None:
        """The stack of that name, or None."""
        return next((stack for stack in self.stacks if stack.name == name), None)


@dataclass(frozen=True)
class Totals:
    """A whole model's parameters, and the FFN's share of all. Active: without the experts that a token does not choose.

    `..._no_embedding` leaves out the input embedding table, which is looked up and not multiplied; a tied one stays,
    because it is multiplied as the head.
    """

    model_params_total: int
    model_params_active: int
    model_params_active_no_embedding: int
    ffn_share_of_model: float


def totals(whole: Whole, layers: Mapping[str, int], ffn_total: int, ffn_active: int) -> Totals:
    """Joins what is beside the FFN with the FFN's own counts (without norms: `whole` has them).

    `layers` says how many layers each stack has; stacks that are not in it are not part of the model.
    """
    rest = sum(stack.params(layers[stack.name]) for stack in whole.stacks if stack.name in layers)
    rest += whole.input_embedding + whole.other_embeddings + whole.head
    lookup = 0 if whole.tied else whole.input_embedding
    total, active = rest + ffn_total, rest + ffn_active
    return Totals(total, active, active - lookup, ffn_total / total)


class HasRest(Protocol):
    """What knows a layer's attention and norms."""

    @property
    def attention(self) -> int:
        """Parameters of the attention or mixer."""

    @property
    def norms(self) -> int:
        """Parameters of all norms."""


def share_of_layer(ffn_params: int, rest: HasRest) -> float:
    """The FFN's share of one layer's parameters, attention and norms beside it."""
    return ffn_params / (ffn_params + rest.attention + rest.norms)


def whole(config: Fields, model_type: str) -> Whole | None:
    """What surrounds the FFN of a model of that `model_type`, as its config.json spells it; None where the family's
    attention is not known, or the config does not say what it takes.

    Raises FFNError, naming file, field and value, for a field that cannot be.
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
    stacks = tuple(_stack(config, row, stack, d_model) for stack in row.stacks)
    fields = config.name(row.vocabulary or ""), ", ".join(dict.fromkeys(map(config.name, row.attention.fields)))
    return Whole(stacks, table, row.other(config, d_model), head + bias, tied, vocabulary, fields, row.complete)


def _stack(config: Fields, row: Rest, stack: StackRow, d_model: int) -> StackRest:
    attention = row.attention.params(config, d_model)
    if stack.cross:
        attention += row.attention.params(config, d_model, cross=True)
    norm = row.norm_vectors * d_model
    return StackRest(
        stack.name, attention, (row.norms + stack.cross) * norm, stack.positions(config, d_model),
        norm if row.final_norm else 0, stack.stem(config, d_model),
    )  # fmt: skip
