"""What a checkpoint's tensors say of a model that its config described: they confirm it, overrule it, contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod

from ffncli.block import dtypes
from ffncli.errors import FFNError
from ffncli.models import layout
from ffncli.models.agreement import agree
from ffncli.models.checkpoint import Checkpoint, open_checkpoint
from ffncli.models.inventory import Inventory, take_inventory
from ffncli.models.model import Difference, Model
from ffncli.models.recognise import Item, looked_for, recognise
from ffncli.models.strict_json import shown_path


def with_evidence(model: Model) -> Model:
    """The model as its tensors have it, where there are any, with what differs from its config."""
    if model.location is None:
        return model
    checkpoint = open_checkpoint(model.location)
    if checkpoint is None:
        if model.source.endswith(".json"):  # the config is what was asked for
            return model
        pickled = any(any(model.location.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
        also = " (pickled weights are not read: save them as safetensors)" if pickled else ""
        return model.noted(f"no safetensors in {shown_path(model.location)}{also}: taken from the config alone")
    model = replace(model, checkpoint=checkpoint)
    found = with_inventory(model, take_inventory(checkpoint))
    for difference in found.differences:
        if difference.name in ("layers", "gated", "bias", "parameters per layer"):
            _demand_all(found, checkpoint, difference)
    return found


def _demand_all(model: Model, checkpoint: Checkpoint, difference: Difference) -> None:
    """Raises FFNError where a block differs because one of its tensors is missing: then the file is at fault."""
    spec = next(g.spec for g in model.groups if g.stack == difference.stack and difference.index in g.layers)
    names = layer_names(model, checkpoint, difference.stack, difference.index)
    if model.model_type in layout.LAYOUTS and not names.packed(spec) and names.any(spec):
        layout.locate(names, spec)


def with_inventory(model: Model, inventory: Inventory) -> Model:
    """The same for tensors that were listed already. Raises FFNError where none of them belongs to an FFN."""
    items = items_of(inventory, model)
    layers = recognise(items, model.main.spec.d_model)
    if not layers:
        raise FFNError(f"{inventory.where}: no FFN tensors among {len(items):,} names", f"looked for {looked_for()}")
    model = agree(model, layers, inventory.where)
    if inventory.missing:
        gone = f"{len(inventory.missing)} of {inventory.files} files are not here ({inventory.missing[0]})"
        model = model.noted(f"{inventory.where}: {gone}: what they hold is taken from the config")
    elif model.stored:
        params = sum(item.params * item.count for item in items.values())
        size = sum(item.bytes * item.count for item in items.values())
        model = replace(model, stored=replace(model.stored, file_params=params, file_bytes=size))
    if model.stored and model.stored.formats[0]:
        row = dtypes.find(model.stored.formats[0])
        model = replace(model, dtype=row.name if row else model.stored.formats[0])
    return model


def items_of(inventory: Inventory, model: Model) -> Mapping[str, Item]:
    """The tensors as the model means them: packed ones unpacked by name and shape, nothing read."""
    return {
        name: Item(info.shape, prod(info.shape) if info.dtype else 0, info.bytes, inventory.counts[name], info.dtype)
        for name, info in inventory.tensors.items()
    }


def layer_names(model: Model, checkpoint: Checkpoint, stack: str, layer: int) -> layout.Names:
    """The tensor names among which one layer's parameters are looked for."""
    return layout.Names(checkpoint.files, model.model_type, stack, layer, checkpoint.where)
