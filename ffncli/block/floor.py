"""The least time of some work on some hardware, by the roofline model (Williams, Waterman, Patterson 2009).

Arithmetic and memory traffic overlap completely at best, so that the slower of the two is the floor. Where both take
the same time, FLOPs per byte equal the hardware's ridge, its peak rate over its bandwidth.
"""

from __future__ import annotations

from typing import Literal

from ffncli.dataclass import dataclass

Bound = Literal["compute", "memory"]


@dataclass(frozen=True)
class TimeFloor:
    """Seconds that the arithmetic needs at its peak rate, and the traffic at full bandwidth."""

    compute_s: float
    memory_s: float

    @property
    def seconds(self) -> float:
        """The floor: the longer of the two."""
        return max(self.compute_s, self.memory_s)

    @property
    def bound(self) -> Bound:
        """Which of the two is the longer; at the ridge itself `compute`."""
        return "memory" if self.memory_s > self.compute_s else "compute"


def time_floor(flops: float, moved_bytes: float, flops_per_s: float, bytes_per_s: float) -> TimeFloor:
    """The floor of `flops` and `moved_bytes`; both rates are above 0."""
    return TimeFloor(flops / flops_per_s, moved_bytes / bytes_per_s)
