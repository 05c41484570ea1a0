"""Which FFN of the tensors is which block of a model: stacks by their names, layers by their numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import takewhile
from typing import TypeAlias

from ffncli.models.model import Layer, Model, Resolved, Spot
from ffncli.models.tensors.recognise import Found, Layers

_CALLED = {"low": "L_module", "high": "H_module"}  # stacks whose tensors have another name (HRM)

Spotted: TypeAlias = tuple[Spot, Found]
Seen: TypeAlias = Mapping[int, Sequence[Spotted]]  # layer → its FFNs, and where they are


def blocks(model: Model) -> dict[str, list[Layer]]:
    """A model's blocks, stack by stack, in order."""
    out: dict[str, list[Layer]] = {}
    for group in model.groups:
        out.setdefault(group.stack, []).extend(Layer(group.stack, index, group.spec) for index in group.layers)
    return {stack: sorted(several, key=lambda block: block.index) for stack, several in out.items()}


def prefixes(model: Model, layers: Layers) -> dict[str, str]:
    """Stack → the prefix of its tensors. A stack of its own name, else the one with as many layers, else the longest.

    The first name in a prefix counts: `decoder.bert.encoder.layer` is the decoder's. Stacks of one model that share
    their layers (LongCat's dense and MoE blocks) share a prefix.
    """
    told = blocks(model)
    out: dict[str, str] = {}
    named = {p: _stack_in(p, told) for p in layers}
    for stack in told:
        fitting = [p for p in layers if named[p] == stack]
        free = [p for p in layers if named[p] is None]
        wanted = len({block.index // model.per_layer(stack) for block in told[stack]})
        candidates = fitting or free
        if candidates:
            out[stack] = max(candidates, key=lambda p: (len(layers[p]) == wanted, len(layers[p])))
    return out


def _stack_in(prefix: str, stacks: Iterable[str]) -> str | None:
    """The stack whose name comes first in a prefix, if there is any."""
    at = {stack: prefix.find(_CALLED.get(stack, stack)) for stack in stacks}
    return min((stack for stack in at if at[stack] >= 0), key=at.__getitem__, default=None)


def side_by_side(
    model: Model, told: Sequence[Layer], prefix: str, seen: Mapping[int, Sequence[Found]]
) -> tuple[dict[int, list[Layer]], dict[int, list[Spotted]]]:
    """The blocks that share a prefix and the FFNs under it, each by the number of their layer.

    Where the same FFNs go by other numbers, both are numbered in order.
    """
    spotted = {i: [(Spot(prefix, i, n), item) for n, item in enumerate(items)] for i, items in seen.items()}
    by_layer: dict[int, list[Layer]] = {}
    for block in told:
        by_layer.setdefault(block.index // model.per_layer(block.stack), []).append(block)
    if set(by_layer) != set(seen) and _numbered_otherwise(told, seen):
        every = [item for _, items in sorted(spotted.items()) for item in items]
        return dict(enumerate([block] for block in told)), dict(enumerate([item] for item in every))
    return by_layer, spotted


def _numbered_otherwise(told: Sequence[Layer], seen: Mapping[int, Sequence[Found]]) -> bool:
    """Whether the same FFNs go by other numbers: names that nest (Funnel's blocks of layers, ALBERT's groups), or one
    that is stored under the first layer that runs it (Zamba)."""
    if len(told) != sum(map(len, seen.values())):
        return False
    return any(len(items) > 1 for items in seen.values()) or told[0].stack == "shared"


def pairs(told: Sequence[Layer], seen: Sequence[Spotted]) -> Iterator[tuple[Layer, Spotted]]:
    """The blocks and the FFNs of one layer: mixtures of experts with those, dense ones with dense ones."""
    ordered = sorted(told, key=lambda block: block.spec.moe is None)
    return zip(ordered, sorted(seen, key=lambda item: item[1].experts == 0), strict=False)


def spots(resolved: Resolved, layers: Layers) -> dict[tuple[str, int], Spot]:
    """(stack, index) → where that block's tensors are, for every block that has any."""
    if resolved.from_tensors:
        return spots_by_name(layers)
    model = resolved.model
    out: dict[tuple[str, int], Spot] = {}
    under = prefixes(model, layers)
    told = blocks(model)
    for prefix in dict.fromkeys(under.values()):
        mine = [block for stack in told if under.get(stack) == prefix for block in told[stack]]
        by_layer, seen = side_by_side(model, mine, prefix, layers[prefix])
        for layer, several in by_layer.items():
            for block, (spot, _) in pairs(several, seen.get(layer, ())):
                out[block.stack, block.index] = spot
    return out


def stacks_of(layers: Iterable[str]) -> dict[str, str]:
    """Prefix → what its stack is called where no config says it: encoder or decoder, as the prefix does; where several
    would have the same name, by what tells their prefixes apart."""
    every = [*layers]
    named = {prefix: _stack_in(prefix, ("encoder", "decoder")) or "decoder" for prefix in every}
    for stack in {*named.values()}:
        alike = [prefix for prefix in every if named[prefix] == stack]
        if len(alike) > 1:
            parts = [prefix.split(".") for prefix in alike]
            before, after = _shared(parts), _shared([part[::-1] for part in parts])
            for n, (prefix, part) in enumerate(zip(alike, parts, strict=True)):
                own = ".".join(part[before : len(part) - after])
                named[prefix] = own if re.fullmatch(r"[\w.-]{1,40}", own, re.ASCII) else f"{stack}{n}"
    return named


def _shared(several: Sequence[Sequence[str]]) -> int:
    """How many words all of them begin with."""
    return sum(1 for _ in takewhile(lambda words: len({*words}) == 1, zip(*several, strict=False)))


def spots_by_name(layers: Layers) -> dict[tuple[str, int], Spot]:
    """The same for blocks that are the tensors' own: a layer's several FFNs are numbered one after the other."""
    out: dict[tuple[str, int], Spot] = {}
    named = stacks_of(layers)
    for prefix, seen in layers.items():
        per_layer = max(map(len, seen.values()))
        for layer, founds in seen.items():
            for n in range(len(founds)):
                out[named[prefix], layer * per_layer + n] = Spot(prefix, layer, n)
    return out
