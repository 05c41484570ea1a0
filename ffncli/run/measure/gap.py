"""How far apart two tensors are: read once, piece by piece, and reported in the project's three figures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError
from ffncli.run.measure.ulp import ulp

_PIECE = 2**22  # values compared together: tensors are not copied in full


@dataclass(frozen=True)
class Gap:
    """`largest` = max|a-b| where both are finite, first at flat element `at`, where |b| is `there`; `size` = max|b|.

    `unlike` counts places where one is NaN or infinite and the other differs, `first_unlike` is the first of them. Two
    NaNs are equal, and so are two infinities of one sign. Without a place, `at` and `first_unlike` are -1.
    """

    largest: float = 0.0
    at: int = -1
    there: float = 0.0
    size: float = 0.0
    unlike: int = 0
    first_unlike: int = -1

    @property
    def relative(self) -> float:
        """max|a-b| / max|b|; infinite if b is 0 everywhere and a is not."""
        return self.largest / self.size if self.size else (math.inf if self.largest else 0.0)

    def ulps(self, dtype: torch.dtype) -> float | None:
        """`largest` in units in the last place of b there; None if b is 0, which has no last place."""
        if not self.largest:
            return 0.0
        return self.largest / ulp(self.there, dtype) if self.there else None


@dataclass(frozen=True)
class Agreement:
    """`max_error` = max|a-b|, `relative_error` = max|a-b| / max|b|, `ulps` as in `Gap.ulps`.

    Equal values, two NaNs too, have no error; if only one of two is finite the error is infinite.
    """

    max_error: float
    relative_error: float
    ulps: float | None


def agreement(ours: Tensor, theirs: Tensor) -> Agreement:
    """How far `ours` is from `theirs`, in units of the dtype of `ours`. FFNError if the shapes differ."""
    if ours.shape != theirs.shape:
        raise FFNError(f"shapes {list(ours.shape)} and {list(theirs.shape)} cannot be compared")
    difference = gap(ours, theirs)
    if difference.unlike:
        return Agreement(math.inf, math.inf, math.inf)
    return Agreement(difference.largest, difference.relative, difference.ulps(ours.dtype))


def gap(a: Tensor, b: Tensor) -> Gap:
    """Two tensors of the same shape, compared in float64."""
    largest, at, there, size, unlike, first_unlike = 0.0, -1, 0.0, 0.0, 0, -1
    a_flat, b_flat = a.detach().flatten(), b.detach().flatten()
    for start in range(0, a_flat.numel(), _PIECE):
        x = a_flat[start : start + _PIECE].double()
        y = b_flat[start : start + _PIECE].to(x.device, torch.float64)
        both = x.isfinite() & y.isfinite()
        odd = ~both & ~((x == y) | (x.isnan() & y.isnan()))
        apart = torch.where(both, x - y, 0.0).abs()
        worst = int(apart.argmax())
        if apart[worst] > largest:
            largest, at, there = apart[worst].item(), start + worst, abs(y[worst].item())
        size = max(size, torch.where(y.isfinite(), y, 0.0).abs().max().item())
        if unlike == 0 and bool(odd.any()):
            first_unlike = start + int(odd.nonzero()[0])
        unlike += int(odd.sum())
    return Gap(largest, at, there, size, unlike, first_unlike)
