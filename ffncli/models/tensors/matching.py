"""Match the FFNs in a checkpoint to the model's blocks: stacks are matched by name, layers by index. Also collect the
logical tensors of a layer, in which a block's parameters are looked up."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any, TypeAlias

from ffncli.errors import FFNError
from ffncli.models.files.checkpoint import Checkpoint
from ffncli.models.files.headers import Columns
from ffncli.models.files.inventory import Inventory, collect, corrections, first_numbers, shared_name
from ffncli.models.files.packing import logical
from ffncli.models.model import Layer, Model, Resolved, Spot
from ffncli.models.tensors.ffns import Item
from ffncli.models.tensors.recognise import Layers, StoredFFN, inside, stem_of
from ffncli.models.tensors.slices import LayerTensors, outside

_CALLED = {  # stacks whose tensors use another name: HRM's, LXMERT's
    "low": "L_module", "high": "H_module", "language": "encoder.layer", "cross_encoder": "x_layers",
}  # fmt: skip
Spotted: TypeAlias = tuple[Spot, StoredFFN]


def blocks(model: Model) -> dict[str, list[Layer]]:
    """Return a model's blocks by stack, in order."""
    out: dict[str, list[Layer]] = {}
    for group in model.groups:
        out.setdefault(group.stack, []).extend(Layer(group.stack, index, group.spec) for index in group.layers)
    return {stack: sorted(several, key=lambda block: block.index) for stack, several in out.items()}


def prefixes(model: Model, layers: Layers) -> dict[str, str]:
    """Find each stack's prefix. Prefixes that contain its name are preferred, then a prefix with the same number of
    layers, then the prefix with the most layers.

    If a prefix contains several names, the first decides: `decoder.bert.encoder.layer` belongs to the decoder. Stacks
    that share their layers (LongCat's dense and MoE blocks) share a prefix.
    """
    by_stack = blocks(model)
    out: dict[str, str] = {}
    named = {p: _stack_in(p, by_stack) for p in layers}
    for stack in by_stack:
        fitting = [p for p in layers if named[p] == stack]
        free = [p for p in layers if named[p] is None]
        wanted = len({block.index // model.per_layer(stack) for block in by_stack[stack]})
        candidates = fitting or free
        if candidates:
            out[stack] = max(candidates, key=lambda p: (len(layers[p]) == wanted, len(layers[p])))
    return out


def _stack_in(prefix: str, stacks: Iterable[str]) -> str | None:
    """Return the stack whose name comes first in a prefix; None if the prefix contains no stack's name."""
    at = {stack: prefix.find(_CALLED.get(stack, stack)) for stack in stacks}
    return min((stack for stack in at if at[stack] >= 0), key=at.__getitem__, default=None)


def side_by_side(
    model: Model, blocks: Sequence[Layer], prefix: str, ffns: Mapping[int, Sequence[StoredFFN]]
) -> tuple[dict[int, list[Layer]], dict[int, list[Spotted]]]:
    """Arrange the blocks that share a prefix and the FFNs under it by layer number.

    If blocks and FFNs are the same but numbered differently, both are renumbered in order.
    """
    spotted = {i: [(Spot(prefix, i, n), item) for n, item in enumerate(items)] for i, items in ffns.items()}
    by_layer: dict[int, list[Layer]] = {}
    for block in blocks:
        by_layer.setdefault(block.index // model.per_layer(block.stack), []).append(block)
    if set(by_layer) != set(ffns) and _numbered_otherwise(blocks, ffns):
        every = [item for _, items in sorted(spotted.items()) for item in items]
        return dict(enumerate([block] for block in blocks)), dict(enumerate([item] for item in every))
    return by_layer, spotted


def _numbered_otherwise(blocks: Sequence[Layer], ffns: Mapping[int, Sequence[StoredFFN]]) -> bool:
    """Return whether the blocks and the FFNs are the same but numbered differently, either because names nest (Funnel's
    blocks of layers, ALBERT's groups), or because one FFN is stored under the first layer that runs it (Zamba)."""
    if len(blocks) != sum(map(len, ffns.values())):
        return False
    return any(len(items) > 1 for items in ffns.values()) or blocks[0].stack == "shared"


def pairs(blocks: Sequence[Layer], ffns: Sequence[Spotted]) -> Iterator[tuple[Layer, Spotted]]:
    """Pair the blocks and the FFNs of one layer: mixtures with mixtures, dense with dense."""
    ordered = sorted(blocks, key=lambda block: block.spec.moe is None)
    return zip(ordered, sorted(ffns, key=lambda item: item[1].experts == 0), strict=False)


def spots(resolved: Resolved, layers: Layers) -> dict[tuple[str, int], Spot]:
    """Locate the tensors of every block that has tensors, by (stack, index)."""
    if resolved.from_tensors:
        return spots_by_name(layers)
    model = resolved.model
    out: dict[tuple[str, int], Spot] = {}
    under = prefixes(model, layers)
    by_stack = blocks(model)
    for prefix in dict.fromkeys(under.values()):
        mine = [block for stack in by_stack if under.get(stack) == prefix for block in by_stack[stack]]
        by_layer, ffns = side_by_side(model, mine, prefix, layers[prefix])
        for layer, several in by_layer.items():
            for block, (spot, _) in pairs(several, ffns.get(layer, ())):
                out[block.stack, block.index] = spot
    return out


def stacks_of(layers: Iterable[str]) -> dict[str, str]:
    """Return names for the prefixes' stacks if there is no config: encoder or decoder, if the prefix contains the word.
    Stacks that would have the same name get the part in which their prefixes differ."""
    every = [*layers]
    named = {prefix: _stack_in(prefix, ("encoder", "decoder")) or "decoder" for prefix in every}
    for stack in {*named.values()}:
        alike = [prefix for prefix in every if named[prefix] == stack]
        if len(alike) > 1:
            parts = [prefix.split(".") for prefix in alike]
            before, after = _shared(parts), _shared([part[::-1] for part in parts])
            for n, (prefix, part) in enumerate(zip(alike, parts, strict=True)):
                label = ".".join(part[before : len(part) - after])
                named[prefix] = label if re.fullmatch(r"[\w.-]{1,40}", label, re.ASCII) else f"{stack}{n}"
    return named


def _shared(several: Sequence[Sequence[str]]) -> int:
    """Return the number of leading words that all sequences share."""
    return sum(1 for _ in takewhile(lambda words: len({*words}) == 1, zip(*several, strict=False)))


def spots_by_name(layers: Layers) -> dict[tuple[str, int], Spot]:
    """Locate blocks that were read from the tensors; the FFNs of a layer are numbered in order."""
    out: dict[tuple[str, int], Spot] = {}
    named = stacks_of(layers)
    for prefix, by_layer in layers.items():
        per_layer = max(map(len, by_layer.values()))
        for layer, ffns in by_layer.items():
            for n in range(len(ffns)):
                out[named[prefix], layer * per_layer + n] = Spot(prefix, layer, n)
    return out


def items_of(inventory: Inventory, quantization: Mapping[str, Any] | None) -> dict[str, Item]:
    """Return the logical tensors; packed tensors are interpreted by name and shape, without reading values."""
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
        if alike and (alike.shape, alike.params) == (item.shape, item.params):  # an expert with another dtype
            items[shared] = replace(alike, bytes=alike.bytes + item.bytes, count=alike.count + count)
        else:
            items[name] = item
    absent = {name: Item(None, 0, 0, inventory.counts[name]) for name in inventory.tensors if name not in present}
    return {**items, **absent}


def block_tensors(resolved: Resolved, checkpoint: Checkpoint, stack: str, index: int) -> LayerTensors | None:
    """Collect the tensors among which one block's parameters are located; None if the block's whole stack has no
    tensors."""
    model = resolved.model
    specs = {i: group.spec for group in model.groups if group.stack == stack for i in group.layers}
    spots = {i: spot for (at, i), spot in resolved.spots.items() if at == stack}
    if not spots:
        return None
    spec = specs.get(index)
    others = [i for i in spots if i != index and spec is not None and bool(specs[i].moe) == bool(spec.moe)]
    near = min(others, key=lambda i: specs[i] != spec, default=None)
    spot = spots.get(index)
    if spot is None:  # at the position that its neighbours suggest
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
    """Return the tensors of one layer, from the headers of the files that contain them."""
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
    """Collect the layer at `spot` from some tensors, with the norms that its family keeps outside the layer."""
    stem = stem_of(spot.prefix, spot.layer)
    full = inside(items, stem)
    for begin, norm in _norms_outside(family, spot).items():
        full |= {norm + whole.removeprefix(begin): whole for whole in items if whole.startswith(begin)}
    here = {name: items[whole] for name, whole in full.items()}
    return LayerTensors(stem, here, full, stored, family, where, spot.number, alike)


def _norms_outside(family: str, spot: Spot) -> dict[str, str]:
    """Return the prefixes of norms of a layer that are outside it, mapped to their prefixes in `LayerTensors`."""
    parent = spot.prefix.rpartition(".")[0]
    return {f"{parent}.{name[3:].format(i=spot.layer)}.".lstrip("."): f"{name}." for name in outside(family)}
