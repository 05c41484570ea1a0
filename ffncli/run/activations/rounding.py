"""An activation's rounding error: its value in a low precision compared with the exact value at the same x."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.run.engine.execute import NAMESPACE, function
from ffncli.run.engine.prepare import dtype_of
from ffncli.run.engine.threads import one_thread
from ffncli.run.measure.gap import ulp, ulp_each

_STRIDE = 16_381  # step between the fp32 numbers used; prime, so that the low bits differ
_REACH = 10.0  # standard deviations: the range of a normal input
_CORRECT = 0.5 + 1e-9  # ulps; slightly above 0.5, since the reference itself has an error


@dataclass(frozen=True)
class RoundingError:
    """One activation's errors in one dtype: `way` is native (torch's function) or formula (every operation rounded).

    All figures are computed over `inputs` finite numbers of the dtype. `max_ulps` is the maximum of |value - exact| in
    ulps, at x = `at`; an ulp is the distance from |exact| to the next larger number of the dtype. `max_error` is the
    maximum of |value - exact| for |x| ≤ 10 std, at `max_error_at`. `correctly_rounded_share` is the probability, for x
    ~ N(0, std²), that the error is at most half an ulp. `infinite_from` is the smallest |x| with an infinite value,
    None if every value is finite. `lost` counts values that are infinite or NaN although the exact value is a number of
    the dtype; `lost_at` is the x nearest to 0 with such a value.
    """

    name: str
    dtype: str
    way: str
    inputs: int
    max_ulps: float
    at: float
    value: float
    exact: float
    max_error: float
    max_error_at: float
    correctly_rounded_share: float
    infinite_from: float | None
    lost: int
    lost_at: float | None


def rounding_errors(
    names: Sequence[str], formats: Sequence[str], std: float = 1.0, device: str = "cpu"
) -> list[RoundingError]:
    """Return a record for each activation (canonical name), way and dtype (fp16, bf16, fp32), in this order.

    Each activation is computed for all numbers in one tensor, because torch may round differently in a small tensor.
    """
    with one_thread():  # threads cost more than they save for so few numbers
        return [
            _measured(name, dtype, way, std, device)
            for name in names
            for dtype in formats
            for way in (("native", "formula") if TABLE[name].native else ("formula",))
        ]


@cache
def numbers(dtype: str) -> Tensor:
    """Return every finite number of a 16-bit dtype, in order; for fp32, every _STRIDE-th number."""
    form = dtype_of(dtype)
    if form == torch.float32:
        above = torch.arange(0, 0x7F800000, _STRIDE, dtype=torch.int32).view(form)
    else:
        above = torch.arange(0, 2**15, dtype=torch.int32).to(torch.int16).view(form)
    above = above[above.isfinite()]
    return torch.cat([-above[1:].flip(0), above])


def _measured(name: str, dtype: str, way: str, std: float, device: str) -> RoundingError:
    form, x = dtype_of(dtype), numbers(dtype)
    learned = {n: torch.tensor(v, dtype=form) for n, v in TABLE[name].learned.items()}
    moved = {n: v.to(device) for n, v in learned.items()}
    if way == "native":
        computed = function(name, moved)(x.to(device))
    else:
        computed = TABLE[name].f(x.to(device), with_learned(NAMESPACE, moved))
    # The reference also uses learned parameters rounded to the dtype, so the error is only the activation's own.
    wide = with_learned(NAMESPACE, {n: v.double() for n, v in learned.items()})
    exact = TABLE[name].accurate(x.double(), wide)
    return _judged(name, dtype, way, std, x.double(), computed.cpu().double(), exact)


def _judged(name: str, dtype: str, way: str, std: float, x: Tensor, computed: Tensor, exact: Tensor) -> RoundingError:
    """Compare the `computed` value at each x with the `exact` value; a correctly rounded infinity is not an error."""
    largest = torch.finfo(dtype_of(dtype)).max
    # Correct rounding returns infinity from half an ulp above the largest number.
    overflow = exact.abs() >= largest + 0.5 * ulp(largest, dtype_of(dtype))
    right = overflow & computed.isinf() & (computed.sign() == exact.sign())
    lost = ~computed.isfinite() & ~right
    error = torch.where(right, 0.0, (computed - exact).abs())
    ulps = error / ulp_each(exact, dtype_of(dtype))
    finite_ulps = torch.where(lost, -1.0, ulps)
    worst, largest_error = _first(finite_ulps, x), _first(torch.where(lost | (x.abs() > _REACH * std), -1.0, error), x)
    infinite = x[computed.isinf()].abs()
    lost_x = x[lost]
    return RoundingError(
        name, dtype, way, len(x), float(ulps[worst]), float(x[worst]), float(computed[worst]), float(exact[worst]),
        float(error[largest_error]), float(x[largest_error]),
        float(_mass(x, std)[~lost & (ulps <= _CORRECT)].sum()),
        float(infinite.min()) if len(infinite) else None,
        len(lost_x), float(lost_x[lost_x.abs().argmin()]) if len(lost_x) else None,
    )  # fmt: skip


def _first(sizes: Tensor, x: Tensor) -> int:
    """Return the index of the largest size; among equal sizes, the index with x nearest to 0."""
    among = (sizes == sizes.max()).nonzero().flatten()
    return int(among[x[among].abs().argmin()])


def _mass(x: Tensor, std: float) -> Tensor:
    """Return the probability that a draw of N(0, std²) is nearest to each number in `x` (sorted, symmetric)."""
    # Use upper tails from the midpoints of the positive half, because a distribution function near 1 would cancel.
    beyond = torch.special.ndtr(-(x[1:] + x[:-1])[len(x) // 2 :] / (2.0 * std))
    beyond = torch.cat([beyond, beyond.new_zeros(1)])
    cells = beyond[:-1] - beyond[1:]
    return torch.cat([cells.flip(0), 1.0 - 2.0 * beyond[:1], cells])
