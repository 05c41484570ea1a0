"""What lies beside the FFNs, config against tensors: attention of every layer, and the vocabulary.

Only what a family's row in `rest.py` says is compared, and only where the tensors leave no doubt (`beside.measure`):
a layer with adapters, or with several FFNs, is not. Of a multimodal model the vocabulary is not compared, because its
image or sound tokens may have rows that its text_config does not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ffncli.errors import shown
from ffncli.models.beside import Beside, Embedding, measure, words
from ffncli.models.matrices import Item
from ffncli.models.model import Difference, Model
from ffncli.models.recognise import Layers
from ffncli.models.whole import Whole

_PADDED_TO = (8, 16, 32, 64, 128, 256, 512)  # what tables are rounded up to, for the matrix units
OTHER_TOWERS = "the numbers are the text model's"


def with_rest(model: Model, items: Mapping[str, Item], layers: Layers) -> Model:
    """The model with what its tensors hold beside the FFNs, and with every difference from what its config says."""
    seen = measure(model, items, layers)
    model = replace(model, measured=seen)
    if seen.left_out:
        notes = tuple(note for note in model.notes if not note.startswith(OTHER_TOWERS))
        model = replace(model, notes=(*notes, f"{OTHER_TOWERS}; left out: {', '.join(words(seen.left_out))}"))
    if model.beside is None:
        return replace(model, evidence=(*model.evidence, *_evidence(seen)))
    said = model.beside
    found = [d for stack in said.stacks for d in _attention(said, seen, stack.name, stack.attention)]
    if seen.embedding and said.vocabulary and not seen.left_out:
        if _is_padded(said.vocabulary, seen.embedding.rows):
            model = model.noted(
                f"{said.fields[0]} is {said.vocabulary:,}; the embedding has {seen.embedding.rows:,} rows, padded"
            )
        else:
            found += _vocabulary(said, seen.embedding)
    return replace(model, differences=(*model.differences, *found))


def _evidence(seen: Beside) -> Iterator[str]:
    first = next((rest for stack in seen.layers.values() for rest in stack.values()), None)
    if first:
        yield f"attention and norms: from the tensors, as {shown(first.tensor, 120)}"
    if seen.params is not None:
        yield "whole model: every parameter that the tensors hold for the text, tied ones once"


def _attention(said: Whole, seen: Beside, stack: str, expected: int) -> Iterator[Difference]:
    """One difference for all layers of a stack that have another attention than the config's.

    Writers of quantized files give each module a bias, all zeros where the model has none: such may have more.
    """
    layers = seen.layers.get(stack, {})
    other = {
        i: rest for i, rest in layers.items()
        if expected not in (rest.attention, rest.attention + rest.table)
        and not (rest.packed and rest.matrices <= expected <= rest.attention)
    }  # fmt: skip
    if other:
        first = min(other)
        field = f"attention ({said.fields[1]})"
        numbers = f"{expected:,} parameters per layer", f"{other[first].attention:,}"
        yield Difference("attention", field, *numbers, other[first].tensor, stack, first, len(other))


def _is_padded(vocabulary: int, rows: int) -> bool:
    """Whether a table has the rows of the vocabulary, rounded up to a multiple."""
    return rows > vocabulary and any(rows == -(-vocabulary // to) * to for to in _PADDED_TO)


def _vocabulary(said: Whole, table: Embedding) -> Iterator[Difference]:
    if table.rows != said.vocabulary:
        yield Difference("vocabulary", said.fields[0], f"{said.vocabulary:,}", f"{table.rows:,}", table.tensor)
