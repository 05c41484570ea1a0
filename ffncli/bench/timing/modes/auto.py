"""choose: find the kernel that `auto` stands for in a case: the choice that an earlier run stored, or else the winner
of a race.

The race alternates between its candidates on one case, for a few seconds.

It runs in rounds of `rounds.measure`, like a benchmark. A candidate that is clearly slower drops out between the
rounds, so that the time goes to those that may win. Ratios are medians over rounds, with the intervals of medians: in a
short race, a host that takes the processor away for a moment must not decide the race. The least mean of the
undisturbed rounds wins: a kernel that waits for other kernels' threads in every third round costs its users that time.
As in a benchmark and in a model, an operation of torch precedes every call on a CPU and writes its input: a library
with threads of its own then waits for those of torch.
Nothing is verified here; the caller verifies the chosen kernel.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import cycle
from math import exp, log, log1p
from statistics import fmean, median

import torch
from torch import Tensor

from ffncli.bench.judge.statistics import Interval, median_interval
from ffncli.bench.machine import machine
from ffncli.bench.machine.counters import SystemCounters
from ffncli.bench.records import LEAST_TIME, Calibrate, Case, Job, Outcome
from ffncli.bench.referee.problem import Problem
from ffncli.bench.request.grid import cached
from ffncli.bench.timing.clock import Call, Clock
from ffncli.bench.timing.fresh_inputs import in_turn, source_of
from ffncli.bench.timing.gpu.cuda_clock import clock_for
from ffncli.bench.timing.modes import auto_choice
from ffncli.bench.timing.modes.auto_choice import AutoChoice
from ffncli.bench.timing.outcomes import require_device, verdict_of
from ffncli.bench.timing.placed_kernel import refusal, touched
from ffncli.bench.timing.placement import caching, flusher, nbytes
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import LONG_CALL, ONE_CALL, Arm, Plan, block_calls, measure
from ffncli.block.dtypes import find
from ffncli.block.recipe import FFNSpec
from ffncli.errors import FFNError
from ffncli.kernels import BUILT_IN, built_in
from ffncli.kernels.choice import KernelChoice
from ffncli.kernels.kernel import Kernel, Params, Steps
from ffncli.run.engine.prepare import dtype_of

_SAME_AS_EAGER = ("module",)  # makes the same calls as eager
# Tried first, in this order: if a call takes seconds, there is time for only the first few.
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
    """Choose the package's fastest kernel for a case, on this machine, with the current threads and math mode.

    `how`: `quick` leaves out kernels that need compilation, except those already `compiled`; `full` includes all
    kernels. The choice is stored; a stored `full` choice is preferred. Without a `problem`, random weights are drawn.
    `most_memory` is the bytes that this process may use. `any_tokens` leaves out kernels that are built for a single
    number of tokens; `without` lists kernels to leave out. Raises FFNError if no kernel computes the block.
    """
    problem = problem or Problem.of(case, 0)
    taking_part = (name for name in BUILT_IN if name not in without)
    order = sorted(taking_part, key=lambda name: _FIRST.index(name) if name in _FIRST else len(_FIRST))
    every = [kernel for name in order if _competes(kernel := built_in(name), problem)]
    every = [kernel for kernel in every if not (any_tokens and kernel.per_weights)]
    few = [kernel for kernel in every if not kernel.compiles or kernel.name in compiled]
    environment = machine.environment(case.device)
    keys = [auto_choice.key_of(case, environment, tuple(kernel.name for kernel in group)) for group in (every, few)]
    for key in keys if how == "quick" else keys[:1]:
        if choice := auto_choice.read(key):
            return replace(choice, note=f"{choice.note}, in an earlier run")
    kernels = few if how == "quick" else every
    copies, flush = _copies(case, problem, kernels, most_memory)
    x = problem.other(1)
    # As in a benchmark, a GPU's input stays the same.
    write = None if case.device.startswith("cuda") else partial(source_of(problem).write, x)
    choice = calibrate(case, problem.steps, copies, x, kernels, clock_for(case.device, case.threads), write, flush)
    try:
        auto_choice.keep(keys[1] if how == "quick" else keys[0], choice, case.key)
    except FFNError as error:
        return replace(choice, note=f"{choice.note} ({error.message})")
    return choice


def fastest(
    spec: FFNSpec, tokens: int, dtype: torch.dtype, device: str, how: Calibrate = "quick"
) -> tuple[KernelChoice, str]:
    """Return (the fastest kernel for a block with the current threads, a note with the reason).

    With few tokens, the weights are assumed to be outside the caches, because a model uses other weights between two
    calls of an FFN. `numpy` is left out if its BLAS does not use as many threads as torch. Raises FFNError as `choose`
    does.
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
    """Return the number of threads of numpy's BLAS; None if unknown."""
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    return next((int(library["num_threads"]) for library in threadpool_info() if library["user_api"] == "blas"), None)


def kernel_of_auto(
    name: str, job: Job, problem: Problem, compiled: Collection[str]
) -> tuple[Kernel | Outcome, AutoChoice]:
    """Return the kernel that `auto` stands for, under the label `name`, and the choice. All processes of a run use the
    first process's choice.

    If the kernel is unavailable, return an Outcome, its status and note, instead. Raises DeviceLost.
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
    """Return True if a kernel computes the case, in the case's dtype, and is not the same as eager."""
    return not refusal(kernel, problem) and not kernel.computes and kernel.name not in _SAME_AS_EAGER


def _copies(
    case: Case, problem: Problem, kernels: Sequence[Kernel], most_memory: int | None
) -> tuple[list[Mapping[str, Tensor]], Call | None]:
    """Return (copies of the weights, several for a cold case; the function that empties the caches before a call, or
    None)."""
    llc, room = machine.llc_and_room(case.device, most_memory)
    one = nbytes(tuple(problem.weights.values()))
    sizes = [one, *(one * kernel.forms(problem.dtype) for kernel in kernels)]
    mode = caching(case.cache, [(size, touched(problem)) for size in sizes], llc, room)
    more = [{name: tensor.clone() for name, tensor in problem.weights.items()} for _ in range(mode.copies - 1)]
    with torch.inference_mode(False):
        flush = flusher(llc, case.device) if mode.mode == "flush" else None
    return [problem.weights, *more], flush


# --- the race ---------------------------------------------------------------------------------------------------------

EAGER = "eager"
_SECONDS = 5.0  # maximum s of timing
_BLOCK = 2e-3  # minimum s of a block's calls
_SHORT, _LONG = 0.05, 1.0  # s; first calls shorter than _LONG are repeated, those shorter than _SHORT three times
_SLOWER = 1.3  # ratio to the fastest above which a candidate drops out
_BRIEF, _HOPELESS = 5e-3, 10.0  # s, ratio: a call shorter than _BRIEF drops out at once only above _HOPELESS
_ROUNDS = 6  # rounds per call of `measure`, if there is time
_CALLS = 4  # calls of a lead-in
_SLOW = 0.02  # s; there is no time to search for the length of a block of such calls
_AT_LEAST = 0.5  # minimum s of timing, even if the winner is known earlier: a disturbance lasts 0.1 s
_LEVEL = 0.9  # level of the two-sided intervals; "faster than eager" uses only one side
_DISTURBED = log(1.5)  # above the median: such a round was disturbed by other work
_PRECISE = 0.005  # half-width of a precise interval
_BY_ONE_CALL = 0.03  # how much faster a kernel must be if there was time for only one call of each kernel
_MOST_WALL = 6  # the race ends after this many times `seconds`, whatever it does between timings


def calibrate(
    case: Case, steps: Steps, copies: Sequence[Mapping[str, Tensor]], x: Tensor, kernels: Sequence[Kernel],
    clock: Clock, write: Call | None = None, flush: Call | None = None, seconds: float = _SECONDS,
) -> AutoChoice:  # fmt: skip
    """Return the fastest of the kernels for `x` [tokens, d_model]; calls alternate between the `copies` of the weights.

    Before every call, untimed, `write` writes new values into `x`, and `flush` empties the caches. The choice is eager
    unless another kernel is certainly faster. Kernels that raise are left out. Raises FFNError if no kernel is left.
    """
    with torch.enable_grad() if case.passes != "forward" else torch.inference_mode():
        race = Race(clock, seconds, write, flush)
        for kernel in kernels:
            if race.has_time:
                REPORTER.stage_again()
                if call := _built(case, steps, copies, x, kernel, clock):
                    race.enter(kernel.name, call)
        race.run()
    if not race.logs:
        raise FFNError("no kernel of the package computes this block here")
    return race.choice(len(kernels))


def _built(
    case: Case, steps: Steps, copies: Sequence[Mapping[str, Tensor]], x: Tensor, kernel: Kernel, clock: Clock
) -> Call | None:
    """Return the kernel's call, which uses the next copy of the weights each time; None if the kernel raises."""
    try:
        with torch.inference_mode(False), torch.no_grad():
            params = [tuple(kernel.prepare(steps, copy)) for copy in copies]
        call = _call(kernel, steps, case, x, params)
        for _ in range(len(params) if kernel.per_weights else int(kernel.compiles)):
            call()
        clock.finish()
    except Exception:  # whatever a library raises, only this candidate is left out
        clock.finish()  # raises if the kernel has made the GPU unusable
        return None
    return call


def _call(kernel: Kernel, steps: Steps, case: Case, x: Tensor, params: Sequence[Params]) -> Call:
    compute, turn = kernel.build(steps, case.device, dtype_of(case.dtype)), cycle(params)
    if case.passes == "forward":
        return lambda: compute(x, next(turn))
    entering, g = x.detach().requires_grad_(), torch.ones_like(x)  # shares the memory that is written to
    leaves = [tuple(t.detach().requires_grad_() for t in one) for one in params]
    taken = cycle(leaves)

    def both() -> object:
        weights = next(taken)
        return torch.autograd.grad(compute(entering, weights), (entering, *weights), g, allow_unused=True)

    return both


class Race:
    """Candidates of a race, with the logarithms of their seconds per call: of their first calls, then of each round."""

    def __init__(self, clock: Clock, seconds: float, write: Call | None = None, flush: Call | None = None) -> None:
        self.logs: dict[str, list[float]] = {}
        self._clock, self._most, self._flushes = clock, seconds, flush is not None
        self._before = in_turn(write, flush) if write or flush else None
        self._least = min(_AT_LEAST, seconds / 2)
        self._in: dict[str, Call] = {}
        self._wall = 0.0  # maximum s of one call with its untimed work, such as emptying caches
        self._began = clock.now()
        self.seconds = 0.0  # spent on timing

    @property
    def _best(self) -> str:
        """The candidate with the least mean so far."""
        return min(self._in, key=lambda name: _mean(self._latest(name)))

    def _latest(self, name: str) -> list[float]:
        """Return a candidate's logs of rounds or, before the first round, of its first calls."""
        return self.logs[name][1:] or self.logs[name]

    def _once(self, name: str) -> float:
        """Return the seconds of one call of a candidate."""
        return exp(median(self._latest(name)))

    @property
    def has_time(self) -> bool:
        """Whether another candidate may enter: two always may, and more if they leave time for rounds."""
        return len(self.logs) < 2 or (self.seconds <= self._most / 2 and self._wall_left > 0)

    @property
    def _wall_left(self) -> float:
        return _MOST_WALL * self._most - (self._clock.now() - self._began)

    def enter(self, name: str, call: Call) -> None:
        """Time a candidate's first calls; a kernel that raises does not enter."""
        began = self._clock.now()
        try:
            once = self._timed(call, 1)
            self._wall = max(self._wall, self._clock.now() - began)
            inner = 1 if self._flushes else max(1, round(_BLOCK / once))  # emptying caches takes long
            if once < _LONG:  # the first call is slow; a disturbance affects one block, but hardly the best of three
                self.seconds -= once
                once = min(self._timed(call, inner) for _ in range(3 if once < _SHORT else 1))
        except Exception:
            self._clock.finish()
            return
        self._in[name], self.logs[name] = call, [log(once)]
        self._drop(_HOPELESS if once < _BRIEF else _SLOWER)  # a disturbance may last as long as the three blocks

    def run(self) -> None:
        """Run rounds until the fastest candidate is known well enough, or the time is up."""
        times = 0
        while len(self._in) > 1 and (rounds := self._affordable()):
            self._measure(rounds, times)
            times += 1
            if self.seconds >= self._least / 2:
                self._drop()
            if self.seconds >= self._least and self._known():
                return

    def _affordable(self) -> int:
        """Return how many rounds of the remaining candidates fit into the time, including the search for a block's
        length."""
        each = wall = search = 0.0  # s per round, timed and in total; s of the search, about one and a half rounds
        for name in self._in:
            once = self._once(name)
            lead_in = 0 if once > ONE_CALL else 1 if once > LONG_CALL else _CALLS
            timed = (lead_in + block_calls(once, _BLOCK)) * once
            each, wall = each + timed, wall + (_CALLS + 2) * self._wall
            search += 0.0 if once > _SLOW else 1.5 * timed
        fitting = [(self._most - self.seconds - search) / each]
        fitting += [self._wall_left / wall - 1.5] if self._flushes else []
        return max(0, min(_ROUNDS, int(min(fitting))))

    def _measure(self, rounds: int, seed: int) -> None:
        """Time rounds of all remaining candidates; `seed` draws their orders."""
        # No kernel of the run has these names, so a call that hangs here is blamed on `auto`, not on `eager` or on
        # another kernel.
        arms = {}
        for name, call in self._in.items():
            slow = once if (once := self._once(name)) > _SLOW else None
            arms[f"auto {name}"] = Arm(f"auto {name}", call, self._before, flushes=self._flushes, slow_s=slow)
        names = tuple(arms)
        plan = Plan(names[0], names, _BLOCK, placements=1, rounds=rounds, target=0.0, budget=None, seed=seed)
        counters = SystemCounters(threads=torch.get_num_threads())
        measured = measure(0, "auto", lambda placement: tuple(arms.values()), self._clock, counters, plan)
        self.seconds += sum(measured.spent[on] for on in ("blocks", "lead_in", "warm_up"))
        for block in measured.blocks:
            self.logs[block.kernel.removeprefix("auto ")].append(log(max(block.per_call, LEAST_TIME)))

    def choice(self, count: int) -> AutoChoice:
        """Return the fastest candidate, or eager unless it has dropped out or the fastest is certainly faster."""
        best = self._best
        among, timed = f"of {count} kernels", f"timed for {max(0.1, self.seconds):.1f} s"
        if EAGER not in self.logs or best == EAGER:
            return AutoChoice(best, f"{best}, the fastest {among}, {timed}")
        ratio = self._ratio(best, EAGER)
        certain = EAGER not in self._in or (ratio.high if ratio.bounded else ratio.value + log1p(_BY_ONE_CALL)) < 0
        if not certain:
            return AutoChoice(EAGER, f"{EAGER}: none {among}, {timed}, is certainly faster")
        low, high = (f"{exp(end):.3f}" for end in (ratio.low, ratio.high))
        ends = f" [{low}, {high}]" if ratio.bounded else ""
        return AutoChoice(
            best, f"{best}, the fastest {among} ({exp(ratio.value):.3f}{ends} of {EAGER}'s time), {timed}"
        )

    def _timed(self, call: Call, inner: int) -> float:
        """Return the seconds per call over `inner` calls."""
        seconds = self._clock.time(call, inner, self._before)
        self.seconds += seconds
        return max(seconds / inner, LEAST_TIME)

    def _drop(self, limit: float = _SLOWER) -> None:
        """Leave out candidates that take more than `limit` times as long as the fastest even in their best round; this
        frees their memory. Their median would not do: on several threads, most of the first rounds may be disturbed."""
        most = median(self._latest(self._best)) + log(limit)
        for name in [name for name in self._in if min(self._latest(name)) > most]:
            del self._in[name]

    def _known(self) -> bool:
        """Return True if every other candidate is certainly slower than the fastest, or its ratio is precise."""
        best = self._best
        ratios = [self._ratio(name, best) for name in self._in if name != best]
        return all(ratio.low > 0 or ratio.half_width < _PRECISE for ratio in ratios)

    def _ratio(self, name: str, base: str) -> Interval:
        return median_interval(self._pairs(name, base), _LEVEL)

    def _pairs(self, name: str, base: str) -> list[float]:
        """Return the log ratios of two candidates in common rounds; without such rounds, of their first calls."""
        ratios = [a - b for a, b in zip(self.logs[name], self.logs[base], strict=False)]
        return ratios[1:] or ratios  # the first calls did not alternate


def _mean(logs: Sequence[float]) -> float:
    """Return the mean of the rounds that no other work disturbed."""
    limit = median(logs) + _DISTURBED
    return fmean(value for value in logs if value <= limit)
