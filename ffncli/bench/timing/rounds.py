"""measure: time one case in one process, in placements of rounds of blocks, in balanced order, until precise enough."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import ceil, inf, log, log1p, sqrt
from random import Random
from typing import TypeAlias

from ffncli.bench.judge import statistics
from ffncli.bench.machine.counters import Counters
from ffncli.bench.records import ANCHOR, DISTURBANCES, GEMM, LEAST_TIME, QUARTILE, THREAD, Method, TimedBlock
from ffncli.bench.timing.clock import Call, Clock
from ffncli.bench.timing.reporter import REPORTER

LONG_CALL = 1e-3  # s; a call that takes longer needs only one lead-in call, which fills the caches
_LEAD_IN = 2  # minimum lead-in calls: the first one fills the caches
_SHORT_LEAD_IN = 4  # minimum lead-in calls, if they take less than _SHORT_CALL each
_SHORT_CALL = 50e-6
_MOST_LEAD_IN = 12
_AGREE = 0.05
_OF_MEDIANS = 1.2533  # standard error of a median divided by that of a mean, for normal values: √(π / 2)
_PLACING = 0.15  # maximum fraction of the time, if more rounds can achieve it
_WITHIN = 0.6  # of the half-width: 36 % of the variance, the rest is for the differences between processes
_LAST_PLACEMENT = 1.1  # of the budget: the last of the requested placements may end this late
_MOST_WALL = 20  # a block may last this many block lengths, untimed work included
_LEAST_CALLS = 4  # minimum calls per block if untimed work between the calls takes most of the time
_LED_IN_CALLS = 5  # minimum calls per block, so that the lead-in is a small part
_LONG_LED_IN_CALLS = 3  # if a call takes longer than _LONG_BLOCK_CALL: more rounds are worth more than a small lead-in
_LONG_BLOCK_CALL = 0.01  # s
_LEAST_BLOCK = 5e-4  # s, on a busy machine
ONE_CALL = 0.1  # s; a call that takes longer is a block by itself, without a lead-in
_NEARLY = 1.2  # if its call takes at most this many times the baseline's, or the reverse, an arm makes as many calls
_LONG_ESTIMATE = 0.02  # s; a call that takes longer is not timed again to estimate its time
_MOST_CALL = 1.0  # s; a call that takes longer is called only once to estimate its time
_SELDOM = {ANCHOR: 2, GEMM: 4}  # timed only in every second or fourth round, since these arms are not judged
_SHARE = 3  # a slow arm takes part in fewer rounds if its block would take more than this many typical blocks
_LEAST_SAMPLES = 3  # number of rounds of a process in which even the slowest arm takes part
# s. A block of 4 ms costs little more than its calls; its lead-in and counters would be a third of a shorter block.
BLOCK_SECONDS = {"cpu": 4e-3, "cuda": 1e-3}
# On a CPU, disturbances last a scheduler's tick, 4 ms. They spoil one of many short blocks, and a median ignores that
# block, but they spoil a part of every long block: on a busy machine, blocks of 10, 5 and 2 ms scattered by 2.4, 1.4
# and 1.0 % in equal time. So after a placement in which more than this share of the blocks was disturbed, blocks are
# half as long, down to _LEAST_BLOCK; they are a quarter as long from the start if the threads have waited for more than
# this share of the time before.
_DISTURBED = 0.1


class ChangedRecords(Exception):
    """The recorded times differ from those read from the clock; the text says how this was noticed."""


@dataclass(frozen=True)
class Arm:
    """A call that is timed in turn with the others. `before` runs untimed before every call.

    `flushes` is true if `before` empties the caches; this takes so long that a block's processor time does not show
    what the calls do. `before_block` runs before a timed block, after its lead-in, and receives the number of calls;
    `after_block` runs after it. One `call` makes `calls` calls at once if it replays a graph; a block then contains a
    multiple of `calls`. `slow_s` is the time of an earlier call that took long.
    """

    name: str
    call: Call
    before: Call | None = None
    flushes: bool = False
    before_block: Callable[[int], object] | None = None
    after_block: Call | None = None
    calls: int = 1
    slow_s: float | None = None


Captured: TypeAlias = Callable[[Mapping[str, int]], Sequence[Arm]]


@dataclass(frozen=True)
class Plan:
    """How much of a case to measure in this process. Times are in seconds.

    `kernels` are the arms whose log ratio to `baseline` must reach `target`, the half-width of this process's value
    (derived by `plan_of`). `budget` is for the whole case in this process, including placing; within it, `placements`
    are made, with `rounds` in each of them. One placement with one round is completed even if it takes longer (for a
    single process: all placements, since its interval is over them). Without a budget, exactly these placements and
    rounds are completed. `processes` is the number of processes in the final average; `threads` is the number of
    computing threads (0: do not judge a block by its processor time, as on a GPU). A ratio far beyond `margin` is
    certain.
    """

    baseline: str
    kernels: tuple[str, ...]
    block: float
    placements: int
    rounds: int
    target: float
    budget: float | None
    seed: int
    processes: int = 5
    threads: int = 0
    margin: float = 0.02


@dataclass(frozen=True)
class Measured:
    """Every block in chronological order.

    `reached` is true if the target was reached; `spent` holds the seconds in `blocks`, `lead_in`, `placing`, `warm_up`
    (finding `inner`) and the `rest`.
    """

    blocks: tuple[TimedBlock, ...]
    reached: bool
    spent: Mapping[str, float]


def plan_of(method: Method, baseline: str, kernels: Sequence[str], device: str = "cpu", threads: int = 0) -> Plan:
    """Return one process's part of a method.

    The half-width of a mean over K processes is 1/√K of the half-width of one process, so each process could reach √K
    times the requested half-width. But processes differ, so the noise within them may take only _WITHIN of that.
    """
    block = method.block if method.block is not None else BLOCK_SECONDS["cuda" if device.startswith("cuda") else "cpu"]
    return Plan(
        baseline=baseline,
        kernels=tuple(kernels),
        block=block,
        placements=method.placements,
        rounds=method.rounds,
        target=log1p(method.precision) * sqrt(method.processes) * _WITHIN,
        budget=method.max_time / method.processes,
        seed=method.seed,
        processes=method.processes,
        threads=0 if device.startswith("cuda") else threads,
        margin=method.margin,
    )


def measure(
    process: int,
    case: str,
    place: Callable[[int], Sequence[Arm]],
    clock: Clock,
    counters: Counters,
    plan: Plan,
    captured: Captured | None = None,
) -> Measured:
    """Time the arms of `place(0)`, `place(1)`, ...: each call of `place` allocates all tensors again and returns the
    same arms.

    After each placement, `captured` receives the number of calls per block of each arm, and returns the arms in the
    form to be timed; if it returns no arms, the arms are timed as placed.

    Ends once every kernel's value is as precise as `plan.target` or the budget is spent, but not before the minimum of
    placements and rounds. It never stops because of a ratio's value: that would bias the result.
    """
    measurement = _Measurement(process, case, clock, counters, plan)
    measured = measurement.run(place, captured)
    if measurement.clock is not clock:
        raise ChangedRecords("the clock of the measurement was replaced")
    if kernel := measurement.rewritten():
        raise ChangedRecords(f"the records of {kernel}'s blocks were rewritten")
    return measured


def orders(names: Sequence[str], random: Random) -> Iterator[tuple[str, ...]]:
    """Yield endless orders in which every name is in every position, and follows every other name, equally often.

    The orders are rows of Williams squares (Williams 1949), randomly relabelled each time. Over n rounds the balance is
    exact (for followers over 2n, if n is odd); over fewer rounds, no name has the same position twice.
    """
    n = len(names)
    # 0, 1, n-1, 2, n-2, ...: each difference of neighbours occurs once modulo n, so each name follows every other name
    # once.
    zigzag = [(k + 1) // 2 if k % 2 else (n - k // 2) % n for k in range(n)]
    while True:
        labels = list(names)
        random.shuffle(labels)
        for reverse in (False, True) if n % 2 else (False,):
            rows = [[labels[(start + z) % n] for z in zigzag] for start in range(n)]
            random.shuffle(rows)
            for row in rows:
                yield tuple(reversed(row)) if reverse else tuple(row)


def block_calls(per_call: float, block: float) -> int:
    """Return how many calls last about `block` seconds, or the least number of calls in a block."""
    least = _LED_IN_CALLS if per_call < _LONG_BLOCK_CALL else _LONG_LED_IN_CALLS if per_call < ONE_CALL else 1
    return max(min(round(block / per_call), 2**30), least)


def half_width(placements: Sequence[Sequence[float]], processes: int) -> float:
    """Return the half-width of this process's value, given the log ratios of each placement. It is computed like the
    interval over all processes.

    With K processes, t has K − 1 degrees of freedom, as if all processes scattered like this one's placements; a single
    process is judged by its placements. A few placements may agree by chance, so the half-width is at least what the
    scatter of the rounds within placements implies.
    """
    placements = [p for p in placements if p]  # a slow arm is not timed in every placement
    medians = [statistics.median(p) for p in placements]
    count = len(medians)
    if count < 2:
        return inf
    degrees = sum(len(p) - 1 for p in placements)
    away = [v - middle for p, middle in zip(placements, medians, strict=True) for v in p]
    within = _OF_MEDIANS * statistics.mad(away) / sqrt(degrees) if degrees else 0.0
    t = statistics.t_quantile(0.975, processes - 1 if processes > 1 else count - 1)
    return t * max(statistics.standard_error(medians), within)


@dataclass
class _Measurement:
    """The state of one `measure`."""

    process: int
    case: str
    clock: Clock
    counters: Counters
    plan: Plan
    blocks: list[TimedBlock] = field(default_factory=list)
    spent: dict[str, float] = field(
        default_factory=lambda: dict.fromkeys(("blocks", "lead_in", "placing", "warm_up"), 0.0)
    )
    inner: dict[str, int] = field(default_factory=dict)  # calls per block
    block: float = 0.0  # s; shorter than planned on a busy machine
    per_call: dict[str, float] = field(default_factory=dict)  # estimated s
    cost: dict[str, float] = field(default_factory=dict)  # estimated s of a block with its lead-in
    every: dict[str, int] = field(default_factory=dict)  # an arm is timed in every n-th round
    certain: set[str] = field(default_factory=set)  # kernels whose ratio needs no more precision
    rounds_done: int = 0  # over all placements
    wall: dict[str, float] = field(default_factory=dict)  # s per call, including its untimed work
    log_ratios: dict[str, list[list[float]]] = field(default_factory=dict)

    def run(self, place: Callable[[int], Sequence[Arm]], captured: Captured | None) -> Measured:
        plan, began = self.plan, self.clock.now()
        random = Random(f"{plan.seed} {self.process} {self.case}")
        placement, longest, reached = 0, 0.0, False
        while self._affords(placement, self.clock.now() - began + longest):
            started = self.clock.now()
            with self._spending("placing"):
                arms = {arm.name: arm for arm in place(placement)}
            placed = self.clock.now() - started
            if not self.inner:
                with self._spending("warm_up"):
                    self._choose_inner(arms)
                self.log_ratios = {kernel: [] for kernel in plan.kernels if kernel in arms and kernel != plan.baseline}
            if captured:
                before = self.spent["placing"]
                with self._spending("placing"):
                    arms = {arm.name: arm for arm in captured(self.inner)} or arms
                placed += self.spent["placing"] - before
            self._rounds(placement, arms, orders(list(arms), random), placed, self.clock.now() - began)
            REPORTER.rests()
            del arms  # free the tensors before the next placement allocates memory
            placement += 1
            longest = max(longest, self.clock.now() - started)
            self._adapt()
            reached = all(
                half_width(p, plan.processes) <= plan.target or self._certain(p) for p in self.log_ratios.values()
            )
            if reached and placement >= plan.placements:
                break
        total = self.clock.now() - began
        spent = {**self.spent, "rest": max(0.0, total - sum(self.spent.values()))}
        return Measured(tuple(self.blocks), reached, spent)

    def _affords(self, placement: int, seconds: float) -> bool:
        """Return whether to make one more placement, if the process would then have taken `seconds`."""
        plan, requested = self.plan, placement < self.plan.placements
        if plan.budget is None:
            return requested
        if placement == 0 or (requested and plan.processes == 1):
            return True
        return seconds <= plan.budget * (_LAST_PLACEMENT if requested else 1)

    def rewritten(self) -> str:
        """Return a kernel whose blocks no longer yield the ratios that were computed during timing; empty if there is
        no such kernel."""
        times: dict[tuple[int, int], dict[str, float]] = {}
        for block in self.blocks:
            times.setdefault((block.placement, block.round), {})[block.kernel] = max(block.per_call, LEAST_TIME)
        base = self.plan.baseline
        for kernel, before in self.log_ratios.items():
            now = [log(one[kernel] / one[base]) for one in times.values() if kernel in one and base in one]
            if now != [value for placement in before for value in placement]:
                return kernel
        return ""

    @contextmanager
    def _spending(self, on: str) -> Iterator[None]:
        start = self.clock.now()
        try:
            yield
        finally:
            self.spent[on] += self.clock.now() - start

    def _choose_inner(self, arms: Mapping[str, Arm]) -> None:
        """Choose each arm's number of calls per block, so that all blocks last equally long; and the rounds of slow
        arms.

        A disturbance then hits every arm's blocks equally often. With equal numbers of calls instead, the blocks of an
        arm that takes twice as long would be hit twice as often, and the median of the ratios would be too high.
        """
        before, start = self.counters.read().waited or 0.0, self.clock.now()
        for arm in arms.values():
            self.per_call[arm.name], self.wall[arm.name] = self._estimate(arm)
        self._shorten(1)
        if (self.counters.read().waited or 0.0) - before > _DISTURBED * (self.clock.now() - start):
            self._shorten(4)
        self._choose_rounds()

    def _choose_rounds(self) -> None:
        """Choose how often each arm is timed: arms that are not judged, and slow arms, not in every round.

        A slow arm's blocks may take _SHARE times as long as a typical block, on average over all rounds; but an arm is
        timed a few times in any case.
        """
        plan = self.plan
        self.cost = {name: (count + _LEAD_IN) * self.wall[name] for name, count in self.inner.items()}
        typical = statistics.median(list(self.cost.values()))
        for name, cost in self.cost.items():
            self.every[name] = 1 if name in (plan.baseline, *plan.kernels) else _SELDOM.get(name, 1)
            if name != plan.baseline and plan.budget is not None:
                share = round(cost / (_SHARE * typical))
                # An odd number, so that it is not always the same round of a placement, such as the first one.
                self.every[name] = max(self.every[name], share | 1)
        if plan.budget is None:
            return
        expected = plan.budget / sum(cost / self.every[name] for name, cost in self.cost.items())
        most = plan.rounds if plan.processes == 1 else max(1, int(expected / _LEAST_SAMPLES))
        for name, every in self.every.items():
            self.every[name] = max(min(every, most), plan.rounds if name in self.certain else 1)

    def _adapt(self) -> None:
        """Shorten the blocks if the last placement was disturbed; time arms less often whose ratio is certain."""
        last = [block for block in self.blocks if block.placement == self.blocks[-1].placement]
        disturbed = sum(not DISTURBANCES.isdisjoint(block.flags) for block in last) > _DISTURBED * len(last)
        if disturbed:
            self._shorten(2)
        self.certain.update(kernel for kernel, placements in self.log_ratios.items() if self._certain(placements))
        self._choose_rounds()

    def _shorten(self, times: int) -> None:
        """Make blocks shorter by this factor."""
        self.block = max((self.block or self.plan.block) / times, min(_LEAST_BLOCK, self.plan.block))
        self.inner = {name: self._calls(name) for name in self.per_call}

    @property
    def _busy(self) -> bool:
        """Whether blocks are shorter than planned, since the machine is busy."""
        return 0 < self.block < self.plan.block

    def _calls(self, name: str) -> int:
        """Return the number of calls in an arm's block. Short blocks are not shorter than a call of the kernels, so
        that the blocks of all kernels still last equally long.

        Calls become faster within a block, and estimates are 10 % off: if the first of several equal kernels made fewer
        calls than the others, because it was estimated first, it would look 0.3 % slower.
        """
        plan, per_call, base = self.plan, self.per_call[name], self.per_call.get(self.plan.baseline, 0.0)
        if per_call <= _NEARLY * base and base <= _NEARLY * per_call:
            per_call = base
        count = block_calls(per_call, plan.block)
        if self._busy:
            calls = [self.per_call[kernel] for kernel in (plan.baseline, *plan.kernels) if kernel in self.per_call]
            block = max([self.block, *(seconds for seconds in calls if seconds < plan.block / 2)])
            count = max(1, min(round(block / per_call), 2**30))
        if self.wall[name] > 2 * per_call:  # untimed work takes most of the time, such as emptying the caches
            count = min(count, max(_LEAST_CALLS, int(_MOST_WALL * plan.block / self.wall[name])))
        return count

    def _estimate_again(self, name: str, per_call: float) -> None:
        """Lower an arm's estimated time, which other work or a slow first call made too high, to that of a faster
        block; by at most half, since a single block may be too fast."""
        if per_call < self.per_call[name]:
            factor = max(per_call / self.per_call[name], 0.5)
            self.per_call[name] *= factor
            self.wall[name] *= factor
            self.inner = {name: self._calls(name) for name in self.per_call}
            self._choose_rounds()

    def _certain(self, placements: Sequence[Sequence[float]]) -> bool:
        """Return whether a kernel's ratio needs no more precision (`statistics.certain`).

        This depends on the value, but only if the value is many half-widths from the margin, so its bias is far below
        the interval.
        """
        value = statistics.median([v for p in placements for v in p])
        return statistics.certain(value, half_width(placements, self.plan.processes), self.plan.margin)

    def _estimate(self, arm: Arm) -> tuple[float, float]:
        """Estimate the seconds of a call, without and with its untimed work: double the number of calls until they fill
        a quarter of a block.

        Then time that number twice more. The minimum counts, because disturbances only add time, and too high an
        estimate would make the block too short.
        """
        if arm.slow_s is not None:
            return arm.slow_s, arm.slow_s
        count, again = 1, 2
        REPORTER.calls(arm.name)
        first = self.clock.time(arm.call, 1, arm.before)  # the first call is always slow
        if first > _MOST_CALL:
            return first, first
        least, least_wall = inf, inf
        while True:
            REPORTER.calls(arm.name)
            start = self.clock.now()
            seconds = self.clock.time(arm.call, count, arm.before)
            wall = max(self.clock.now() - start, seconds, LEAST_TIME)
            if wall < self.plan.block / 4 and count < 2**20 and least == inf:
                count *= 2
                continue
            least, least_wall = min(least, max(seconds / count, LEAST_TIME)), min(least_wall, wall / count)
            if not again or wall > _LONG_ESTIMATE:
                return least, least_wall
            again -= 1

    def _rounds(
        self, placement: int, arms: Mapping[str, Arm], order: Iterator[tuple[str, ...]], placed: float, spent: float
    ) -> None:
        """Run a placement's rounds, as many as `_wanted`; `placed` is the seconds that placing took, and `spent` the
        seconds since the beginning."""
        for log_ratios in self.log_ratios.values():
            log_ratios.append([])
        number, wanted, first, done = 0, 1, self.clock.now(), 0.0
        while number < wanted:
            times = {}
            due = [name for name in next(order) if self.rounds_done % self.every[name] == 0]
            done += sum(self.cost[name] for name in due)
            for position, name in enumerate(due):
                self.blocks.append(self._block(placement, number, position, arms[name]))
                times[name] = max(self.blocks[-1].per_call, LEAST_TIME)
            for kernel, log_ratios in self.log_ratios.items():
                if kernel in times and self.plan.baseline in times:
                    log_ratios[-1].append(log(times[kernel] / times[self.plan.baseline]))
            number += 1
            self.rounds_done += 1
            expected = sum(cost / self.every[name] for name, cost in self.cost.items())
            one_round = (self.clock.now() - first) * expected / done
            wanted = max(number, self._wanted(placement, placed, one_round, spent))

    def _wanted(self, placement: int, placed: float, one_round: float, spent: float) -> int:
        """Return the number of rounds of a placement: twice the requested number, so that spikes can be recognised;
        more if placing takes long.

        The number is limited so that this placement and those still to be made fit into the budget.
        """
        plan = self.plan
        if one_round <= 0 or plan.budget is None:
            return plan.rounds
        # After this many rounds, placing is only the fraction _PLACING of the time.
        balanced = ceil(placed * (1 - _PLACING) / _PLACING / one_round)
        share = (plan.budget - spent + placed) / max(1, plan.placements - placement)
        affordable = int((share - placed) / one_round)
        return min(max(2 * plan.rounds, balanced), affordable)

    def _block(self, placement: int, number: int, position: int, arm: Arm) -> TimedBlock:
        inner = self.inner[arm.name]
        with _no_garbage_collection():
            with self._spending("lead_in"):
                self._lead_in(arm)
                if arm.before_block:
                    arm.before_block(inner)
            REPORTER.calls(arm.name)
            before = self.counters.read()
            start = self.clock.now()
            with self._spending("blocks"):
                seconds = self.clock.time(arm.call, inner // arm.calls, arm.before)
            wall = self.clock.now() - start
            after = self.counters.read()
            if arm.after_block:
                arm.after_block()
        if (self._busy or arm.slow_s is not None) and arm.calls == 1:
            self._estimate_again(arm.name, max(seconds / inner, LEAST_TIME))
        # Work between the calls keeps a processor as busy as the calls do, so the whole block's processor time is
        # judged.
        counted, threads = (seconds, 0) if arm.flushes else (wall if arm.before else seconds, self.plan.threads)
        flags = self.counters.flags(before, after, counted, threads)
        if self.plan.threads == 1 and self.clock.thread_seconds is not None:
            flags += (f"{THREAD}={self.clock.thread_seconds:.9g}",)
            if self.clock.quartile_seconds is not None:
                flags += (f"{QUARTILE}={self.clock.quartile_seconds:.9g}",)
        return TimedBlock(self.process, self.case, placement, number, position, arm.name, inner, seconds, flags)

    def _lead_in(self, arm: Arm) -> None:
        """Make untimed calls until two in a row agree, up to a maximum number and for about the time of a block."""
        REPORTER.calls(arm.name)
        # On a busy machine, a second call would probably wait for a core.
        if self.wall[arm.name] > (_SHORT_CALL if self._busy else LONG_CALL):
            if self.wall[arm.name] < ONE_CALL:
                self.clock.time(arm.call, 1, arm.before)
            return
        last, start = inf, self.clock.now()
        least = _SHORT_LEAD_IN if self.wall[arm.name] < _SHORT_CALL else _LEAD_IN
        for number in range(arm.calls, _MOST_LEAD_IN + arm.calls, arm.calls):
            REPORTER.calls(arm.name)
            seconds = self.clock.time(arm.call, 1, arm.before)
            agree = abs(seconds - last) <= _AGREE * min(seconds, last)
            long = self.clock.now() - start > self.plan.block / 4
            if number >= least and (agree or long):
                return
            last = seconds


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
