"""A model's layers over ranks: the steps of a layer's rank, and over how many a width or the experts can be split."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from ffncli.block.ranks import Ranks
from ffncli.block.shard import rank_steps
from ffncli.block.steps import Step
from ffncli.models.model import Group


def steps_of(group: Group, rank: int, ranks: Ranks) -> tuple[Step, ...]:
    """The steps of that rank; under expert parallelism every rank has dense layers in full, for its own tokens.

    Raises FFNError as `rank_steps`.
    """
    return rank_steps(group.steps, rank, ranks if group.spec.moe else Ranks(ranks.tp))


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def nearest(number: int, possible: Sequence[int]) -> str:
    """`nearest: 4 and 8`: the largest below and the smallest above, of `possible` in ascending order; "" for none."""
    near = (*[n for n in possible if n < number][-1:], *[n for n in possible if n > number][:1])
    return "nearest: " + " and ".join(map(str, near)) if near else ""
