"""How far a kernel's tensors are from the reference, and a ruling on them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ffncli.bench.wrong_codes import WrongCode
from ffncli.dataclass import dataclass
from ffncli.run.measure.gap import gap

OUTPUT, GRADIENT = "its output", "its gradient of "  # what is compared, in a note's words
_SMALL = 0.01  # of the largest gradient; a smaller one is judged as if it were that large


@dataclass(frozen=True)
class Error:
    """`largest` = max|a-b| / max|b|, `rel` = ‖a-b‖ / ‖b‖, of the worst tensor; `subnormal` outputs were counted."""

    largest: float = 0.0
    rel: float = 0.0
    subnormal: int = 0

    @property
    def remark(self) -> str:
        """For a note: `3 subnormal outputs`; empty if there are none."""
        return f"{self.subnormal} subnormal outputs" if self.subnormal else ""

    def worst(self, other: Error) -> Error:
        """The larger of each."""
        most = max(self.subnormal, other.subnormal)
        return Error(max(self.largest, other.largest), max(self.rel, other.rel), most)


_NO_ERROR = Error()


@dataclass(frozen=True)
class Ruling:
    """An answer is right, or `wrong` says in words what is wrong with it; `error` is how far off it is."""

    error: Error = _NO_ERROR
    wrong: str = ""
    code: WrongCode | None = None

    @property
    def note(self) -> str:
        """What is wrong, with its code in front; empty if nothing is."""
        return f"{self.code}: {self.wrong}" if self.code and self.wrong else self.wrong


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
