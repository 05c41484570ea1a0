"""What a rank is asked, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ffncli.block.shard import Ranks
from ffncli.block.steps import Step
from ffncli.run.ranks.simulate import CollectiveCall


@dataclass(frozen=True, repr=False)  # a failing test would print every tensor
class RankCase:
    """A block, the ranks that compute it, and what every rank along `ep` enters: tokens by token counts in `tokens`."""

    name: str
    steps: tuple[Step, ...]
    ranks: Ranks
    weights: Mapping[str, Tensor]
    inputs: Mapping[str, Tensor]
    upstream: Tensor
    tokens: tuple[int, ...]


@dataclass(repr=False)
class Answer:
    """What one rank has after a forward and a backward pass; gradients of its parts of the weights by name."""

    error: str = ""
    output: Tensor = field(default_factory=lambda: torch.zeros(0))
    input_gradient: Tensor = field(default_factory=lambda: torch.zeros(0))
    weights: dict[str, Tensor] = field(default_factory=dict)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    forward: dict[str, int] = field(default_factory=dict)
    both: dict[str, int] = field(default_factory=dict)
    calls: list[CollectiveCall] = field(default_factory=list)
