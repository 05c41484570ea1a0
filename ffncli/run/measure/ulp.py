"""Units in the last place: the distance between neighbouring numbers of a format."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def ulp(value: float, dtype: torch.dtype) -> float:
    """The distance from |value| to the next larger number of `dtype`; NaN if value is not finite.

    With p bits of significand it is 2^(e - p + 1) for a value in [2^e, 2^(e+1)) (Goldberg 1991), and the smallest
    subnormal number below the smallest normal one, at zero too.
    """
    if not math.isfinite(value):
        return math.nan
    limits = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(value), limits.tiny))  # |value| in [2^(exponent-1), 2^exponent)
    return math.ldexp(limits.eps, exponent - 1)


def ulp_each(values: Tensor, dtype: torch.dtype) -> Tensor:
    """`ulp` of each of the finite float64 values, in float64."""
    limits = torch.finfo(dtype)
    _, exponents = torch.frexp(values.abs().clamp(min=limits.tiny))
    return torch.ldexp(torch.full_like(values, limits.eps), exponents - 1)


def ulps(value: float, reference: float, dtype: torch.dtype) -> float:
    """|value - reference| in units in the last place of the reference; 0 if they are the same, NaN or infinite."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    return abs(value - reference) / ulp(reference, dtype)


def narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """The coarser of two formats."""
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def exact_sum(values: list[float]) -> float:
    """The sum, rounded once (math.fsum); if that refuses infinities, a plain sum."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return float(sum(values))
