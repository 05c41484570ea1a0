"""Is a kernel right? Its output and gradients are shown to the referee: before it is timed and after, on a fresh seed.

What it answers while it is timed is sampled by `fresh_inputs`. Limits and rulings are the referee's
(referee/rulings.py); here is what only the process that calls the kernel can see: what type it returns, and what it
writes to.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ffncli.bench.activity import ACTIVITY
from ffncli.bench.machine import machine
from ffncli.bench.machine.machine import KernelMemory
from ffncli.bench.referee.errors import GRADIENT, OUTPUT, Error, Ruling
from ffncli.bench.referee.problem import Inputs, Problem
from ffncli.bench.referee.rulings import form_fault
from ffncli.bench.timing.outcomes import WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.wrong_codes import WrongCode


def computing(backward: bool) -> AbstractContextManager[object]:
    """How kernels are called: a forward pass always in inference mode, a backward pass with gradients."""
    return torch.enable_grad() if backward else torch.inference_mode()


def first_call(placed: PlacedKernel, problem: Problem, memory: KernelMemory) -> float | None:
    """Seconds of building and of the first call, in which torch compiles; None for other kernels."""
    start = time.perf_counter()
    with computing(problem.backward), memory.keeping():
        placed.call()
        placed.forget()
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
    """The error of its last output and gradients, as the referee rules.

    Raises WrongResult for a wrong type, shape or dtype, or where the referee finds it wrong.
    """
    with torch.no_grad():
        out = checked_output(placed.output, problem).detach()
        given = {OUTPUT: out if inputs.rows is None else out[inputs.rows]}
    if problem.backward:
        given |= {GRADIENT + name: gradient for name, gradient in placed.gradients(problem).items()}
    with ACTIVITY.resting():  # a reference may take minutes
        ruling = problem.rules.ruling(placed.name, inputs.number, given)
    return obeyed(ruling)


def obeyed(ruling: Ruling) -> Error:
    """The error of a right answer. Raises WrongResult for a wrong one."""
    if ruling.wrong:
        raise WrongResult(ruling.wrong, ruling.error, ruling.code)
    return ruling.error


def checked_output(out: object, problem: Problem) -> Tensor:
    """The output [tokens, d_model]. Raises WrongResult for another type, device, shape or dtype."""
    if not isinstance(out, Tensor):
        raise WrongResult(f"returns a {type(out).__name__}, not a tensor")
    if type(out) not in (Tensor, torch.nn.Parameter):
        raise WrongResult(f"returns a {type(out).__name__}, not a plain tensor", code=WrongCode.LAZY_RESULT)
    if out.device != problem.first.x.device:
        raise WrongResult(f"returns a tensor on {out.device}, expected {problem.first.x.device}")
    if fault := form_fault(problem, out.shape, out.dtype, problem.case.tokens):
        raise WrongResult(fault)
    return out


def untouched(placed: PlacedKernel) -> None:
    """Raises WrongResult if its weights have changed; of a user's kernel by the values of the first copy too."""
    if placed.changed() or (placed.built.kernel.origin and not _equal(placed.copies[0], placed.built.params)):
        raise WrongResult("changes its weights", code=WrongCode.CHANGED_WEIGHTS)


def _equal(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(torch.equal(_plain(a), _plain(b)) for a, b in zip(some, others, strict=True))


def _plain(tensor: Tensor) -> Tensor:
    """A tensor that can be compared: one in oneDNN's layout as it was before."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor.detach()
