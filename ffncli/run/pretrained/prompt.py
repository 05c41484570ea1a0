"""A model's text input, and the layers that a prompt can reach. This file must not import torch."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ffncli.errors import FFNError, option, shown
from ffncli.models.dimensions import Dimensions
from ffncli.models.model import Layer, Resolved
from ffncli.options.conflicts import Conflict

DIMENSIONS = " ".join(field.name for field in fields(Dimensions))
PROMPT_RULES = (
    Conflict("prompt", contradicts="input_ids", why="give one"),
    Conflict("input tokens batch seq_len", contradicts="prompt input_ids", why="the model computes the FFN's input"),
    Conflict(DIMENSIONS, contradicts="prompt input_ids", why="the model runs unchanged"),
)


@dataclass(frozen=True)
class Prompt:
    """The input of a model: a prompt or token ids, and the positions to trace (None: all); `name` is that of the field
    with the prompt."""

    text: str | None = None
    ids: tuple[int, ...] | None = None
    positions: str | None = None
    name: str = "prompt"

    @property
    def option(self) -> str:
        """The option that set this input, named in error messages."""
        return option(self.name if self.ids is None else "input_ids")


def prompt_of(text: str | None, ids: Any, positions: Any) -> Prompt | None:
    """Return the prompt of a question, from its converted fields; None if no model is to be run."""
    if text is not None and not isinstance(text, str):
        what = f"{option('prompt')} must be a string, got {shown(text)}"
        raise FFNError(what, "for several texts, use ffncli.corpus")
    return None if text is None and ids is None else Prompt(text, ids, positions)


def layers_of(resolved: Resolved) -> list[Layer]:
    """Return every layer that has an FFN, stack by stack; raise FFNError for a block that is not part of a model."""
    if resolved.model.bare:
        what = f"{option('layer', 'all')}: {resolved.model.name} is one block and has no layers"
        raise FFNError(what, f"leave {option('layer')} out")
    stacks = list(dict.fromkeys(group.stack for group in resolved.model.groups))
    every = [Layer(group.stack, index, group.spec) for group in resolved.model.groups for index in group.layers]
    return sorted(every, key=lambda layer: (stacks.index(layer.stack), layer.index))


def reached(resolved: Resolved, layers: Sequence[Layer]) -> tuple[list[Layer], tuple[str, ...]]:
    """Return (the layers that a prompt can reach, notes on the other layers); Whisper's encoder takes audio."""
    if resolved.model.model_type != "whisper" or all(layer.stack == "decoder" for layer in layers):
        return list(layers), ()
    return [layer for layer in layers if layer.stack == "decoder"], ("a prompt cannot reach the encoder",)
