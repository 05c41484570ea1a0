"""How far rounding alone may move a computation from the reference."""

from __future__ import annotations

import math

import torch

from ffncli.block.analysis.rounding import rounding_bound
from ffncli.errors import FFNError, shown

_MORE_ROUNDINGS = 10
# Formats that a kernel may declare, with the spacing of their numbers at 1. Integers are steps of a row's largest
# value, some four times its rms: their spacing is relative to that.
_SPACING = {
    "tf32": 2.0**-10, "fp16": 2.0**-10, "bf16": 2.0**-7, "int8": 2.0**-5, "fp8": 2.0**-3, "fp6": 2.0**-2,
    "int6": 2.0**-3, "int4": 0.5, "fp4": 0.5, "mxfp8": 2.0**-3, "mxfp6": 2.0**-2, "mxfp4": 0.5, "nvfp4": 0.5,
}  # fmt: skip
_OF_CHANCE = 3  # standard errors, about, of a root mean square over so many values


def tolerance_for(dtype: torch.dtype, width: int, scores: torch.dtype | None = None) -> float:
    """The relative error that rounding may cause; `scores` is the dtype of a router that does not use the block's."""
    eps = max(torch.finfo(dtype).eps, torch.finfo(scores).eps if scores else 0.0)
    sums = torch.finfo(torch.promote_types(dtype, torch.float32)).eps
    return rounding_bound(eps, sums, width)


def rms_tolerance(dtype: torch.dtype, rounding: float, values: int) -> float:
    """The rms error that rounding may cause over so many values, relative to their own rms.

    `rounding` is that of an execution that rounds every step's result to the dtype and sums in float32. A right kernel
    may round ten times more: rounding a value anywhere in a binade has an rms of eps / √28, relative to theirs. Weights
    in 8 bits, which move every product of a row by up to 1 / 254 of its largest weight, add more than that; their
    largest error alone cannot be told from that of bf16.
    """
    more = _MORE_ROUNDINGS * torch.finfo(dtype).eps ** 2 / 28
    return math.sqrt(rounding**2 + more) * (1 + _OF_CHANCE / math.sqrt(max(1, values)))


def declared_tolerance(computes: str) -> tuple[float, float]:
    """(largest relative error, rms error) of a kernel that declares its format: `fp8`, or `fp8-rowwise` and the like.

    The rms of one rounding is spacing / √28; of a dozen in a row it stays below the spacing, and the largest error
    below 4 times that. Raises FFNError for a format that is not known.
    """
    spacing = _SPACING.get(computes.partition("-")[0])
    if spacing is None:
        hint = f"begin with one of {', '.join(_SPACING)}, as in fp8-rowwise"
        raise FFNError(f"computes: {shown(computes)} is not a known format", hint)
    return 4 * spacing, spacing
