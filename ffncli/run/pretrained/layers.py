"""Which layers of a model can be traced, and which of them a prompt can reach."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved


def layers_of(resolved: Resolved) -> list[Layer]:
    """Every layer that has an FFN, stack by stack. FFNError for bare dimensions, which have none."""
    if resolved.model.bare:
        raise FFNError(f"--layer all: {resolved.model.name} is one block and has no layers", "leave --layer out")
    stacks = list(dict.fromkeys(group.stack for group in resolved.model.groups))
    every = [Layer(group.stack, index, group.spec) for group in resolved.model.groups for index in group.layers]
    return sorted(every, key=lambda layer: (stacks.index(layer.stack), layer.index))


def reached(resolved: Resolved, layers: Sequence[Layer]) -> tuple[list[Layer], tuple[str, ...]]:
    """(the layers that a prompt can reach, notes on the others): Whisper's encoder takes audio."""
    if resolved.model.model_type != "whisper" or all(layer.stack == "decoder" for layer in layers):
        return list(layers), ()
    return [layer for layer in layers if layer.stack == "decoder"], ("a prompt cannot reach the encoder",)
