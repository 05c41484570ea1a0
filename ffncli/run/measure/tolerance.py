"""How far rounding alone may move a computation from the reference."""

from __future__ import annotations

import math

import torch

_FACTOR = 4
_MORE_ROUNDINGS = 10
_OF_CHANCE = 3  # standard errors, about, of a root mean square over so many values


def tolerance_for(dtype: torch.dtype, width: int, scores: torch.dtype | None = None) -> float:
    """The relative error that rounding may cause; `scores` is the dtype of a router that ignores the block's."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(scores).eps if scores else 0.0)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return _FACTOR * (eps + sums * math.sqrt(width))


def rms_tolerance(dtype: torch.dtype, rounding: float, values: int) -> float:
    """The rms error that rounding may cause over so many values, relative to their own rms.

    `rounding` is that of an execution that rounds every step's result to the dtype and sums in float32. A right kernel
    may round ten times more: rounding a value anywhere in a binade has an rms of eps / √28, relative to theirs. Weights
    in 8 bits, which move every product of a row by up to 1 / 254 of its largest weight, add more than that; their
    largest error alone cannot be told from that of bf16.
    """
    more = _MORE_ROUNDINGS * torch.finfo(dtype).eps ** 2 / 28
    return math.sqrt(rounding**2 + more) * (1 + _OF_CHANCE / math.sqrt(max(1, values)))
