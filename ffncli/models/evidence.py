"""What a checkpoint's tensors say of a model that its config described: they confirm it, overrule it, contradict it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

from ffncli.block import dtypes
from ffncli.errors import FFNError, shown_path
from ffncli.models import layout
from ffncli.models.agreement import agree
from ffncli.models.beside_agreement import with_rest
from ffncli.models.checkpoint import Checkpoint, check_shapes
from ffncli.models.headers import Columns
from ffncli.models.inventory import Inventory, collect, shared_name, take_inventory
from ffncli.models.matrices import Item
from ffncli.models.model import IN_ALL, UNEVEN, Difference, Model, Spot
from ffncli.models.quantized import logical
from ffncli.models.recognise import recognise_all, stem_of
from ffncli.models.ways import looked_for

_MOST_LOOKS = 16  # each goes through all names once
NOT_WHOLE = "every expert needs all of its matrices; is the file whole?"


def with_evidence(model: Model) -> Model:
    """The model as its tensors have it, where there are any, with what differs from its config."""
    checkpoint = model.checkpoint
    if checkpoint is None:
        return _config_alone(model)
    found = with_inventory(model, take_inventory(checkpoint))
    for difference in islice(filter(_may_be_the_files, found.differences), _MOST_LOOKS):
        _demand_all(found, checkpoint, difference)
        if difference.name == UNEVEN:
            raise FFNError(f"{checkpoint.where}: {difference.where} has {difference.tensors}", NOT_WHOLE)
    return found


def _may_be_the_files(difference: Difference) -> bool:
    """Whether a tensor that is missing or of a wrong shape would look like this."""
    none = (difference.name, difference.tensors) == ("experts", "0")
    return none or difference.name in ("layers", "gated", "bias", IN_ALL, UNEVEN)


def _config_alone(model: Model) -> Model:
    """The model with a note that there are no tensors to compare with."""
    if model.location is None or model.source.endswith(".json"):  # the config is what was asked for
        return model
    pickled = any(any(model.location.glob(pattern)) for pattern in ("*.bin", "*.pt", "*.pth"))
    also = " (pickled weights are not read: save them as safetensors)" if pickled else ""
    return model.noted(f"no safetensors in {shown_path(model.location)}{also}: taken from the config alone")


def _demand_all(model: Model, checkpoint: Checkpoint, difference: Difference) -> None:
    """Raises FFNError where a block differs because one of its tensors is missing, or alone has another shape.

    Then the file is at fault.
    """
    alike = [g.spec for g in model.groups if g.stack == difference.stack]
    spec = next(g.spec for g in model.groups if g.stack == difference.stack and difference.index in g.layers)
    name = difference.name
    if name in ("gated", "bias") and any(getattr(other, name) != getattr(spec, name) for other in alike):
        said: dict[str, Any] = {name: not getattr(spec, name)}
        spec = replace(spec, **said)  # other layers have it as the config says
    spec = replace(spec, norm="none", sub_norm=False)  # norms matter to a trace alone
    names = layer_names(model, checkpoint, difference.stack, difference.index)
    if names is not None and layout.torn(names, spec):
        located = layout.locate(names, spec)
        check_shapes(checkpoint, tuple(item for item in located if {*item.names} <= checkpoint.files.keys()))


def with_inventory(model: Model, inventory: Inventory) -> Model:
    """The same for tensors that were listed already. Raises FFNError where none of them belongs to an FFN."""
    items = items_of(inventory, model.quantization)
    layers, beside = recognise_all(items, model.main.spec.d_model, inventory.where)
    complete = not inventory.missing
    if layers or complete:
        demand_found(layers, items, inventory.where)
        model = agree(model, layers, beside, inventory.where, complete)
    if not complete:
        return model.noted(f"{inventory.where}: {gone(inventory)}: what they hold is taken from the config")
    return with_rest(with_stored(model, items), items, layers)


def gone(inventory: Inventory) -> str:
    """The files of an index that are not here, in words."""
    return f"{len(inventory.missing)} of {inventory.files} files are not here ({inventory.missing[0]})"


def with_stored(model: Model, items: Mapping[str, Item], complete: bool = True) -> Model:
    """The model with the format that its FFNs are stored in, and what the files hold where all of them are here."""
    if model.stored is None:
        return model
    main = model.stored.formats[0]
    row = dtypes.find(main)
    stored = model.stored
    if complete:
        params = sum(item.params * item.count for item in items.values())
        stored = replace(stored, file_params=params, file_bytes=sum(item.bytes for item in items.values()))
    return replace(model, stored=stored, dtype=row.name if row else main)


def demand_found(layers: Mapping[str, Any], items: Mapping[str, Item], where: str) -> None:
    """Raises FFNError where no FFN was recognised."""
    if not layers:
        raise FFNError(f"{where}: no FFN among {len(items):,} tensor names", f"looked for {looked_for()}")


def items_of(inventory: Inventory, quantization: Mapping[str, Any] | None) -> dict[str, Item]:
    """The tensors as the model means them: packed ones unpacked by name and shape, nothing read."""
    seen = {name: info for name, info in inventory.tensors.items() if info.dtype}
    items: dict[str, Item] = {}
    for name, means in logical(seen, quantization, inventory.where).items():
        count = inventory.counts[means.anchor]
        item = Item(means.shape, means.params, means.bytes * count, count, means.format)
        alike = items.get(shared := shared_name(name))
        if alike and (alike.shape, alike.params) == (item.shape, item.params):  # an expert of another dtype
            items[shared] = replace(alike, bytes=alike.bytes + item.bytes, count=alike.count + count)
        else:
            items[name] = item
    unseen = {name: Item(None, 0, 0, inventory.counts[name]) for name in inventory.tensors if name not in seen}
    return {**items, **unseen}


def layer_names(model: Model, checkpoint: Checkpoint, stack: str, index: int) -> layout.Names | None:
    """The tensors among which one block's parameters are looked for; None where its whole stack has none."""
    specs = {i: group.spec for group in model.groups if group.stack == stack for i in group.layers}
    spots = {i: spot for (at, i), spot in model.spots.items() if at == stack}
    if not spots:
        return None
    own = specs.get(index)
    others = [i for i in spots if i != index and own is not None and bool(specs[i].moe) == bool(own.moe)]
    alike = min(others, key=lambda i: specs[i] != own, default=None)
    spot = spots.get(index)
    if spot is None:  # as its neighbours have it
        near = spots[alike if alike is not None else next(iter(spots))]
        spot = replace(near, layer=index // model.per_layer(stack))

    def other() -> layout.Held | None:
        try:
            return None if alike is None else _held(model, checkpoint, spots[alike])
        except FFNError:  # its file is not here
            return None

    here = _held(model, checkpoint, spot)
    family = "gguf" if checkpoint.gguf else model.model_type
    return layout.Names(here, checkpoint.files, family, checkpoint.where, spot.number, other)


def _held(model: Model, checkpoint: Checkpoint, spot: Spot) -> layout.Held:
    """One layer's tensors as the model means them, and the norms that its family keeps outside of it."""
    stem, beyond = stem_of(spot.prefix, spot.layer), layout.beyond(model.model_type, spot)
    own = [name for name in checkpoint.files if name.startswith((stem, *beyond))]
    infos = [checkpoint.info(name) for name in own]
    columns = Columns(own, [i.dtype for i in infos], [i.shape for i in infos], [i.bytes for i in infos])
    items = items_of(Inventory(checkpoint.where, *collect([columns])), model.quantization)
    return layout.held(items, stem, beyond)
