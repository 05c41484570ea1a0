"""How far rounding alone may move a computation from the reference."""

from __future__ import annotations

import math

import torch

_FACTOR = 4


def tolerance_for(dtype: torch.dtype, width: int, scores: torch.dtype | None = None) -> float:
    """The relative error that rounding may cause; `scores` is the dtype of a router that does not use the block's."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(scores).eps if scores else 0.0)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return _FACTOR * (eps + sums * math.sqrt(width))
