"""A model's layers over ranks: the steps of a layer's rank, and over how many a width or the experts can be split."""

from __future__ import annotations

from ffncli.block.shard import Ranks, rank_steps
from ffncli.block.shard import divisors as divisors
from ffncli.block.shard import nearest as nearest
from ffncli.block.steps import Step
from ffncli.models.model import Group


def steps_of(group: Group, rank: int, ranks: Ranks) -> tuple[Step, ...]:
    """The steps of that rank; under expert parallelism every rank has dense layers in full, for its own tokens.

    Raises FFNError as `rank_steps`.
    """
    return rank_steps(group.steps, rank, ranks if group.spec.moe else Ranks(ranks.tp))
