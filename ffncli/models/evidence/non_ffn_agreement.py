"""The parameters outside the FFNs, config against tensors: attention of every layer, and the vocabulary.

Compares only what a family's row in `non_ffn_rows` describes, and only if the tensors leave no doubt
(`non_ffn.measure`): a layer with adapters, or with several FFNs, is skipped. A multimodal model's vocabulary is not
compared, because its image or sound tokens may have rows that its text_config does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ffncli.dataclass import dataclass
from ffncli.errors import shown
from ffncli.models.model import Disagreement, Model, NotCounted
from ffncli.models.non_ffn import OTHER_TOWERS, Embedding, MeasuredNonFFN, NonFFN
from ffncli.models.tensors.non_ffn import measure
from ffncli.models.tensors.recognise import Layers
from ffncli.models.tensors.shapes import Item

_PADDED_TO = (8, 16, 32, 64, 128, 256, 512)  # what tables are rounded up to, for the matrix units


@dataclass(frozen=True)
class NonFFNAgreement:
    """The parameters outside the FFNs by config and tensors together, and notes about them.

    `not_counted` are the modules of other towers.
    """

    non_ffn: NonFFN | None
    differences: tuple[Disagreement, ...] = ()
    evidence: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    not_counted: tuple[NotCounted, ...] = ()


def non_ffn_agreement(model: Model, items: Mapping[str, Item], layers: Layers) -> NonFFNAgreement:
    """The parameters of a complete checkpoint outside the FFNs, and every difference from its config."""
    measured, config = measure(model, items, layers), model.non_ffn
    towers = tuple(
        NotCounted(f"module {shown(module)}", OTHER_TOWERS, params) for module, params in measured.left_out.items()
    )
    if config is None:
        return NonFFNAgreement(measured.record(None), evidence=tuple(_evidence(measured)), not_counted=towers)
    differences = [d for stack in config.layers for d in _attention(config, measured, stack)]
    notes: list[str] = []
    table = measured.embedding
    if table and config.vocabulary and not measured.left_out:
        if _is_padded(config.vocabulary, table.rows):
            rows = f"the embedding has {table.rows:,} rows, padded"
            notes.append(f"{config.names['vocabulary']} is {config.vocabulary:,}; {rows}")
        else:
            differences += _vocabulary(config, table)
    return NonFFNAgreement(measured.record(config), tuple(differences), (), tuple(notes), towers)


def _evidence(measured: MeasuredNonFFN) -> Iterator[str]:
    first = next((layer for stack in measured.layers.values() for layer in stack.values()), None)
    if first:
        yield f"attention and norms: from the tensors, as {shown(first.tensor, 120)}"
    if measured.params is not None:
        yield "whole model: every text parameter in the tensors, tied ones once"


def _attention(config: NonFFN, measured: MeasuredNonFFN, stack: str) -> Iterator[Disagreement]:
    """One difference for all layers of a stack whose attention differs from the config's.

    Writers of quantized files give each module a bias, all zeros if the model has none, so these may have more.
    """
    by_config = {i: layer.attention for i, layer in config.layers[stack].items()}
    other = {
        i: layer for i, layer in measured.layers.get(stack, {}).items()
        if by_config[i] not in (layer.attention, layer.attention + layer.table)
        and not (layer.packed and layer.matrices <= by_config[i] <= layer.attention)
    }  # fmt: skip
    if other:
        first = min(other)
        name = f"attention ({config.names['attention']})"
        numbers = f"{by_config[first]:,} parameters per layer", f"{other[first].attention:,}"
        yield Disagreement("attention", name, *numbers, other[first].tensor, stack, first, len(other))


def _is_padded(vocabulary: int, rows: int) -> bool:
    """Whether a table has the rows of the vocabulary, rounded up to a multiple."""
    return rows > vocabulary and any(rows == -(-vocabulary // to) * to for to in _PADDED_TO)


def _vocabulary(config: NonFFN, table: Embedding) -> Iterator[Disagreement]:
    if table.rows != config.vocabulary:
        numbers = f"{config.vocabulary:,}", f"{table.rows:,}"
        yield Disagreement("vocabulary", config.names["vocabulary"], *numbers, table.tensor)
