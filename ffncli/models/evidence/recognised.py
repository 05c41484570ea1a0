"""A checkpoint's FFNs among its tensors, and the model that they describe, with or without a config."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ffncli.block import dtypes
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.models.evidence.agreement import TensorBlocks
from ffncli.models.evidence.non_ffn_agreement import NonFFNAgreement, non_ffn_agreement
from ffncli.models.files.inventory import Inventory
from ffncli.models.model import Resolved
from ffncli.models.tensors.names import looked_for
from ffncli.models.tensors.recognise import Layers, recognise_all
from ffncli.models.tensors.shapes import Item

NOT_WHOLE = "every expert needs all of its matrices; is the file complete?"


@dataclass(frozen=True)
class RecognisedTensors:
    """A checkpoint's logical tensors, and the FFNs among them.

    `others` are FFNs of other text models, `absent` names missing files (empty: none).
    """

    where: str
    items: Mapping[str, Item]
    layers: Layers
    others: Layers
    absent: str = ""


def recognised(
    items: Mapping[str, Item], d_model: int | None, where: str, absent: str = "", needed: bool = True
) -> RecognisedTensors:
    """The FFNs among some tensors. Raises FFNError if one is `needed` and there is none."""
    layers, others = recognise_all(items, d_model, where)
    if needed and not layers:
        raise FFNError(f"{where}: no FFN among {len(items):,} tensor names", f"looked for {looked_for()}")
    return RecognisedTensors(where, items, layers, others, absent)


def absent_files(inventory: Inventory) -> str:
    """The missing files of an index, in words; empty if none is missing."""
    absent = inventory.missing
    return f"{len(absent)} of {inventory.files} files are not here ({absent[0]})" if absent else ""


def with_tensors(
    resolved: Resolved, blocks: TensorBlocks, tensors: RecognisedTensors, outside: bool = True
) -> Resolved:
    """The model with these blocks, with its stored sizes and, if `outside`, with the parameters outside the FFNs."""
    model, stored = replace(resolved.model, groups=blocks.groups), blocks.stored
    if stored:
        row = dtypes.find(stored.formats[0])
        model = replace(model, dtype=row.name if row else stored.formats[0])
    if stored and not tensors.absent:
        params = sum(item.params * item.count for item in tensors.items.values())
        stored = replace(stored, file_params=params, file_bytes=sum(item.bytes for item in tensors.items.values()))
    rest = NonFFNAgreement(model.non_ffn)
    if outside:
        rest = non_ffn_agreement(model, tensors.items, tensors.layers)
    resolved = resolved.noted(*blocks.notes).without(*blocks.not_counted, *rest.not_counted).noted(*rest.notes)
    return replace(
        resolved,
        model=replace(model, non_ffn=rest.non_ffn),
        evidence=(*blocks.evidence, *resolved.evidence, *rest.evidence),
        differences=(*blocks.differences, *rest.differences),
        stored=stored,
        spots=blocks.spots,
    )
