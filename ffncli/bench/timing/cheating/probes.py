"""Calls after timing that ask how a kernel gets its answers. None of them is timed for a result.

Each raises WrongResult for what it finds; times are compared within this process, by the least of many calls.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from math import inf
from time import perf_counter_ns, process_time_ns, thread_time_ns

import torch

from ffncli.bench.judge.wrong_codes import WrongCode
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.fresh_inputs import Source
from ffncli.bench.timing.outcomes import WrongResult
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.block.steps import Norm, walk
from ffncli.kernels.kernel import canonical

_TIMES = 3  # a finding counts if it comes as often in a row: disturbances do not
_SERIES = 4  # of calls on other inputs and of calls on the same one, in turn
_LEAST_CALLS, _MOST_CALLS, _SERIES_NS = 4, 64, 2_000_000  # of a series
_KEPT = 0.8  # of the time of a call on another input, also relative to the baseline's
_CORES = 0.4  # cores beyond the threads of the case
_IDLE, _SETTLED, _BUSY = 0.01, 0.005, 0.3  # s of doing nothing, s before it for threads to fall asleep; cores


def require_honest(placed: PlacedKernel, problem: Problem, source: Source, baseline: float) -> None:
    """All of these. Raises WrongResult for the first that a kernel does not pass."""
    require_no_kept_answers(placed, problem, source, baseline)
    require_no_more_cores(placed, problem)
    if problem.case.cache == "cold-weights" and not problem.backward:
        require_given_weights(placed, problem)
    require_idle()


def time_on_same_input(placed: PlacedKernel, problem: Problem, source: Source) -> float:
    """The time of a call whose input is that of the call before, over the time of one with another input."""
    other = same = inf
    placed.turn(0)
    with correct.computing(problem.backward):
        count = max(_LEAST_CALLS, min(_MOST_CALLS, _SERIES_NS // max(1, _nanoseconds(placed.call))))
        for _ in range(_SERIES):
            for _ in range(count):
                source.write(placed.entry[0])
                other = min(other, _nanoseconds(placed.call))
            for _ in range(count):
                same = min(same, _nanoseconds(placed.call))
    return same / max(1, other)


def require_no_kept_answers(placed: PlacedKernel, problem: Problem, source: Source, baseline: float) -> None:
    """Raises WrongResult where an input that it has had costs it less; `baseline` is what the baseline's share is."""
    share = 0.0
    for _ in range(_TIMES):
        share = max(share, time_on_same_input(placed, problem, source))
        if share >= _KEPT * min(1.0, baseline):
            return
    text = f"on an input that it has had it takes {share:.2g} of its time on another one"
    raise WrongResult(text, code=WrongCode.REPLAY_BY_CONTENT)


def require_no_more_cores(placed: PlacedKernel, problem: Problem) -> None:
    """Raises WrongResult where its calls keep more cores busy than the case has threads."""
    threads = problem.case.threads
    cores = inf
    for _ in range(_TIMES):
        with correct.computing(problem.backward):
            wall, busy = perf_counter_ns(), process_time_ns()
            while perf_counter_ns() - wall < _SERIES_NS:
                placed.call()
            cores = min(cores, (process_time_ns() - busy) / (perf_counter_ns() - wall))
        if cores <= threads + _CORES:
            return
    raise WrongResult(f"it uses {cores:.1f} cores, the case has {threads}", code=WrongCode.THREADS_CHANGED)


def require_idle() -> None:
    """Raises WrongResult where other threads of this process compute while nothing is asked of anybody."""
    cores = inf
    for _ in range(_TIMES):
        time.sleep(_SETTLED)
        wall, busy, own = perf_counter_ns(), process_time_ns(), thread_time_ns()
        time.sleep(_IDLE)
        others = process_time_ns() - busy - (thread_time_ns() - own)
        cores = min(cores, others / (perf_counter_ns() - wall))
        if cores <= _BUSY:
            return
    raise WrongResult(f"a thread computes outside of its calls ({cores:.1f} cores)", code=WrongCode.DEFERRED_WORK)


def require_given_weights(placed: PlacedKernel, problem: Problem) -> None:
    """Raises WrongResult where it answers with other weights than those that it is given.

    With the sign of `down` changed, and of its bias, the output changes its sign and nothing else.
    """
    if any(isinstance(step.op, Norm) and "down" in "".join(step.inputs) for _, step in walk(problem.steps)):
        return  # a norm behind `down` may have a bias
    turned = {
        name: -tensor if name.rpartition(".")[0].endswith("down") else tensor.clone()
        for name, tensor in problem.weights.items()
    }
    with torch.no_grad():
        kernel = placed.built.kernel
        params = (
            tuple(kernel.prepare(problem.steps, turned)) if kernel.prepare is not canonical else tuple(turned.values())
        )
        with torch.inference_mode():
            before, after = (placed.built.compute(placed.x, p).double() for p in (placed.copies[0], params))
    apart = float((before + after).abs().max()) / (float(before.abs().max()) or 1.0)
    if not apart <= 2 * placed.limit:
        text = f"with the weights of down negated its output should be negated; it is off by {apart:.2g}"
        raise WrongResult(text, code=WrongCode.STALE_WEIGHTS)


def _nanoseconds(call: Callable[[], object]) -> int:
    start = perf_counter_ns()
    call()
    return perf_counter_ns() - start
