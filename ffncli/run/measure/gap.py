"""The distance between two tensors, given as three figures, and the distance that rounding may cause.

Tensors are read once, in pieces. A unit in the last place (ulp) is the distance between neighbouring values of a
format.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block.analysis.rounding import rounding_bound
from ffncli.errors import FFNError, shown

_PIECE = 2**22  # values compared at a time, so that tensors are not copied in full


@dataclass(frozen=True)
class Gap:
    """The distance of a from b. `largest` = max|a-b| over the elements that are finite in both, first reached at flat
    index `at`, where |b| is `there`; `size` = max|b|.

    `unlike` counts the elements that are NaN or infinite in one tensor and different in the other; `first_unlike` is
    the flat index of the first of them. Two NaNs are equal, and so are two infinities of the same sign. `at` and
    `first_unlike` are -1 if there is no such element.
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
        """Return `largest` in ulps of b at the same place; None if b is 0 there, because 0 has no last place."""
        if not self.largest:
            return 0.0
        return self.largest / ulp(self.there, dtype) if self.there else None


@dataclass(frozen=True)
class Agreement:
    """The errors of a compared with b: `max_error` = max|a-b|, `relative_error` = max|a-b| / max|b|, `ulps` as in
    `Gap.ulps`.

    Two NaNs have no error, like equal values; the errors are infinite if a NaN or an infinity meets a different value.
    """

    max_error: float
    relative_error: float
    ulps: float | None


def agreement(ours: Tensor, theirs: Tensor) -> Agreement:
    """Return the distance of `ours` from `theirs`, with ulps in the dtype of `ours`; refuse different shapes."""
    if ours.shape != theirs.shape:
        raise FFNError(f"shapes {list(ours.shape)} and {list(theirs.shape)} cannot be compared")
    difference = gap(ours, theirs)
    if difference.unlike:
        return Agreement(math.inf, math.inf, math.inf)
    return Agreement(difference.largest, difference.relative, difference.ulps(ours.dtype))


def gap(a: Tensor, b: Tensor) -> Gap:
    """Compare two tensors of the same shape in float64."""
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


_SMALL = 0.01  # fraction of the largest gradient; a smaller gradient is judged as if it were that large


def least_gradient(gradients: Mapping[str, Tensor]) -> float:
    """Return the smallest scale for judging a gradient: a smaller gradient is judged as if it were that large."""
    return _SMALL * max(size(t) for t in gradients.values())


def size(tensor: Tensor) -> float:
    """Return max|b|."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


_MORE_ROUNDINGS = 10
# Maps each format that a kernel may declare to the spacing of its values at 1; for integers, to the step relative to a
# row's rms, assuming that the row's largest value is four times its rms.
_SPACING = {
    "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 2.0**-5, "fp8": 2.0**-3, "fp6": 2.0**-2,
    "int6": 2.0**-3, "int4": 0.5, "fp4": 0.5, "mxfp8": 2.0**-3, "mxfp6": 2.0**-2, "mxfp4": 0.5, "nvfp4": 0.5,
}  # fmt: skip
_OF_CHANCE = 3  # allowance for chance: roughly this many standard errors of a root mean square


def tolerance_for(dtype: torch.dtype, width: int, scores: torch.dtype | None = None) -> float:
    """Return the relative error that rounding may cause; `scores` is the router's dtype if it differs from `dtype`."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(scores).eps if scores else 0.0)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return rounding_bound(eps, sums, width)


def rms_tolerance(dtype: torch.dtype, rounding: float, values: int) -> float:
    """Return the rms error that rounding may cause over `values` values, relative to the rms of these values.

    `rounding` is the rms error of an execution that rounds every step's result to the dtype and sums in float32. A
    correct kernel may round ten more times; each rounding of values spread over a binade has a relative rms error of
    eps / √28. 8-bit weights, each off by up to 1 / 254 of its row's largest weight, exceed the limit; their maximum
    error alone would not distinguish them from bf16.
    """
    more = _MORE_ROUNDINGS * torch.finfo(dtype).eps ** 2 / 28
    return math.sqrt(rounding**2 + more) * (1 + _OF_CHANCE / math.sqrt(max(1, values)))


def declared_tolerance(computes: str) -> tuple[float, float]:
    """Return (largest relative error, rms error) for a kernel that declares its format, such as `fp8-rowwise`.

    The rms error of one rounding is spacing / √28. After a dozen roundings it is still below the spacing, and the
    maximum error below 4 times the spacing.
    """
    spacing = _SPACING.get(computes.partition("-")[0])
    if spacing is None:
        hint = f"begin with one of {', '.join(_SPACING)}, as in fp8-rowwise"
        raise FFNError(f"computes: {shown(computes)} is not a known format", hint)
    return 4 * spacing, spacing


def ulp(value: float, dtype: torch.dtype) -> float:
    """Return the distance from |value| to the next larger value of `dtype`; NaN if value is not finite.

    With p bits of significand, the distance is 2^(e - p + 1) for a value in [2^e, 2^(e+1)) (Goldberg 1991). Below the
    smallest normal number, and at zero, the distance is the smallest subnormal number.
    """
    if not math.isfinite(value):
        return math.nan
    limits = torch.finfo(dtype)
    _, exponent = math.frexp(max(abs(value), limits.tiny))  # |value| in [2^(exponent-1), 2^exponent)
    return math.ldexp(limits.eps, exponent - 1)


def ulp_each(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the `ulp` of each of these finite float64 values, in float64."""
    limits = torch.finfo(dtype)
    _, exponents = torch.frexp(values.abs().clamp(min=limits.tiny))
    return torch.ldexp(torch.full_like(values, limits.eps), exponents - 1)


def ulps(value: float, reference: float, dtype: torch.dtype) -> float:
    """Return |value - reference| in ulps of the reference; 0 if both are equal, or both NaN."""
    if value == reference or (math.isnan(value) and math.isnan(reference)):
        return 0.0
    return abs(value - reference) / ulp(reference, dtype)


def narrower(a: torch.dtype, b: torch.dtype) -> torch.dtype:
    """Return the coarser of two formats."""
    return a if torch.finfo(a).eps >= torch.finfo(b).eps else b


def exact_sum(values: list[float]) -> float:
    """Return the sum, rounded once (math.fsum); a plain sum if math.fsum overflows or refuses infinities."""
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):
        return float(sum(values))
