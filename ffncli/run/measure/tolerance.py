"""How far rounding alone may carry a computation from the reference."""

from __future__ import annotations

import math

import torch

_FACTOR = 4


def tolerance_for(dtype: torch.dtype, width: int, scores: torch.dtype | None = None) -> float:
    """The relative error that rounding may make; `scores` is the dtype a router works in whatever the block's is."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(scores).eps if scores else 0.0)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return _FACTOR * (eps + sums * math.sqrt(width))
