"""Probes: calls after timing that find out how a kernel gets its answers. None of them is timed for a result.

Each probe raises WrongResult for what it finds. Only minimum times over many calls in this process are compared.
"""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from statistics import fmean
from time import perf_counter_ns, process_time_ns, thread_time_ns

import torch

from ffncli.bench.records import OTHER_STREAM, OTHER_THREADS, TimedBlock
from ffncli.bench.referee.call_cost import INPUTS_OF_CALLS, call_cost
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.correctness import computing
from ffncli.bench.timing.fresh_inputs import Source
from ffncli.bench.timing.gpu.cuda_clock import CudaClock
from ffncli.bench.timing.placed_kernel import PlacedKernel
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.verdict import Ruling, WrongCode, WrongResult
from ffncli.block.steps import Norm, walk
from ffncli.kernels.kernel import canonical
from ffncli.show.text import percent, plural
from ffncli.system.child import processor_times

_TIMES = 5  # a finding counts if it occurs this many times in a row, unlike a disturbance
# On several threads, which wait for each other while others keep the cores busy, the least time of a few calls was
# below _KEPT of that of others half of the time.
_TIMES_TOGETHER = 25
_SERIES = 4  # pairs of series: calls on other inputs, then calls on the same input
_MOST_CALLS, _SERIES_NS = 64, 2_000_000  # limits of one series
_NEAR = 2.0**-6  # relative distance of other inputs (rms), larger than the rounding of bf16
_KEPT = 0.8  # minimum of time on the same input / time on another, both alone and relative to the baseline's
# Maximum of time here / time in the referee's process, on one thread and on several, and what the wrapper of a call may
# take here. Honest kernels reached 1.09 and, on two threads and a busy machine, 1.44 once in five times.
_SLOWER, _SLOWER_TOGETHER, _CALL_NS = 1.2, 1.4, 1000
_PAIRS = 8
_FAULTS = 1.0  # maximum page faults of a call beyond those in the referee's process
_FASTER = 0.7  # minimum ratio of a timed call's time to a single call's, which is usually slower
_CORES, _CORES_NS = 0.4, 20_000_000  # cores beyond the threads of the case, and how long they are counted
_STREAM_SHARE, _STREAM_BLOCKS = 0.5, 3  # minimum fraction of a kernel's blocks, and minimum number
_STREAM_CALLS = 32
# The largest share of blocks of others in which something of a file may wake, and the least number of looks. A thread
# that goes to sleep after its kernel's block does so in the lead-in of the next, or at most in one of several blocks.
_WAKING, _LOOKS = 0.6, 5
_IDLE, _IDLE_TIMES, _BUSY = 0.01, 5, 0.1  # s of idling, the number of tries, and the limit in cores
_STARTING = 5.0  # s for which a process may compute after it was started, as torch.compile's do


@dataclass(frozen=True)
class CallTimes:
    """The minimum processor time of a call, in ns: on another input than the previous call's, and on the same input."""

    other: int
    same: int

    @property
    def share(self) -> float:
        """The time on the same input, relative to the time on another input."""
        return self.same / self.other


def call_times(placed: PlacedKernel, problem: Problem, source: Source) -> CallTimes:
    """Measure the time of calls on other inputs and on the same input, in alternating series: at least two pairs of
    series, or about 20 ms if the calls are short.

    The other inputs differ from one input by a few per cent in every value, so that an MoE block chooses the same
    experts, whose weights are then equally cached.
    """
    others, sames = [], []
    placed.turn(0)
    x, _ = placed.entry
    source.write(x)
    like, noise = x.clone(), torch.empty_like(x)
    with computing(problem.backward):
        REPORTER.calls(placed.name)
        count = max(1, min(_MOST_CALLS, _SERIES_NS // max(1, _nanoseconds(placed.call))))
        for _ in range(_SERIES if count > 1 else 2):
            REPORTER.calls(placed.name)
            for _ in range(count):
                source.write(noise)
                torch.addcmul(like, like, noise, value=_NEAR, out=x)
                others.append(_nanoseconds(placed.call))
            sames += [_nanoseconds(placed.call) for _ in range(count)]
    return CallTimes(max(1, min(others)), min(sames))


def other_streams(users: Collection[str], blocks: Sequence[TimedBlock]) -> dict[str, Ruling]:
    """Return rulings on users' kernels that left the GPU work on an untimed stream, by the flags of their undisturbed
    blocks.

    A kernel that uses another stream does so in every block. A slow host causes the same flag: on H200s' virtual
    machines in 1 to 64 % of the blocks of kernels that use no other stream, and of two such kernels in one process in
    38 and 64 %. So the package's kernel that has it most often says how much of it is the host's.
    """
    flags: dict[str, list[bool]] = {}
    for block in blocks:
        if "preempted" not in block.flags:
            flags.setdefault(block.kernel, []).append(OTHER_STREAM in block.flags)
    late = max((fmean(ours) for name, ours in flags.items() if name not in users), default=0.0)
    wrong = {}
    for name in users:
        count, total = sum(flags.get(name, ())), len(flags.get(name, ()))
        if count >= _STREAM_BLOCKS and count > (_STREAM_SHARE + late / 2) * total:
            text = f"in {count} of {total} blocks the GPU was still working after the timed stream had finished"
            wrong[name] = Ruling(text, WrongCode.OTHER_STREAM)
    return wrong


def require_joined_streams(placed: PlacedKernel, clock: CudaClock, backward: bool) -> None:
    """Raise WrongResult if a kernel's calls leave a GPU work on an untimed stream, each time they are tried."""
    REPORTER.calls(placed.name)
    with computing(backward):
        if all(clock.leaves_work(placed.call, _STREAM_CALLS) for _ in range(_TIMES)):
            text = "after its calls the GPU was still working after the timed stream had finished"
            raise WrongResult(Ruling(text, WrongCode.OTHER_STREAM))


@dataclass(frozen=True)
class Probes:
    """The probes of a user's kernel. `known` are the threads and processes that existed before the kernel's file was
    loaded.

    `baseline` is None if the baseline is a user's kernel too; `blocks` are the timed blocks. `other_cores` is how many
    cores other processes kept busy during the blocks of the package's kernels, and `waking` in which of those that were
    looked at a thread or process of a file woke.
    """

    problem: Problem
    source: Source
    known: Collection[str]
    baseline: PlacedKernel | None
    blocks: Sequence[TimedBlock]
    other_cores: float = 0.0
    waking: Sequence[bool] = ()

    def require_honest(self, placed: PlacedKernel) -> None:
        """Raise WrongResult for the first probe that detects cheating."""
        self._require_baseline_as_elsewhere()
        self._require_no_kept_answers(placed)
        self._require_same_clock(placed)
        require_idle(self.known)
        self._require_no_more_cores(placed)
        self._require_baseline_alone()
        if self.problem.case.cache == "cold-weights" and not self.problem.backward:
            require_given_weights(placed, self.problem)

    @property
    def _tries(self) -> int:
        return _TIMES if self.problem.case.threads == 1 else _TIMES_TOGETHER

    def _times(self, placed: PlacedKernel) -> tuple[CallTimes, CallTimes | None]:
        """Return the times of a kernel's calls, and those of the baseline's calls just before."""
        base = call_times(self.baseline, self.problem, self.source) if self.baseline else None
        return call_times(placed, self.problem, self.source), base

    def _require_baseline_alone(self) -> None:
        """Raise WrongResult if something of this process computed while the baseline was timed."""
        threads = [block.figure(OTHER_THREADS) or 0.0 for block in self.blocks if self._is_baselines(block)]
        other_cores = max(self.other_cores, fmean(threads) if threads and self.problem.case.threads == 1 else 0.0)
        if other_cores > _BUSY:
            text = f"{other_cores:.1f} cores computed outside of its calls, while the baseline was timed"
            raise WrongResult(Ruling(text, WrongCode.DEFERRED_WORK))
        count, of = sum(self.waking), len(self.waking)
        if of >= _LOOKS and count > _WAKING * of:
            text = f"something that it has started wakes while others are timed, in {count} of {of} blocks"
            raise WrongResult(Ruling(text, WrongCode.DEFERRED_WORK))

    def _is_baselines(self, block: TimedBlock) -> bool:
        return self.baseline is not None and block.kernel == self.baseline.name

    def _require_baseline_as_elsewhere(self) -> None:
        """Raise WrongResult if a call of the baseline costs more here than in the referee's process, which never loaded
        a user's file.

        This finds whatever slows the baseline's forward pass down, by behaviour: nothing needs to be known about how it
        is done. Both processes time it on a single copy of the weights.
        """
        base, problem, referee = self.baseline, self.problem, self.problem.referee
        if base is None or referee is None:
            return
        kernel = base.built.kernel
        if kernel.compiles or kernel.per_weights or kernel.origin:
            return
        entered = [problem.inputs(number).x for number in INPUTS_OF_CALLS]
        one_copy = not problem.backward and len(base.copies) == 1
        call = base.call if one_copy else lambda: base.built.compute(base.x, base.copies[0])

        def turn(number: int) -> None:
            base.turn(number % len(entered))

        for number, x in enumerate(entered):
            turn(number)
            base.entry[0].copy_(x)
        threads, least, faults = problem.case.threads, inf, inf
        most = _SLOWER if threads == 1 else _SLOWER_TOGETHER
        for _ in range(_PAIRS):  # a machine that is mostly slow, and fast now and then, is not so in every pair
            REPORTER.calls(base.name)
            with computing(backward=False):
                time_here, faults_here = call_cost(call, turn, threads)
            time_elsewhere, faults_elsewhere = referee.call_cost(kernel.name)
            least = min(least, time_here / (time_elsewhere + _CALL_NS))
            faults = min(faults, faults_here - faults_elsewhere)
            if least <= most and faults <= _FAULTS:
                return
        how = f"takes {least:.2g} times as long as"
        if least <= most:
            how = f"causes {faults:.1f} page faults a call more than"
        text = f"the baseline {how} in a process that has not loaded the file"
        raise WrongResult(Ruling(text, WrongCode.ENVIRONMENT_CHANGED))

    def _require_no_kept_answers(self, placed: PlacedKernel) -> None:
        """Raise WrongResult if the kernel is faster on an input that it has seen before."""
        share = 0.0
        for _ in range(self._tries):
            times, base = self._times(placed)
            share = max(share, times.share)
            if times.share >= _KEPT * min(1.0, base.share if base else 1.0):
                return
        text = f"on an input that it has seen before, it takes {share:.2g} of its time on a new one"
        raise WrongResult(Ruling(text, WrongCode.REPLAY_BY_CONTENT))

    def _require_same_clock(self, placed: PlacedKernel) -> None:
        """Raise WrongResult if the kernel's timed calls were faster than any of its calls here, and the baseline's were
        not.

        If the machine is merely busier now, both kernels are slower here.
        """
        timed, timed_base = self._timed(placed), self._timed(self.baseline)
        if timed is None or timed_base is None or placed is self.baseline:
            return
        for _ in range(self._tries):
            times, base = self._times(placed)
            if base is None or timed / times.other >= _FASTER * min(1.0, timed_base / base.other):
                return
        text = f"its timed calls took {timed * 1e-3:.3g} µs each, but by another clock no call takes less than "
        raise WrongResult(Ruling(text + f"{times.other * 1e-3:.3g} µs", WrongCode.PATCHED_CLOCK))

    def _timed(self, placed: PlacedKernel | None) -> float | None:
        """Return the nanoseconds of a call in the fastest of its blocks; None if it has no blocks."""
        if placed is None:
            return None
        return min((1e9 * block.per_call for block in self.blocks if block.kernel == placed.name), default=None)

    def _require_no_more_cores(self, placed: PlacedKernel) -> None:
        """Raise WrongResult if the kernel's calls keep more cores busy than the case has threads.

        With one thread, the processor time of other threads is checked too: it is reliable however busy the machine is.
        """
        threads = self.problem.case.threads
        REPORTER.calls(placed.name)
        with computing(self.problem.backward):
            wall, before, busy, main_thread = perf_counter_ns(), processor_times(), process_time_ns(), thread_time_ns()
            while perf_counter_ns() - wall < _CORES_NS:
                placed.call()
            main_thread, busy = thread_time_ns() - main_thread, process_time_ns() - busy
            after, wall = processor_times(), perf_counter_ns() - wall
        others, processes = by_others(before, after, self.known), by_others(before, after, self.known, processes=True)
        limit = f"the case has {threads} {plural('thread', threads)}"
        if threads == 1 and others > _CORES * main_thread:
            share, what = percent(others / (main_thread + others)), "processes" if 2 * processes > others else "threads"
            raise WrongResult(Ruling(f"other {what} do {share} of its work, {limit}", WrongCode.THREADS_CHANGED))
        if (busy := busy + processes) > (threads + _CORES) * wall:
            raise WrongResult(Ruling(f"it uses {busy / wall:.1f} cores, {limit}", WrongCode.THREADS_CHANGED))


def require_idle(known: Collection[str]) -> None:
    """Raise WrongResult if threads or processes that are not `known` compute while no kernel is called."""
    cores, tries, start = inf, 0, time.monotonic()
    while True:
        wall, before = perf_counter_ns(), processor_times()
        time.sleep(_IDLE)
        after, wall = processor_times(), perf_counter_ns() - wall
        cores = min(cores, by_others(before, after, known) / wall)
        if cores <= _BUSY:
            return
        tries += 1
        starting = by_others(before, after, known, processes=True) and time.monotonic() - start < _STARTING
        if tries >= _IDLE_TIMES and not starting:
            break
    raise WrongResult(Ruling(f"a thread computes outside of its calls ({cores:.1f} cores)", WrongCode.DEFERRED_WORK))


def by_others(
    before: Mapping[str, int], after: Mapping[str, int], known: Collection[str], processes: bool = False
) -> int:
    """Return the processor time of threads and processes that are not `known`, or of the latter alone. Libraries'
    threads, which may spin, are `known`."""
    unknown = {*before, *after}.difference(known)
    of_threads = sum(after[one] - before.get(one, 0) for one in unknown if one.isdigit() and one in after)
    of_processes = sum(after.get(one, 0) - before.get(one, 0) for one in unknown if not one.isdigit())
    return max(0, of_processes) + (0 if processes else of_threads)


def require_given_weights(placed: PlacedKernel, problem: Problem) -> None:
    """Raise WrongResult if the kernel's answers come from other weights than the given weights.

    If the weights of `down` and its bias change sign, the output must change sign and nothing else.
    """
    if any(isinstance(step.op, Norm) and "down" in "".join(step.inputs) for _, step in walk(problem.steps)):
        return  # a norm after `down` may have a bias
    turned = {
        name: -tensor if name.rpartition(".")[0].endswith("down") else tensor.clone()
        for name, tensor in problem.weights.items()
    }
    REPORTER.first_call(placed.name)
    with torch.no_grad():
        kernel = placed.built.kernel
        params = (
            tuple(kernel.prepare(problem.steps, turned)) if kernel.prepare is not canonical else tuple(turned.values())
        )
        with torch.inference_mode():
            before, after = (placed.built.compute(placed.x, p).double() for p in (placed.copies[0], params))
    apart = float((before + after).abs().max()) / (float(before.abs().max()) or 1.0)
    if not apart <= 2 * problem.rules.limit(placed.name):
        text = f"with the weights of down negated, its output should be negated; it is off by {apart:.2g}"
        raise WrongResult(Ruling(text, WrongCode.STALE_WEIGHTS))


def _nanoseconds(call: Callable[[], object]) -> int:
    """Return the nanoseconds of a call: this thread's processor time, which excludes other programs and waiting for a
    core."""
    start = thread_time_ns()
    call()
    return thread_time_ns() - start
