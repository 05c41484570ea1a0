"""Is a kernel correct? Its output and gradients against float64: before, during and after timing (on a fresh seed).

The baseline must be within `allowed`; any other kernel within that, or 4 times the error of a passing baseline.

`allowed` is `measure.tolerance.tolerance_for`, 4 · (eps + eps_sum · √width), relative to the largest value of the
reference. With float32, where eps_sum is eps, that is c · eps · √d_ff with c = 4 (and 4 · eps for the last rounding).
With 16 bits only the rounding of every step has their eps, the sums have that of float32: c · eps · √d_ff would be 0.7
for bf16 and d_ff = 2048, and any kernel would pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ffncli.bench.timing.outcomes import Error, WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.problem import Inputs, Problem
from ffncli.run.measure.gap import gap
from ffncli.run.measure.not_finite import in_words
from ffncli.run.measure.statistics import not_finite
from ffncli.run.measure.tolerance import tolerance_for

GRADIENTS = 2  # times `allowed` if gradients are checked too: twice as many products are chained
TIMES = 4  # the error of a passing baseline
_SMALL = 0.01  # of the largest gradient; a smaller one is judged as if it were that large

# The precision that float32 products may be rounded to first (torch.set_float32_matmul_precision): TF32 has 10 bits,
# bf16 has 7.
_MATH_EPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


def allowed(problem: Problem, math_mode: str = "highest") -> float:
    """The largest `Error.largest` of a correct baseline."""
    bound = tolerance_for(problem.dtype, problem.width, problem.scores)
    if problem.dtype == torch.float32:
        bound += 4 * _MATH_EPS[math_mode]
    return bound * (GRADIENTS if problem.backward else 1)


def computing(backward: bool) -> AbstractContextManager[object]:
    """How kernels are called: a forward pass always in inference mode, a backward pass with gradients."""
    return torch.enable_grad() if backward else torch.inference_mode()


# --- three moments ----------------------------------------------------------------------------------------------------


def before(placed: PlacedKernel, problem: Problem) -> Error:
    """Before timing: on other tokens first, then twice on the timed ones.

    This catches a kernel that caches its first answer, and one that is correct only on its first call. Raises
    WrongResult, and the kernel's own exceptions.
    """
    first, error = problem.first, Error()
    with computing(problem.backward):
        placed.enter(problem.other(1))
        placed.call()
        placed.enter(first.x)
        for call in ("", "its second call: "):
            placed.call()
            if not torch.equal(placed.x.detach(), first.x):
                raise WrongResult("changes its input x")
            error = error.worst(_checked_at(call, lambda: compared(placed, problem, first)))
    untouched(placed, first.x)
    return error


def timed(placed: PlacedKernel, problem: Problem) -> Error:
    """The error of its last timed call, after a check that its buffers are unchanged; none if nothing was timed."""
    if placed.out is None:
        return Error()
    error = _checked_at("as it was timed: ", lambda: compared(placed, problem, problem.first))
    untouched(placed, problem.first.x)
    return error


def fresh(placed: PlacedKernel, problem: Problem, inputs: Inputs) -> Error:
    """After timing: new tokens, in the buffers used for timing."""
    with computing(problem.backward):
        placed.enter(inputs.x, inputs.g)
        placed.call()
        return _checked_at("on a fresh seed: ", lambda: compared(placed, problem, inputs))


def _checked_at(when: str, check: Callable[[], Error]) -> Error:
    try:
        return check()
    except WrongResult as error:
        raise WrongResult(when + str(error), error.error) from None


# --- comparing --------------------------------------------------------------------------------------------------------


def compared(placed: PlacedKernel, problem: Problem, inputs: Inputs) -> Error:
    """The error of its last output and gradients against the reference.

    Raises WrongResult for a wrong type, shape or dtype, or an error beyond `limit`.
    """
    with torch.no_grad():
        out = _tensor(placed.output, problem)
        if inputs.rows is not None:
            out = out[inputs.rows]
        error, worst = _error("its output", out, inputs.out, 0.0), "its output"
    if inputs.grads is not None:
        floor = _SMALL * max(_size(t) for t in inputs.grads.values())
        for name, gradient in placed.gradients(problem).items():
            one = _error(f"its gradient of {name}", gradient, inputs.grads[name], floor)
            worst = f"its gradient of {name}" if one.largest > error.largest else worst
            error = error.worst(one)
    if not error.largest <= placed.limit:
        raise WrongResult(f"{worst} is off by {error.largest:.2g}, {placed.limit:.2g} is allowed", error)
    return error


def _tensor(out: object, problem: Problem) -> Tensor:
    if not isinstance(out, Tensor):
        raise WrongResult(f"returns a {type(out).__name__}, not a tensor")
    shape, dtype = [problem.case.tokens, problem.case.spec.d_model], problem.dtype
    if list(out.shape) != shape:
        raise WrongResult(f"returns shape {list(out.shape)}, expected {shape}")
    if out.dtype != dtype:
        raise WrongResult(
            f"returns {str(out.dtype).removeprefix('torch.')}, expected {str(dtype).removeprefix('torch.')}"
        )
    return out


def _error(what: str, tensor: Tensor, reference: Tensor, floor: float) -> Error:
    """The error of a tensor; `floor` is the least value used for max|b|."""
    if tensor.shape != reference.shape:
        raise WrongResult(f"{what} has shape {list(tensor.shape)}, expected {list(reference.shape)}")
    if not bool(tensor.isfinite().all()):
        raise WrongResult(f"{what} has {in_words(*not_finite(tensor))}", Error(math.inf, math.inf))
    apart, size = gap(tensor, reference), _size(reference)
    scale = max(size, floor)
    largest = apart.largest / scale if scale else (math.inf if apart.largest else 0.0)
    wide = reference.to(tensor.device)
    length = float(wide.norm()) * (scale / size if size else 0.0) or 1.0
    rel = float((tensor.double() - wide).norm()) / length
    return Error(largest, rel, _subnormal(tensor))


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _subnormal(tensor: Tensor) -> int:
    small = tensor.abs()
    return int(((small > 0) & (small < torch.finfo(tensor.dtype).tiny)).sum())


def untouched(placed: PlacedKernel, x: Tensor) -> None:
    """Raises WrongResult if its input or weights have changed; the values of the first copy are compared too."""
    if not torch.equal(placed.x.detach(), x):
        raise WrongResult("changes its input x")
    if placed.changed() or not _equal(placed.copies[0], placed.built.params):
        raise WrongResult("changes its weights")


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(some, others, strict=True))
