"""choose: the kernel that `auto` stands for in a case: the one kept from an earlier run, else the winner of a race."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.bench.machine import machine
from ffncli.bench.records import Calibrate, Case, Job, Outcome
from ffncli.bench.referee.problem import Problem
from ffncli.bench.request.grid import cached
from ffncli.bench.timing.auto import kept
from ffncli.bench.timing.auto.calibrate import calibrate
from ffncli.bench.timing.auto.kept import AutoChoice
from ffncli.bench.timing.clock import Call
from ffncli.bench.timing.cuda_clock import clock_for
from ffncli.bench.timing.outcomes import require_device, verdict_of
from ffncli.bench.timing.placed_kernel import refusal, touched
from ffncli.bench.timing.placement import caching, flusher, nbytes
from ffncli.bench.timing.reporter import REPORTER
from ffncli.block.dtypes import find
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.choice import KernelChoice
from ffncli.kernels.kernel import Kernel

_SAME_AS_EAGER = ("module",)  # it calls what eager calls
# Tried in this order, the rest after them: where a call takes seconds, there is time for the first few alone.
_FIRST = ("eager", "grouped", "onednn_packed", "onednn", "numpy", "mkl", "gemv", "packed", "conv1x1")


def choose(
    case: Case,
    problem: Problem | None = None,
    *,
    how: Calibrate = "quick",
    compiled: Collection[str] = (),
    most_memory: int | None = None,
    any_tokens: bool = False,
    without: Collection[str] = (),
) -> AutoChoice:
    """The fastest kernel of the package for a case, on this machine with the threads and the arithmetic set now.

    `how`: `quick` leaves out kernels that compile, but for those `compiled` already; `full` has all of them. A choice
    is kept, and a full one is preferred. Without a `problem`, random weights are drawn. `most_memory`: bytes that this
    process may use. `any_tokens` leaves out kernels that make something for every number of tokens, `without` those of
    these names. Raises FFNError if no kernel computes the block.
    """
    problem = problem or Problem.of(case, 0)
    taking_part = (name for name in BUILT_IN if name not in without)
    order = sorted(taking_part, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    every = [kernel for name in order if _competes(kernel := built_in(name), problem)]
    every = [kernel for kernel in every if not (any_tokens and kernel.per_weights)]
    few = [kernel for kernel in every if not kernel.compiles or kernel.name in compiled]
    environment = machine.environment(case.device)
    keys = [kept.key_of(case, environment, tuple(kernel.name for kernel in group)) for group in (every, few)]
    for key in keys if how == "quick" else keys[:1]:
        if choice := kept.read(key):
            return replace(choice, note=f"{choice.note}, in an earlier run")
    kernels = few if how == "quick" else every
    copies, before = _copies(case, problem, kernels, most_memory)
    x = problem.other(1)
    choice = calibrate(case, problem.steps, copies, x, kernels, clock_for(case.device), before)
    try:
        kept.keep(keys[1] if how == "quick" else keys[0], choice, case.key)
    except FFNError as error:
        return replace(choice, note=f"{choice.note} ({error.message})")
    return choice


def fastest(
    spec: FFNSpec, tokens: int, dtype: torch.dtype, device: str, how: Calibrate = "quick"
) -> tuple[KernelChoice, str]:
    """(the fastest kernel for a block with the threads set now, in a note's words why it is that one).

    With few tokens the weights are taken to be outside the caches: between two calls of an FFN a model computes others.
    Without `numpy` where its BLAS computes in more or fewer threads than torch. Raises FFNError as `choose` does.
    """
    row = find(str(dtype))
    if row is None:
        raise FFNError(f"auto knows no kernel for {dtype}")
    cache, threads = cached("auto", tokens), torch.get_num_threads()
    label = f"{spec.d_model}x{spec.d_ff}:{spec.activation}"
    case = Case(label, label, spec, tokens, row.name, cache=cache, device=device, threads=threads)
    choice = choose(case, how=how, any_tokens=True, without=() if _blas_threads() in (None, threads) else ("numpy",))
    return KernelChoice(choice.kernel, choice.kernel), f"auto: {choice.note}"


def _blas_threads() -> int | None:
    """Threads of numpy's BLAS; None if unknown."""
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    return next((int(library["num_threads"]) for library in threadpool_info() if library["user_api"] == "blas"), None)


def kernel_of_auto(
    name: str, job: Job, problem: Problem, compiled: Collection[str]
) -> tuple[Kernel | Outcome, AutoChoice]:
    """The kernel that `auto` stands for in this run, under its name in results: that of the run's earlier processes.

    In place of a kernel that cannot be had, its outcome. Raises DeviceLost.
    """
    REPORTER.stage("compiling", name)
    if earlier := job.chosen_in(problem.case).get(name):
        return replace(built_in(earlier), name=name), AutoChoice(earlier, "")
    try:
        choice = choose(
            problem.case, problem, how=job.method.calibrate, compiled=compiled,
            most_memory=job.method.memory_limit,
        )  # fmt: skip
    except FFNError as error:
        return Outcome(name, *verdict_of(error)), AutoChoice("", "")
    except RuntimeError as error:
        require_device(clock_for(problem.case.device), name, error)
        raise
    return replace(built_in(choice.kernel), name=name), choice


def _competes(kernel: Kernel, problem: Problem) -> bool:
    """Whether a kernel computes the case in its dtype, and differs from those before it."""
    return not refusal(kernel, problem) and not kernel.computes and kernel.name not in _SAME_AS_EAGER


def _copies(
    case: Case, problem: Problem, kernels: Sequence[Kernel], most_memory: int | None
) -> tuple[list[Mapping[str, Tensor]], Call | None]:
    """(copies of the weights, more than one where they are to be cold; what empties the caches before each call)."""
    llc, room = machine.llc_and_room(case.device, most_memory)
    one = nbytes(tuple(problem.weights.values()))
    arms = [one, *(one * kernel.forms(problem.dtype) for kernel in kernels)]
    mode = caching(case.cache, arms, touched(problem), llc, room)
    more = [{name: tensor.clone() for name, tensor in problem.weights.items()} for _ in range(mode.copies - 1)]
    with torch.inference_mode(False):
        before = flusher(llc, case.device) if mode.mode == "flush" else None
    return [problem.weights, *more], before
