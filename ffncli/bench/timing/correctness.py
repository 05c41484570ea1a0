"""Check whether a kernel is right: its output and gradients are shown to the referee before timing, and again after
timing on a fresh seed.

The kernel's answers during timing are sampled by `fresh_inputs`. Limits and rulings belong to the referee
(referee/rulings.py). This module checks what only the calling process can see: the type of the returned object, and the
memory that the kernel writes to.
"""

import time
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from ffncli.bench.machine import machine
from ffncli.bench.machine.machine import KernelMemory
from ffncli.bench.referee.problem import GRADIENT, OUTPUT, Inputs, Problem
from ffncli.bench.referee.rulings import form_fault
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.verdict import Error, Ruling, WrongCode, WrongResult


def computing(backward: bool) -> AbstractContextManager[object]:
    """Return the context manager for kernel calls: inference mode in a forward pass, otherwise with gradients."""
    return torch.enable_grad() if backward else torch.inference_mode()


def first_call(placed: PlacedKernel, problem: Problem, memory: KernelMemory) -> float | None:
    """Make the first call. Return how long the build and this call took; None if the kernel needs no compilation.

    Where no memory is counted, on a CPU, the answer stays with the kernel, to be checked.
    """
    start = time.perf_counter()
    with computing(problem.backward), memory.keeping():
        placed.call()
        if memory.counted:
            placed.forget()
    if placed.built.compile_s is None:
        placed.first_s = None if memory.counted else time.perf_counter() - start
        return None
    machine.finish(problem.case.device)
    return placed.built.compile_s + time.perf_counter() - start


# --- two moments ------------------------------------------------------------------------------------------------------


def before(placed: PlacedKernel, problem: Problem, whole: bool = True) -> Error:
    """Check before timing: first on other tokens, then twice on the tokens that will be timed. Unless `whole` is set,
    check only one call on the latter: the first call, if its answer is still there.

    This order catches a kernel that caches its first answer, and one that is correct only on its first call. Raises
    WrongResult, and the kernel's own exceptions.
    """
    first, ruling = problem.first, Ruling()
    changed = Ruling("changes its input x", WrongCode.CHANGED_INPUT)
    with computing(problem.backward):
        if whole:
            placed.enter(problem.other(1))
            placed.call_untimed()
            placed.forget()
        if placed.out is None:
            placed.enter(first.x)
        for call in ("", "its second call: ") if whole else ("",):
            if whole or placed.out is None:
                placed.call_untimed()
            if not torch.equal(placed.x.detach(), first.x):
                raise WrongResult(changed)
            ruling = ruling.then(compared(placed, problem, first).at(call))
            if ruling.wrong:
                raise WrongResult(ruling)
    if not torch.equal(placed.x.detach(), first.x):
        raise WrongResult(changed)
    if (touched := untouched(placed)).wrong:
        raise WrongResult(touched)
    return ruling.error


def fresh(placed: PlacedKernel, problem: Problem, inputs: Inputs) -> Ruling:
    """Check after timing, on new tokens in the buffers used for timing."""
    with computing(problem.backward):
        placed.enter(inputs.x, inputs.g)
        placed.call_untimed()
        return compared(placed, problem, inputs).at("on a fresh seed: ")


# --- comparing --------------------------------------------------------------------------------------------------------


def compared(placed: PlacedKernel, problem: Problem, inputs: Inputs) -> Ruling:
    """Return the ruling on the last output and its gradients. An output of the wrong form is ruled wrong without a
    comparison."""
    if (form := form_of(placed.output, problem)).wrong:
        return form
    assert isinstance(placed.output, Tensor)
    with torch.no_grad():
        out = placed.output.detach()
        given = {OUTPUT: out if inputs.rows is None else out[inputs.rows]}
    if problem.backward:
        given |= {GRADIENT + name: gradient for name, gradient in placed.gradients(problem).items()}
    with REPORTER.resting():  # computing a reference may take minutes
        return problem.rules.ruling(placed.name, inputs.number, given)


def form_of(out: object, problem: Problem) -> Ruling:
    """Check that the output has the right type, device, shape [tokens, d_model] and dtype."""
    if not isinstance(out, Tensor):
        return Ruling(f"returns a {type(out).__name__}, not a tensor")
    if type(out) not in (Tensor, torch.nn.Parameter):
        return Ruling(f"returns a {type(out).__name__}, not a plain tensor", WrongCode.LAZY_RESULT)
    if out.device != problem.first.x.device:
        return Ruling(f"returns a tensor on {out.device}, expected {problem.first.x.device}")
    return Ruling(form_fault(problem, out.shape, out.dtype, problem.case.tokens))


def untouched(placed: PlacedKernel) -> Ruling:
    """Check that the weights are unchanged; for a user's kernel, compare the values of the first copy too."""
    pairs = zip(placed.copies[0], placed.built.params, strict=True)
    kept = not placed.built.kernel.origin or all(torch.equal(_plain(a), _plain(b)) for a, b in pairs)
    if placed.changed() or not kept:
        return Ruling("changes its weights", WrongCode.CHANGED_WEIGHTS)
    return Ruling()


def _plain(tensor: Tensor) -> Tensor:
    """Return a tensor that can be compared: a tensor in oneDNN's layout is converted to the ordinary layout."""
    return tensor.to_dense() if tensor.is_mkldnn else tensor.detach()
