"""Is a kernel right? Its output and gradients against float64: before it is timed and after, on a fresh seed.

What it answers while it is timed is sampled by `fresh_inputs`.

A 16-bit output must also have no larger rms error than `rms_tolerance`: it tells weights of 8 bits from 16.

The baseline must be within `allowed`; any other kernel within that, or 4 times the error of a passing baseline.

`allowed` is `measure.tolerance.tolerance_for`, 4 · (eps + eps_sum · √width), relative to the largest value of the
reference. With float32, where eps_sum is eps, that is c · eps · √d_ff with c = 4 (and 4 · eps for the last rounding).
With 16 bits only the rounding of every step has their eps, the sums have that of float32: c · eps · √d_ff would be 0.7
for bf16 and d_ff = 2048, and any kernel would pass.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ffncli.bench.activity import ACTIVITY
from ffncli.bench.judge.wrong_codes import WrongCode
from ffncli.bench.machine import machine
from ffncli.bench.referee.errors import GRADIENT, OUTPUT, Error
from ffncli.bench.referee.problem import Inputs, Problem
from ffncli.bench.timing.outcomes import WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.kernels.kernel import Kernel
from ffncli.run.measure.not_finite import in_words
from ffncli.run.measure.statistics import not_finite
from ffncli.run.measure.tolerance import declared_tolerance, rms_tolerance, tolerance_for

GRADIENTS = 2  # times `allowed` if gradients are checked too: twice as many products are chained
TIMES = 4  # the error of a passing baseline

# The precision that float32 products may be rounded to first (torch.set_float32_matmul_precision): TF32 has 10 bits,
# bf16 has 7.
_MATH_EPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}


def allowed(problem: Problem, math_mode: str = "highest") -> float:
    """The largest `Error.largest` of a correct baseline."""
    bound = tolerance_for(problem.dtype, problem.width, problem.scores)
    if problem.dtype == torch.float32:
        bound += 4 * _MATH_EPS[math_mode]
    return bound * (GRADIENTS if problem.backward else 1)


def limit_of(kernel: Kernel, limit: float) -> float:
    """The largest `Error.largest` of a kernel, where one of the case's dtype has `limit`.

    Raises FFNError if it declares an unknown format.
    """
    return max(limit, declared_tolerance(kernel.computes)[0]) if kernel.computes else limit


def computing(backward: bool) -> AbstractContextManager[object]:
    """How kernels are called: a forward pass always in inference mode, a backward pass with gradients."""
    return torch.enable_grad() if backward else torch.inference_mode()


def first_call(placed: PlacedKernel, problem: Problem) -> float | None:
    """Seconds of building and of the first call, in which torch compiles; None for other kernels."""
    start = time.perf_counter()
    with computing(problem.backward):
        placed.call()
    if placed.built.compile_s is None:
        return None
    machine.finish(problem.case.device)
    return placed.built.compile_s + time.perf_counter() - start


# --- two moments ------------------------------------------------------------------------------------------------------


def before(placed: PlacedKernel, problem: Problem) -> Error:
    """Before timing: on other tokens first, then twice on the timed ones.

    This catches a kernel that caches its first answer, and one that is correct only on its first call. Raises
    WrongResult, and the kernel's own exceptions.
    """
    first, error = problem.first, Error()
    with computing(problem.backward):
        placed.enter(problem.other(1))
        placed.call_untimed()
        placed.enter(first.x)
        for call in ("", "its second call: "):
            placed.call_untimed()
            if not torch.equal(placed.x.detach(), first.x):
                raise WrongResult("changes its input x", code=WrongCode.CHANGED_INPUT)
            error = error.worst(checked_at(call, lambda: compared(placed, problem, first)))
    if not torch.equal(placed.x.detach(), first.x):
        raise WrongResult("changes its input x", code=WrongCode.CHANGED_INPUT)
    untouched(placed)
    return error


def fresh(placed: PlacedKernel, problem: Problem, inputs: Inputs) -> Error:
    """After timing: new tokens, in the buffers used for timing."""
    with computing(problem.backward):
        placed.enter(inputs.x, inputs.g)
        placed.call_untimed()
        return checked_at("on a fresh seed: ", lambda: compared(placed, problem, inputs))


def checked_at(when: str, check: Callable[[], Error], code: WrongCode | None = None) -> Error:
    """The error that a check finds; what it raises says when that was, and has this code where it has none."""
    try:
        return check()
    except WrongResult as error:
        raise WrongResult(when + str(error), error.error, error.code or code) from None


# --- comparing --------------------------------------------------------------------------------------------------------


def compared(placed: PlacedKernel, problem: Problem, inputs: Inputs) -> Error:
    """The error of its last output and gradients against the reference.

    Raises WrongResult for a wrong type, shape or dtype, or an error beyond `limit`.
    """
    with torch.no_grad():
        out = checked_output(placed.output, problem).detach()
        given = {OUTPUT: out if inputs.rows is None else out[inputs.rows]}
    if problem.backward:
        shapes = {"x": placed.x.shape} | {name: tensor.shape for name, tensor in problem.weights.items()}
        for name, gradient in placed.gradients(problem).items():
            given[GRADIENT + name] = gradient
            if gradient.shape != shapes[name]:
                raise WrongResult(f"{GRADIENT}{name} has shape {list(gradient.shape)}, expected {list(shapes[name])}")
    for what, tensor in given.items():
        require_finite(what, tensor)
    with ACTIVITY.resting():  # a reference may take minutes
        errors = problem.errors(inputs, given)
    worst = max(errors, key=lambda what: errors[what].largest)
    error = Error()
    for one in errors.values():
        error = error.worst(one)
    require_within(worst, error, placed.limit)
    require_rms(errors[OUTPUT], given[OUTPUT].numel(), inputs.rounding, problem, placed)
    return error


def require_rms(error: Error, values: int, rounding: float, problem: Problem, placed: PlacedKernel) -> None:
    """Raises WrongResult for an output of a 16-bit dtype, or of a declared format, that rounding does not explain.

    `rounding` is 0 in other dtypes (`Inputs.rounding`).
    """
    computes = placed.built.kernel.computes
    if not values or not (computes or rounding):
        return
    limit = declared_tolerance(computes)[1] if computes else rms_tolerance(problem.dtype, rounding, values)
    if not error.rel <= limit:
        text = f"{OUTPUT} has an rms error of {error.rel:.2g}, {limit:.2g} is allowed"
        advice = f"it declares {computes}" if computes else "a kernel of fewer bits declares them (`computes`)"
        raise WrongResult(f"{text}; {advice}", error, WrongCode.LOWER_PRECISION)


def require_within(what: str, error: Error, limit: float) -> None:
    """Raises WrongResult for an error beyond the limit."""
    if not error.largest <= limit:
        raise WrongResult(f"{what} is off by {error.largest:.2g}, {limit:.2g} is allowed", error)


def checked_output(out: object, problem: Problem) -> Tensor:
    """The output [tokens, d_model]. Raises WrongResult for another type, shape or dtype."""
    if not isinstance(out, Tensor):
        raise WrongResult(f"returns a {type(out).__name__}, not a tensor")
    if type(out) not in (Tensor, torch.nn.Parameter):
        raise WrongResult(f"returns a {type(out).__name__}, not a plain tensor", code=WrongCode.LAZY_RESULT)
    shape, dtype = [problem.case.tokens, problem.case.spec.d_model], problem.dtype
    if list(out.shape) != shape:
        raise WrongResult(f"returns shape {list(out.shape)}, expected {shape}")
    if out.dtype != dtype:
        raise WrongResult(
            f"returns {str(out.dtype).removeprefix('torch.')}, expected {str(dtype).removeprefix('torch.')}"
        )
    return out


def require_finite(what: str, tensor: Tensor) -> None:
    """Raises WrongResult if a value is NaN or infinite."""
    if not bool(tensor.isfinite().all()):
        raise WrongResult(f"{what} has {in_words(*not_finite(tensor))}", Error(math.inf, math.inf))


def untouched(placed: PlacedKernel) -> None:
    """Raises WrongResult if its weights have changed, by the values of the first copy too."""
    if placed.changed() or not _equal(placed.copies[0], placed.built.params):
        raise WrongResult("changes its weights", code=WrongCode.CHANGED_WEIGHTS)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(some, others, strict=True))
