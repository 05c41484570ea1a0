"""What a split block exchanges, counted in two ways: from the steps, and by the program on simulated ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import gcd

import torch

from ffncli.block.dtypes import activation_dtype
from ffncli.block.ranks import Ranks
from ffncli.dataclass import dataclass
from ffncli.models.counting.plan import Collectives, Planner
from ffncli.models.model import Group
from ffncli.run.ranks.simulate import simulate


@dataclass(frozen=True)
class CollectiveCheck:
    """The collectives of one layer of a group of equal ones, of a rank that enters `entered` tokens.

    `counted` is the closed form, `simulated` what the program called, both with as many tokens for every expert.
    """

    stack: str
    layers: tuple[int, ...]
    dtype: str
    tp: int
    ep: int
    entered: int
    counted: Collectives
    simulated: Collectives

    @property
    def same(self) -> bool:
        """Whether the two ways agree, to the byte."""
        return self.counted == self.simulated


def collective_checks(planner: Planner, splits: Sequence[Ranks], tokens: Sequence[int]) -> Iterator[CollectiveCheck]:
    """Every kind of layer, split and number of tokens. Raises FFNError as `simulate` does."""
    kind = activation_dtype(planner.weights)
    for group in planner.model.groups:
        for ranks in splits:
            over = ranks if group.spec.moe else Ranks(ranks.tp)
            for number in tokens:
                entered = even_tokens(group, ranks, -(-number // ranks.ep))
                run = simulate(group.steps, over, entered, getattr(torch, kind.torch))
                yield CollectiveCheck(
                    group.stack,
                    group.layers,
                    kind.name,
                    ranks.tp,
                    ranks.ep,
                    entered,
                    planner.collectives(group, ranks, entered * ranks.ep),
                    Collectives(
                        run.all_reduces,
                        run.all_reduce_bytes,
                        run.ring_all_reduce_bytes,
                        run.all_to_alls,
                        run.all_to_all_bytes,
                    ),
                )


def even_tokens(group: Group, ranks: Ranks, entered: int) -> int:
    """At least as many tokens; where they are sent to ranks, a number that all experts can share evenly."""
    moe = group.spec.moe
    if moe is None or ranks.ep == 1:
        return entered
    step = moe.experts // gcd(moe.experts, moe.top_k)
    return -(-entered // step) * step
