"""Is a kernel right? Its output and gradients against float64, before it is timed, as it was timed, and on a fresh seed.

The baseline must keep `allowed` by itself; any other kernel that, or 4 times the error of a baseline that passes.

`allowed` is `run.checks.row.tolerance_for`, 4 · (eps + eps_sum · √width), relative to the largest value of the
reference. With float32, where eps_sum is eps, that is c · eps · √d_ff with c = 4 (and 4 · eps for the last rounding).
With 16 bits only the rounding of every step has their eps, the sums have float32's: c · eps · √d_ff would be 0.7 for
bf16 and d_ff = 2048, and any kernel would pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ffncli.bench.problem import Inputs, Problem
from ffncli.bench.records import Status
from ffncli.errors import FFNError
from ffncli.run.agreement import gap
from ffncli.run.checks.row import not_finite, tolerance_for

if TYPE_CHECKING:
    from ffncli.bench.seat import Seat

GRADIENTS = 2  # times `allowed` where gradients are judged too: twice as many products stand in a row
TIMES = 4  # the error of a passing baseline
_SMALL = 0.01  # of the largest gradient; a smaller one is judged as if it were that large

# What float32 products may be rounded to first (torch.set_float32_matmul_precision): TF32 has 10 bits, bf16 has 7.
_MATH_EPS = {"highest": 0.0, "high": 2.0**-10, "medium": 2.0**-7}
_OUT_OF_MEMORY = ("can't allocate memory", "out of memory", "not enough memory", "Unable to allocate")


class Wrong(Exception):
    """A kernel broke its contract, or its numbers are not the block's; the text says how. `error` where it is one."""

    def __init__(self, text: str, error: Error | None = None) -> None:
        super().__init__(text)
        self.error = error


class Skipped(Exception):
    """What a kernel cannot do here, in words."""


@dataclass(frozen=True)
class Error:
    """`largest` = max|a-b| / max|b|, `rel` = ‖a-b‖ / ‖b‖, of the worst tensor; `subnormal` outputs were counted."""

    largest: float = 0.0
    rel: float = 0.0
    subnormal: int = 0

    def worst(self, other: Error) -> Error:
        """The larger of each."""
        most = max(self.subnormal, other.subnormal)
        return Error(max(self.largest, other.largest), max(self.rel, other.rel), most)


def allowed(problem: Problem, math_mode: str = "highest") -> float:
    """The largest `Error.largest` of a baseline that is right."""
    bound = tolerance_for(problem.dtype, problem.width, problem.scores)
    if problem.dtype == torch.float32:
        bound += 4 * _MATH_EPS[math_mode]
    return bound * (GRADIENTS if problem.backward else 1)


def computing(backward: bool) -> AbstractContextManager[object]:
    """How kernels are called: a forward pass always in inference mode, a backward pass with gradients."""
    return torch.enable_grad() if backward else torch.inference_mode()


# --- three moments ----------------------------------------------------------------------------------------------------


def before(seat: Seat, problem: Problem) -> Error:
    """Before it is timed: on other tokens first, then twice on those that are timed. Raises Wrong, and what it raises.

    So one that keeps its first answer is found out, and one that is right on its first call alone.
    """
    first, found = problem.first, Error()
    with computing(problem.backward):
        seat.enter(problem.other(1))
        seat.call()
        seat.enter(first.x)
        for call in ("", "its second call: "):
            seat.call()
            found = found.worst(_said(call, lambda: compared(seat, problem, first)))
    untouched(seat, first.x)
    return found


def timed(seat: Seat, problem: Problem) -> Error:
    """What its last timed call gave, and whether its buffers still hold what was put there; nothing where none was."""
    if seat.out is None:
        return Error()
    found = _said("as it was timed: ", lambda: compared(seat, problem, problem.first))
    untouched(seat, problem.first.x)
    return found


def fresh(seat: Seat, problem: Problem, inputs: Inputs) -> Error:
    """After it was timed: tokens that it has not seen, in the buffers that it was timed with."""
    with computing(problem.backward):
        seat.enter(inputs.x, inputs.g)
        seat.call()
        return _said("on a fresh seed: ", lambda: compared(seat, problem, inputs))


def _said(when: str, check: Callable[[], Error]) -> Error:
    try:
        return check()
    except Wrong as error:
        raise Wrong(when + str(error), error.error) from None


# --- comparing --------------------------------------------------------------------------------------------------------


def compared(seat: Seat, problem: Problem, inputs: Inputs) -> Error:
    """How far what the seat holds is from the reference. Raises Wrong for what is no such tensor, or beyond `limit`."""
    with torch.no_grad():
        out = _tensor(seat.output, problem)
        if inputs.rows is not None:
            out = out[inputs.rows]
        found, worst = _error("its output", out, inputs.out, 0.0), "its output"
    if inputs.grads is not None:
        floor = _SMALL * max(_size(t) for t in inputs.grads.values())
        for name, gradient in seat.gradients(problem).items():
            one = _error(f"its gradient of {name}", gradient, inputs.grads[name], floor)
            worst = f"its gradient of {name}" if one.largest > found.largest else worst
            found = found.worst(one)
    if not found.largest <= seat.limit:
        raise Wrong(f"{worst} is off by {found.largest:.2g}, {seat.limit:.2g} is allowed", found)
    return found


def _tensor(out: object, problem: Problem) -> Tensor:
    if not isinstance(out, Tensor):
        raise Wrong(f"gives a {type(out).__name__}, not a tensor")
    shape, dtype = [problem.case.tokens, problem.case.spec.d_model], problem.dtype
    if list(out.shape) != shape:
        raise Wrong(f"gives shape {list(out.shape)}, expected {shape}")
    if out.dtype != dtype:
        raise Wrong(f"gives {str(out.dtype).removeprefix('torch.')}, expected {str(dtype).removeprefix('torch.')}")
    return out


def _error(what: str, found: Tensor, reference: Tensor, floor: float) -> Error:
    """`floor`: what max|b| is at least taken to be."""
    if found.shape != reference.shape:
        raise Wrong(f"{what} has shape {list(found.shape)}, expected {list(reference.shape)}")
    if not bool(found.isfinite().all()):
        raise Wrong(f"{what} has {not_finite(found)}", Error(math.inf, math.inf))
    apart, size = gap(found, reference), _size(reference)
    scale = max(size, floor)
    largest = apart.largest / scale if scale else (math.inf if apart.largest else 0.0)
    wide = reference.to(found.device)
    length = float(wide.norm()) * (scale / size if size else 0.0) or 1.0
    rel = float((found.double() - wide).norm()) / length
    return Error(largest, rel, _subnormal(found))


def _size(tensor: Tensor) -> float:
    return float(tensor.abs().max()) if tensor.numel() else 0.0


def _subnormal(tensor: Tensor) -> int:
    small = tensor.abs()
    return int(((small > 0) & (small < torch.finfo(tensor.dtype).tiny)).sum())


def untouched(seat: Seat, x: Tensor) -> None:
    """Raises Wrong where a seat's input or weights are not what they were: not even the values of the first copy."""
    if not torch.equal(seat.x.detach(), x):
        raise Wrong("changes its input x")
    if seat.changed() or not _equal(seat.copies[0], seat.made.params):
        raise Wrong("changes its weights")


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(a.detach(), b.detach()) for a, b in zip(some, others, strict=True))


def canonical_gradients(problem: Problem, seat: Seat, gradients: Mapping[int, Tensor | None]) -> dict[str, Tensor]:
    """Gradients of the canonical weights from those of a kernel's own form of them, by number, through its prepare.

    Raises Skipped where its prepare cannot be differentiated.
    """
    kernel = seat.made.kernel
    with torch.enable_grad():
        leaves = {name: tensor.detach().requires_grad_() for name, tensor in problem.weights.items()}
        params = kernel.prepare(problem.steps, leaves)
        pairs = [(params[n], d) for n, d in gradients.items() if d is not None]
        if not all(own.requires_grad for own, _ in pairs):
            raise Skipped("its prepare cannot be differentiated, so its gradients cannot be checked")
        own, given = [p for p, _ in pairs], [d for _, d in pairs]
        found = torch.autograd.grad(own, list(leaves.values()), given, allow_unused=True) if pairs else [None]
    zeros = {name: torch.zeros_like(tensor) for name, tensor in leaves.items()}
    return zeros | {n: d for n, d in zip(leaves, found, strict=False) if d is not None}


# --- what went wrong --------------------------------------------------------------------------------------------------


def verdict_of(error: BaseException) -> tuple[Status, str]:
    """(status, one line) for what a kernel raised."""
    text = error.message if isinstance(error, FFNError) else str(error)
    line = " ".join(text.split())
    line = line if len(line) <= 200 else line[:199] + "…"
    if isinstance(error, Wrong):
        return "wrong", line
    if isinstance(error, Skipped):
        return "skipped", line
    if out_of_memory(error):
        return "oom", line or "out of memory"
    if isinstance(error, NotImplementedError) or "not implemented for" in text:
        return "skipped", f"torch cannot do it here: {line}"
    if isinstance(error, FFNError):
        return "failed", line
    return "failed", f"{type(error).__name__}: {line}" if line else type(error).__name__


def out_of_memory(error: BaseException | None) -> bool:
    """Whether memory was what lacked, also where another error was made of it."""
    while error is not None:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
            return True
        if isinstance(error, (RuntimeError, FFNError)) and any(word in str(error) for word in _OUT_OF_MEMORY):
            return True
        if isinstance(error, FFNError) and "of memory are free" in error.message:
            return True
        error = error.__cause__
    return False
