"""The FFNs inside a whole model's module, by the names of its parameters."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from torch import nn

from ffncli.models.tensors.recognise import BARE, recognise, stem_of
from ffncli.models.tensors.shapes import Item


def ffn_layers(module: nn.Module) -> Mapping[int, str]:
    """Layer → the name of the module that is its FFN, for the stack with most layers; empty for a single block.

    Experts are not layers, nor is what nn.Sequential numbers. A single layer with torch's attention is layer 0: its
    outputs are not those of any block.
    """
    items = {
        name: Item(tuple(p.shape), prod(p.shape), 0, 1)
        for name, p in module.named_parameters()
        if not nn.parameter.is_lazy(p)
    }
    ffns = recognise(items)
    if BARE in ffns and any(isinstance(part, nn.MultiheadAttention) for part in module.modules()):
        return {0: _owner(ffns[BARE][0][0].tensor)}
    stacks = {
        prefix: {layer: (stem_of(prefix, layer) + _owner(ffns[0].tensor)).rstrip(".") for layer, ffns in layers.items()}
        for prefix, layers in ffns.items()
        if prefix != BARE and "expert" not in prefix
    }
    return max(stacks.values(), key=len, default={})


def _owner(tensor: str) -> str:
    """The module that has the projection of a tensor: `mlp` for `mlp.up_proj.weight`."""
    return tensor.removesuffix(".weight").rpartition(".")[0]
