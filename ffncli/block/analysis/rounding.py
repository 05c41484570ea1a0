"""How far rounding alone may move a block's output from its value in float64, without torch."""

from __future__ import annotations

import math

from ffncli.block.dtypes import DType

_FACTOR = 4
EPS = {"fp64": 2.0**-52, "fp32": 2.0**-23, "bf16": 2.0**-7, "fp16": 2.0**-10}  # the spacing of numbers at 1


def rounding_bound(eps: float, sums: float, width: int) -> float:
    """The error that rounding may cause, relative to the largest value; `sums` is the eps of the format of sums."""
    return _FACTOR * (eps + sums * math.sqrt(width))


def block_bound(dtype: DType, width: int, fp32_scores: bool) -> float:
    """The same for a block in that format, which sums in float32 at least; a router may score in float32."""
    eps = EPS[dtype.name]
    return rounding_bound(max(eps, EPS["fp32"] if fp32_scores else 0.0), min(eps, EPS["fp32"]), width)
