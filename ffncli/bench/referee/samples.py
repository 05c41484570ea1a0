"""Samples of what kernels answered while they were timed: a few tokens of a call, taken aside to be judged later."""

from __future__ import annotations

from torch import Tensor

from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class CallSample:
    """Some tokens of one call: x [rows, d_model] as it was entered, `out` [rows, d_model] as the kernel gave it.

    In a backward pass `g` is the gradient of the output that was entered, `gradient` that of x that came back. Of the
    calls of a `block`, counted for each kernel, the sample that was shown last is judged.
    """

    kernel: str
    x: Tensor
    out: Tensor
    g: Tensor | None = None
    gradient: Tensor | None = None
    block: int = 0
