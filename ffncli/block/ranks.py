"""Over how many ranks a block is split, and how."""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError


@dataclass(frozen=True)
class Ranks:
    """`tp` ranks share every d_ff (tensor parallelism), `ep` groups of them the experts (expert parallelism).

    The rank at place (e, t) of the grid [ep, tp] is number e × tp + t. Raises FFNError for a number below 1.
    """

    tp: int = 1
    ep: int = 1

    def __post_init__(self) -> None:
        for name, ranks in (("--tp", self.tp), ("--ep", self.ep)):
            if ranks < 1:
                raise FFNError(f"{name} must be at least 1, got {ranks}")

    @property
    def world_size(self) -> int:
        """All ranks: tp × ep."""
        return self.tp * self.ep

    def __str__(self) -> str:
        """As in the column `layout` of results: `tp2`, `ep4`, `tp2-ep4`."""
        parts = [f"{name}{ranks}" for name, ranks in (("tp", self.tp), ("ep", self.ep)) if ranks > 1]
        return "-".join(parts) or "tp1"

    def place(self, rank: int) -> tuple[int, int]:
        """(expert-parallel place, tensor-parallel place) of that rank."""
        return divmod(rank, self.tp)


def divisors(number: int) -> tuple[int, ...]:
    """Every divisor, ascending."""
    small = [n for n in range(1, isqrt(number) + 1) if number % n == 0]
    return tuple(sorted({*small, *(number // n for n in small)}))


def nearest(number: int, possible: Sequence[int]) -> str:
    """`nearest: 4 and 8`: the largest below and the smallest above, of `possible` in ascending order; "" for none."""
    near = (*[n for n in possible if n < number][-1:], *[n for n in possible if n > number][:1])
    return "nearest: " + " and ".join(map(str, near)) if near else ""
