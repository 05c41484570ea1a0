"""How far a kernel's tensors are from the reference: of whole answers, and of samples of timed calls."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.bench.verdict import Error
from ffncli.run.measure.gap import gap

OUTPUT, GRADIENT = "its output", "its gradient of "  # what is compared, in a note's words
_SMALL = 0.01  # of the largest gradient; a smaller one is judged as if it were that large


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


def errors_of(
    given: Mapping[str, Tensor], out: Tensor, gradients: Mapping[str, Tensor] | None = None
) -> dict[str, Error]:
    """The error of every finite tensor that a kernel gave, by what it is: OUTPUT, or GRADIENT and a name.

    `out` and `gradients` are the reference, of the same shapes.
    """
    floor = least_gradient(gradients) if gradients else 0.0
    errors = {}
    for what, tensor in given.items():
        if what == OUTPUT:
            errors[what] = error_of(tensor, out, 0.0)
        elif gradients is not None:
            errors[what] = error_of(tensor, gradients[what.removeprefix(GRADIENT)], floor)
    return errors


def least_gradient(gradients: Mapping[str, Tensor]) -> float:
    """What the largest value of a gradient counts as at least."""
    return _SMALL * max(size(t) for t in gradients.values())


def error_of(tensor: Tensor, reference: Tensor, floor: float) -> Error:
    """The error of one finite tensor; `floor` is the least value used for max|b|."""
    apart, largest = gap(tensor, reference), size(reference)
    scale = max(largest, floor)
    share = apart.largest / scale if scale else (math.inf if apart.largest else 0.0)
    wide = reference.to(tensor.device)
    length = float(wide.norm()) * (scale / largest if largest else 0.0) or 1.0
    rel = float((tensor.double() - wide).norm()) / length
    return Error(share, rel, _subnormal(tensor))


def size(tensor: Tensor) -> float:
    """max|b|."""
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _subnormal(tensor: Tensor) -> int:
    small = tensor.abs()
    return int(((small > 0) & (small < torch.finfo(tensor.dtype).tiny)).sum())
