"""Small blocks that come with the package, numbers and all."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from ffncli.block.recipe import FFNSpec
from ffncli.models.model import Model, block_model


@dataclass(frozen=True)
class Example:
    """A block with everything that its run needs: weights as nested lists, the input's name and shape.

    `dropped` lists, per dropout step, the (token, unit) pairs that its mask drops.
    """

    model: Model
    weights: dict[str, Any]
    input: str
    shape: tuple[int, ...]
    dropped: dict[str, list[tuple[int, int]]]


def notebook() -> Example:
    """The 4 → 8 → 4 ReLU block with dropout 0.1 that `ffn trace` runs when asked nothing else."""
    data = json.loads(files("ffncli.models").joinpath("notebook.json").read_text("utf-8"))
    spec = FFNSpec(data["d_model"], data["d_ff"], data["activation"], dropout=data["dropout"])
    dropped = {step: [(token, unit) for token, unit in pairs] for step, pairs in data["dropped"].items()}
    model = block_model(spec, "", "the notebook's block")
    return Example(model, data["weights"], data["input"], tuple(data["shape"]), dropped)
