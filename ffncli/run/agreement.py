"""How far two tensors are from each other, in the project's three figures."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.errors import FFNError


@dataclass(frozen=True)
class Agreement:
    """`max_error` = max|a-b|, `relative_error` = max|a-b| / max|b|, `ulps` = max|a-b| in units in the last place of
    max|b|.

    Equal values, two NaNs too, have no error; where only one of two is finite the error is infinite.
    """

    max_error: float
    relative_error: float
    ulps: float


def agreement(ours: Tensor, theirs: Tensor) -> Agreement:
    """How far `ours` is from `theirs`, of one shape, in units of the dtype of `ours`. FFNError for two shapes."""
    if ours.shape != theirs.shape:
        raise FFNError(f"shapes {list(ours.shape)} and {list(theirs.shape)} cannot be compared")
    a, b = ours.detach().double(), theirs.detach().double()
    same = (a == b) | (a.isnan() & b.isnan())
    error = float(torch.where(same, 0.0, (a - b).abs()).nan_to_num(math.inf, math.inf).max()) if a.numel() else 0.0
    largest = float(b[b.isfinite()].abs().max()) if b.isfinite().any() else 0.0
    if not error:
        return Agreement(0.0, 0.0, 0.0)
    limits = torch.finfo(ours.dtype)
    last_place = limits.eps * 2.0 ** math.floor(math.log2(max(largest, limits.tiny)))
    return Agreement(error, error / largest if largest else math.inf, error / last_place)
