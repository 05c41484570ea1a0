"""A checkpoint's logical tensors, and the tensors of one layer, among which a block's parameters are looked up."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

from ffncli.errors import FFNError
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.headers import Columns
from ffncli.models.files.image_experts import corrections, first_numbers
from ffncli.models.files.inventory import Inventory, collect, shared_name
from ffncli.models.files.quantized import logical
from ffncli.models.model import Resolved, Spot
from ffncli.models.tensors.arrangement import outside
from ffncli.models.tensors.recognise import inside, stem_of
from ffncli.models.tensors.shapes import Item
from ffncli.models.tensors.slices import LayerTensors


def items_of(inventory: Inventory, quantization: Mapping[str, Any] | None) -> dict[str, Item]:
    """The logical tensors: packed ones unpacked by name and shape, without reading values."""
    present = {name: info for name, info in inventory.tensors.items() if info.dtype}
    items: dict[str, Item] = {}
    for name, means in logical(present, quantization, inventory.where).items():
        count = inventory.counts[means.anchor]
        item = Item(means.shape, means.params, means.bytes * count, count, means.format)
        shape = means.shape or ()
        if of_images := corrections(name, present, shape):
            item = replace(item, shape=shape[1:], params=item.params // 2, bytes=item.bytes // 2)
            items[of_images] = item
        alike = items.get(shared := shared_name(name))
        if alike and (alike.shape, alike.params) == (item.shape, item.params):  # an expert of another dtype
            items[shared] = replace(alike, bytes=alike.bytes + item.bytes, count=alike.count + count)
        else:
            items[name] = item
    absent = {name: Item(None, 0, 0, inventory.counts[name]) for name in inventory.tensors if name not in present}
    return {**items, **absent}


def block_tensors(resolved: Resolved, checkpoint: Checkpoint, stack: str, index: int) -> LayerTensors | None:
    """The tensors to search for one block's parameters; None if its whole stack has none."""
    model = resolved.model
    specs = {i: group.spec for group in model.groups if group.stack == stack for i in group.layers}
    spots = {i: spot for (at, i), spot in resolved.spots.items() if at == stack}
    if not spots:
        return None
    spec = specs.get(index)
    others = [i for i in spots if i != index and spec is not None and bool(specs[i].moe) == bool(spec.moe)]
    near = min(others, key=lambda i: specs[i] != spec, default=None)
    spot = spots.get(index)
    if spot is None:  # as in its neighbours
        spot = replace(spots[next(iter(spots)) if near is None else near], layer=index // model.per_layer(stack))

    def alike() -> LayerTensors | None:
        try:
            return None if near is None else _in_files(resolved, checkpoint, spots[near])
        except FFNError:  # its file is missing
            return None

    return _in_files(resolved, checkpoint, spot, alike)


def _in_files(
    resolved: Resolved, checkpoint: Checkpoint, spot: Spot, alike: Callable[[], LayerTensors | None] = lambda: None
) -> LayerTensors:
    """One layer's tensors by the headers of the files that have them."""
    family = "gguf" if checkpoint.gguf else resolved.model.model_type
    begins = (stem_of(spot.prefix, spot.layer), *_norms_outside(family, spot))
    names = [name for name in checkpoint.files if name.startswith(begins)]
    infos = [checkpoint.info(name) for name in names]
    columns = Columns(names, [i.dtype for i in infos], [i.shape for i in infos], [i.bytes for i in infos])
    inventory = Inventory(checkpoint.where, *collect([columns], first_numbers(names)))
    items = items_of(inventory, resolved.quantization)
    return layer_tensors(items, spot, family, checkpoint.files, checkpoint.where, alike)


def layer_tensors(
    items: Mapping[str, Item], spot: Spot, family: str, stored: Collection[str], where: str,
    alike: Callable[[], LayerTensors | None] = lambda: None,
) -> LayerTensors:  # fmt: skip
    """The layer at `spot` among some tensors, with the norms that its family keeps outside the layer."""
    stem = stem_of(spot.prefix, spot.layer)
    full = inside(items, stem)
    for begin, norm in _norms_outside(family, spot).items():
        full |= {norm + whole.removeprefix(begin): whole for whole in items if whole.startswith(begin)}
    here = {name: items[whole] for name, whole in full.items()}
    return LayerTensors(stem, here, full, stored, family, where, spot.number, alike)


def _norms_outside(family: str, spot: Spot) -> dict[str, str]:
    """The name prefixes of norms that belong to a layer but are outside it → the prefixes in `LayerTensors`."""
    parent = spot.prefix.rpartition(".")[0]
    return {f"{parent}.{name[3:].format(i=spot.layer)}.".lstrip("."): f"{name}." for name in outside(family)}
