"""A model from its config, checked against its checkpoint's tensors, which confirm, override or contradict it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

from ffncli.errors import FFNError, shown_path
from ffncli.models.evidence.agreement import agree
from ffncli.models.evidence.recognised import NOT_WHOLE, absent_files, recognised, with_tensors
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.inventory import Inventory, take_inventory
from ffncli.models.model import IN_ALL, UNEVEN, Disagreement, Resolved
from ffncli.models.tensors import layout
from ffncli.models.tensors.items import block_tensors, items_of

_MOST_LOOKS = 16  # each goes through all names once


def with_evidence(resolved: Resolved) -> Resolved:
    """The model according to its tensors, if it has any, with the differences from its config."""
    checkpoint = resolved.checkpoint
    if checkpoint is None:
        return _config_alone(resolved)
    compared = with_inventory(resolved, take_inventory(checkpoint))
    for difference in islice(filter(_may_be_the_files, compared.differences), _MOST_LOOKS):
        _require_all(compared, checkpoint, difference)
        if difference.name == UNEVEN:
            raise FFNError(f"{checkpoint.where}: {difference.where} has {difference.tensors}", NOT_WHOLE)
    return compared


def _may_be_the_files(difference: Disagreement) -> bool:
    """Whether a tensor that is missing or of a wrong shape would look like this."""
    none = (difference.name, difference.tensors) == ("experts", "0")
    return none or difference.name in ("layers", "gated", "bias", IN_ALL, UNEVEN)


def _config_alone(resolved: Resolved) -> Resolved:
    """The model with a note that there are no tensors to compare with."""
    if resolved.location is None or resolved.source.endswith(".json"):  # the source is the config itself
        return resolved
    pickled = any(any(resolved.location.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    also = " (pickled weights are not read: save them as safetensors)" if pickled else ""
    return resolved.noted(f"no safetensors in {shown_path(resolved.location)}{also}: taken from the config alone")


def _require_all(resolved: Resolved, checkpoint: Checkpoint, difference: Disagreement) -> None:
    """Raises FFNError if the file is at fault: a block differs because a tensor is missing or has another shape."""
    alike = [g.spec for g in resolved.model.groups if g.stack == difference.stack]
    spec = next(g.spec for g in resolved.model.groups if g.stack == difference.stack and difference.index in g.layers)
    name = difference.name
    if name in ("gated", "bias") and any(getattr(other, name) != getattr(spec, name) for other in alike):
        config: dict[str, Any] = {name: not getattr(spec, name)}
        spec = replace(spec, **config)  # other layers match the config
    spec = replace(spec, norm="none", sub_norm=False)  # norms matter to a trace alone
    layer = block_tensors(resolved, checkpoint, difference.stack, difference.index)
    if layer is not None and layout.torn(layer, spec):
        located = layout.locate(layer, spec)
        layout.check_shapes(checkpoint, tuple(item for item in located if {*item.names} <= checkpoint.files.keys()))


def with_inventory(resolved: Resolved, inventory: Inventory) -> Resolved:
    """As `with_evidence`, for tensors already listed. Raises FFNError if none of them belongs to an FFN."""
    items, complete = items_of(inventory, resolved.quantization), not inventory.missing
    tensors = recognised(items, resolved.model.main.spec.d_model, inventory.where, absent_files(inventory), complete)
    if tensors.layers:
        blocks = agree(resolved.model, tensors.layers, tensors.others, tensors.where, complete)
        resolved = with_tensors(resolved, blocks, tensors, complete)
    note = f"{tensors.where}: {tensors.absent}: their tensors are inferred from the config"
    return resolved if complete else resolved.noted(note)
