"""The multiple-choice knapsack problem: one option of each item, the least sum of errors, within a sum of bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_MOST_SUMS = 1 << 16


class Price(NamedTuple):
    """The price of an option: whole bits, and an error from 0."""

    bits: int
    error: float


@dataclass(frozen=True)
class Solution:
    """The number of the option chosen for each item. No choice within (limit − `slack`) bits has a smaller sum of
    errors; `slack` is 0 unless so many sums of bits are possible that close ones were merged."""

    chosen: tuple[int, ...]
    slack: int


def least_error(items: Sequence[Sequence[Price]], limit: int) -> Solution | None:
    """Choose an option of each item; return None if even the smallest options exceed the limit.

    After each item, only those choices are kept that no other choice beats in both bits and errors. If more than
    65,536 are left, the most accurate one in each of 65,536 equal ranges of bits is kept.
    """
    least = [min(option.bits for option in options) for options in items]
    if sum(least) > limit:
        return None
    bits, errors, slack = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64), 0
    origins: list[Tensor] = []  # for each item, a kept choice's number before it, times the options, plus the option
    for at, options in enumerate(items):
        bits = (bits[:, None] + torch.tensor([option.bits for option in options])).flatten()
        errors = (errors[:, None] + torch.tensor([option.error for option in options], dtype=torch.float64)).flatten()
        order = errors.argsort(stable=True)
        order = order[bits[order].argsort(stable=True)]
        order = order[bits[order] <= limit - sum(least[at + 1 :])]
        falling = errors[order].cummin(0).values
        better = torch.ones_like(order, dtype=torch.bool)
        better[1:] = errors[order][1:] < falling[:-1]
        order = order[better]
        if len(order) > _MOST_SUMS:
            width = limit // _MOST_SUMS + 1
            place = bits[order] // width
            order = order[torch.cat((place[1:] != place[:-1], torch.ones(1, dtype=torch.bool)))]
            slack += width - 1
        origins.append(order)
        bits, errors = bits[order], errors[order]
    chosen, last = list[int](), len(errors) - 1  # the most bits have the least error
    for options, order in zip(reversed(items), reversed(origins), strict=True):
        last, option = divmod(int(order[last]), len(options))
        chosen.append(option)
    return Solution(tuple(reversed(chosen)), slack)
