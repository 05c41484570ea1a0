"""Parameters of a model outside its FFN blocks (attention, norms, embeddings, head): one record, whoever counted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import field, replace

from ffncli.dataclass import dataclass

# Why a part of a model is in none of its numbers (`NotCounted`), where config and tensors both may say so.
OTHER_TOWERS = "the numbers are the text model's"
MORE_TOKENS = "multi-token prediction, which a forward pass does without"


@dataclass(frozen=True)
class LayerParams:
    """One layer without its FFN: parameters of its attention or other mixer (cross-attention included), of all its
    norms, also those that only the FFN uses, and of what else it has (residual streams, its part of embeddings).
    """

    attention: int
    norms: int
    other: int = 0

    @property
    def params(self) -> int:
        """All of them."""
        return self.attention + self.norms + self.other

    def ffn_share(self, ffn_params: int) -> float:
        """The FFN's share of the whole layer, by parameters."""
        return ffn_params / (ffn_params + self.params)


@dataclass(frozen=True)
class NonFFN:
    """What a model has outside its FFN blocks. `layers`: stack → FFN block → its layer, for those that are known.

    `parts`: (stack, what) → parameters, "" for what is in no stack (embeddings, an untied head); None where the total
    is unknown. `lookup` of them are only looked up and not multiplied: tables, and the input embedding unless it is
    tied to a head; None in doubt. `vocabulary` is the config's, 0 if it has none; `names` are the config's names for
    `vocabulary` and `attention`, for messages.
    """

    layers: Mapping[str, Mapping[int, LayerParams]]
    parts: Mapping[tuple[str, str], int] | None = None
    lookup: int | None = None
    vocabulary: int = 0
    names: Mapping[str, str] = field(default_factory=dict, compare=False)

    def layer(self, stack: str, blocks: Iterable[int]) -> LayerParams | None:
        """What the layers of these blocks have, if all are known and have the same."""
        layers = self.layers.get(stack, {})
        alike = {(layer.attention, layer.norms, layer.other) if (layer := layers.get(i)) else None for i in blocks}
        one = alike.pop() if len(alike) == 1 else None
        return LayerParams(*one) if one else None

    def params(self, stacks: Collection[str]) -> int | None:
        """All parameters of a model of these stacks; None where they are not known."""
        if self.parts is None:
            return None
        return sum(params for (stack, _), params in self.parts.items() if not stack or stack in stacks)


# --- by the tensors ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MeasuredLayer(LayerParams):
    """One layer by its tensors. `table` are the parameters of T5's relative positions, not in `attention`; `matrices`
    those of the attention's matrices alone; `packed`: some of it is quantized. `tensor` names one of its keys, else
    another of it.
    """

    table: int = 0
    matrices: int = 0
    packed: bool = False
    tensor: str = ""


@dataclass(frozen=True)
class Embedding:
    """The table that tokens are looked up in: its name and its shape, [rows, params / rows]."""

    tensor: str
    rows: int
    params: int


@dataclass(frozen=True)
class MeasuredNonFFN:
    """What the tensors hold outside the FFNs, each of the `layers` as its tensors show it.

    `params` are all of the text model, None in doubt; `lookup` as in `NonFFN`. `left_out`: module → its parameters, for
    other towers.
    """

    layers: Mapping[str, Mapping[int, MeasuredLayer]]
    embedding: Embedding | None = None
    params: int | None = None
    lookup: int | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)

    def record(self, config: NonFFN | None) -> NonFFN:
        """The parameters as stored (a base model has no head); what the tensors leave open is taken from the config."""
        base = config or NonFFN(self.layers)
        return base if self.params is None else replace(base, parts={("", "all"): self.params}, lookup=self.lookup)
