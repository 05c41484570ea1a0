"""`paired` compares the times of two kernels in the same rounds, with an interval over processes."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import fsum, hypot, inf, log, log1p, sqrt
from operator import attrgetter
from typing import Literal

from ffncli.bench.judge import statistics
from ffncli.bench.judge.statistics import Interval
from ffncli.bench.records import (
    CORE_WAIT,
    DISTURBANCES,
    LEAST_TIME,
    OTHER_THREADS,
    QUARTILE,
    THREAD,
    TimedBlock,
    Verdict,
)

BUSY = 0.1  # share of disturbed blocks above which a ratio is judged as on a busy machine
_FEW = 3  # processes that must have undisturbed blocks of both kernels
_SHORTEST, _ENOUGH, _REACHED = 0.05, 8, 0.1  # of a process's blocks; its least number of blocks; log ratio
_STOPPED = "stopped"  # flag of a block in which something stopped the process
_PAUSE = 0.1  # of a block's time, neither computing nor waiting for a core: so much more than usual is a stop
_ALIKE = 1.5  # blocks are disturbed equally often if the one lasts at most this many times the other
_NEARLY = 1.2  # calls are undisturbed nearly equally often if the one takes at most this many times the other
_UNEXPLAINED = 0.03  # of a block's time: neither computing nor waiting for a core, so the calls wait for something else

_LEVEL = 0.8
_SURE, _FEW_ROUNDS = 0.99, 2  # level of the interval over all rounds, if processes had fewer rounds than this

Pair = tuple[TimedBlock, TimedBlock]  # a kernel's block and the baseline's block of the same round
Nested = dict[int, dict[int, list[float]]]  # process → placement → one value per round


@dataclass(frozen=True)
class Means:
    """Mean logarithms, one for each process, with an interval over processes.

    For a single process the interval is over its placements: it describes the precision within this process only.
    `placements` and `rounds` are counts over all processes. `correlation` is the correlation of neighbouring processes
    (or placements, for a single process); if it exceeds `statistics.CORRELATED`, the interval has been widened.
    `clock` is `thread` if the times are processor times of the timing thread.
    """

    interval: Interval
    of_processes: Mapping[int, float]
    placements: int
    rounds: int
    correlation: float | None = None
    clock: Literal["wall", "thread"] = "wall"

    @property
    def one_process(self) -> bool:
        """Whether the interval is over placements."""
        return len(self.of_processes) == 1

    @property
    def units(self) -> int:
        """The number of values that the interval is computed over."""
        return self.placements if self.one_process else len(self.of_processes)

    @property
    def error(self) -> float:
        """The standard error that the interval expresses."""
        return self.interval.half_width / statistics.t_quantile(0.5 + statistics.CONFIDENCE / 2, self.units - 1)

    def at_level(self, level: float) -> "Means":
        """Return the same value with an interval of this level instead of CONFIDENCE."""
        if not self.interval.bounded:
            return self
        t, usual = (statistics.t_quantile(0.5 + one / 2, self.units - 1) for one in (level, statistics.CONFIDENCE))
        return self.widened(self.interval.half_width * (t / usual - 1))

    def widened(self, by: float) -> "Means":
        """Return the same value with an interval that is wider by this much at both ends."""
        return replace(self, interval=Interval(self.interval.value, self.interval.low - by, self.interval.high + by))


def paired(blocks: Iterable[TimedBlock], kernel: str, baseline: str) -> Means | None:
    """Return the log ratio of `kernel` to `baseline`, paired within rounds; None if no round has both.

    The ratio is that of the lower quartiles of the blocks' calls, where these are known and agree with the blocks'
    means. If more than BUSY of the blocks were disturbed, the ratio is one of processor times where these are valid.
    Elsewhere it is that of the undisturbed blocks, which other work cannot have biased if the blocks of both last
    equally long; of several threads, if most rounds were disturbed, that of the shortest blocks. The interval is then
    widened by what all rounds show beyond their own noise.
    """
    times: dict[tuple[int, int, int], dict[str, TimedBlock]] = {}
    mine = _marked(block for block in blocks if block.kernel in (kernel, baseline))
    for block in mine:
        times.setdefault((block.process, block.placement, block.round), {})[block.kernel] = block
    pairs = [(both[kernel], both[baseline]) for _, both in sorted(times.items()) if len(both) == 2]
    every = averaged(_log_ratios(pairs))
    in_pairs = [block for pair in pairs for block in pair]
    if every is None:
        return None
    if sum(map(is_disturbed, in_pairs)) <= BUSY * len(in_pairs):
        return _of_quartiles(pairs, every)
    if all(_computes_alone([pair[side] for pair in pairs]) for side in (0, 1)):
        alone = averaged(_log_ratios(pairs, _thread_time))
        return replace(alone, clock="thread") if alone else None
    # Some kernels suffer more from other work than others, as do threads that wait for each other. The shortest blocks
    # suffered least: without undisturbed blocks, the interval has to hold their ratio, too.
    shortest, calm = _of_shortest(pairs), _undisturbed(pairs)
    # Of so few blocks, the shortest and the sums say little more than the mean.
    every = every if every.rounds >= _FEW_ROUNDS * every.units else every.at_level(_SURE)
    if not _alike(pairs):
        return _bounded(every, shortest, _of_sums(mine, kernel))
    # Of several threads, the flags say only what the timing thread suffered.
    calm = (None if in_pairs[0].figure(THREAD) is not None else _least(pairs)) or calm
    if calm is None:
        return every.widened(abs(shortest - every.interval.value))
    shift = abs(calm.interval.value - every.interval.value) - every.interval.half_width
    return calm.widened(max(0.0, shift))


def _bounded(every: Means, shortest: float, sums: Interval) -> Means:
    """Return the ratio of blocks of unlike durations: its interval holds all three estimates, and that of all rounds.

    The longer blocks are disturbed more often, so the median of the ratios is too high; the ratio of the sums of all
    times is not, but it is noisy, and too low if the shorter calls seldom meet a long disturbance.
    """
    value, low, high = every.interval.value, every.interval.low, every.interval.high
    return replace(every, interval=Interval(value, min(low, shortest, sums.low), max(high, shortest, sums.high)))


def _log_ratios(pairs: Iterable[Pair], per_call: Callable[[TimedBlock], float] = attrgetter("per_call")) -> Nested:
    nested: Nested = {}
    for pair in pairs:
        one, base = (max(per_call(block), LEAST_TIME) for block in pair)
        nested.setdefault(pair[0].process, {}).setdefault(pair[0].placement, []).append(log(one) - log(base))
    return nested


def _thread_time(block: TimedBlock) -> float:
    return (block.figure(THREAD) or 0.0) / block.inner


def _quartile(block: TimedBlock) -> float:
    return block.figure(QUARTILE) or 0.0


def _of_quartiles(pairs: Sequence[Pair], every: Means) -> Means:
    """Return the ratio of the lower quartiles of the calls in each block, if it lies in the interval of `every`, the
    ratio of the blocks' means; otherwise `every`, which is also returned if the quartiles are unknown, or if the calls
    of the two kernels do not take nearly equally long.

    On shared hardware, a third of the calls of an undisturbed block take up to 1.4 times as long as the others, since a
    neighbour computes on the same core or uses the same memory. Quartiles scatter half as much as means. But a longer
    call is less often free of it; and a kernel that takes long in some calls has another mean. Just outside the
    interval, either could be the cause or chance, so the interval is wider by the difference.
    """
    calls = [[_quartile(pair[side]) for pair in pairs] for side in (0, 1)]
    typical = [statistics.median(of_one) for of_one in calls]
    if not all(map(all, calls)) or max(typical) > _NEARLY * min(typical):
        return every
    quartiles = averaged(_log_ratios(pairs, _quartile))
    assert quartiles is not None  # since `every` is not
    apart = abs(quartiles.interval.value - every.interval.value)
    if apart <= every.interval.half_width:
        return quartiles
    return every.widened(apart) if apart <= 2 * every.interval.half_width else every


def _computes_alone(blocks: Sequence[TimedBlock]) -> bool:
    """Return whether the timing thread's processor time is the time of these calls: they compute in this thread only,
    and wait for nothing but a core."""
    shares = [share for block in blocks if (share := _unexplained(block)) is not None]
    if len(shares) < len(blocks):
        return False
    others = sum(block.figure(OTHER_THREADS) is not None for block in blocks)
    return others <= BUSY * len(blocks) and statistics.median(shares) <= _UNEXPLAINED


def _alike(pairs: Sequence[Pair]) -> bool:
    """Return whether the undisturbed blocks of both arms last equally long; the shortest stand for them if there are
    none."""
    lengths = []
    for side in (0, 1):
        blocks = [pair[side] for pair in pairs]
        calm = [block.seconds for block in blocks if not is_disturbed(block)]
        lengths.append(statistics.median(calm) if calm else min(block.seconds for block in blocks))
    return max(lengths) <= _ALIKE * min(lengths)


def _undisturbed(pairs: Sequence[Pair]) -> Means | None:
    """Return the ratio of the undisturbed blocks; None unless _FEW processes have such blocks of both kernels.

    If both blocks are undisturbed in most rounds, only these rounds count, since pairs within rounds cancel what
    drifts. Otherwise a process's value is the difference of its mean logarithms, with the weight n·m / (n + m) for n
    and m blocks. A few processes with two or three such blocks may agree by chance, so the standard error is at least
    what the scatter of the blocks within processes implies.
    """
    together = [pair for pair in pairs if not any(map(is_disturbed, pair))]
    if 2 * len(together) > len(pairs) and len({one.process for one, _ in together}) >= _FEW:
        return averaged(_log_ratios(together))
    calm: dict[int, tuple[list[float], list[float]]] = {}
    for pair in pairs:
        sides = calm.setdefault(pair[0].process, ([], []))
        for block, side in zip(pair, sides, strict=True):
            if not is_disturbed(block):
                side.append(_log_time(block))
    calm = {process: sides for process, sides in calm.items() if all(sides)}
    if len(calm) < _FEW:
        return None
    values = {process: statistics.mean(one) - statistics.mean(base) for process, (one, base) in calm.items()}
    counts = [(len(one), len(base)) for one, base in calm.values()]
    units, weights = list(values.values()), [n * m / (n + m) for n, m in counts]
    within = [value - statistics.mean(side) for sides in calm.values() for side in sides for value in side]
    degrees = len(within) - 2 * len(calm)
    least = sqrt(fsum(d * d for d in within) / degrees / fsum(weights)) if degrees else inf
    interval = statistics.weighted_interval(units, weights, least)
    return Means(interval, values, len(values), sum(map(min, counts)), statistics.autocorrelation(units))


def _least(pairs: Sequence[Pair]) -> Means | None:
    """Return the ratio of the shortest blocks: a process's value is the difference of their mean logarithms. None if
    most rounds were undisturbed, if there are too few blocks, or if the interval is wider than _REACHED: then the
    shortest blocks were disturbed, too.

    Threads that wait for each other on a busy machine are disturbed in most blocks, but hardly in the shortest 5 % of a
    process's blocks, whose ratios scattered by a quarter of what the medians scattered by.
    """
    if 2 * sum(not any(map(is_disturbed, pair)) for pair in pairs) > len(pairs):
        return None
    sides: dict[int, tuple[list[float], list[float]]] = {}
    for pair in pairs:
        for block, side in zip(pair, sides.setdefault(pair[0].process, ([], [])), strict=True):
            side.append(_log_time(block))
    if len(sides) < _FEW or len(pairs) < _ENOUGH * len(sides):
        return None
    counts = [max(1, round(_SHORTEST * len(one))) for one, _ in sides.values()]
    values = {
        process: statistics.mean(sorted(one)[:count]) - statistics.mean(sorted(base)[:count])
        for count, (process, (one, base)) in zip(counts, sides.items(), strict=True)
    }
    units = list(values.values())
    least = Means(statistics.t_interval(units), values, len(units), sum(counts), statistics.autocorrelation(units))
    return least if least.interval.half_width <= _REACHED else None


def _log_time(block: TimedBlock) -> float:
    return log(max(block.per_call, LEAST_TIME))


def _of_shortest(pairs: Sequence[Pair]) -> float:
    """Return the log ratio of the least seconds per call of any block."""
    one, base = (min(map(_log_time, (pair[side] for pair in pairs))) for side in (0, 1))
    return one - base


def _of_sums(blocks: Sequence[TimedBlock], kernel: str) -> Interval:
    """Return the log ratio of the mean seconds per call of all blocks of `kernel` to those of the baseline, with an
    interval over processes (over placements, for a single process). Its level is _LEVEL, since it is one of three
    bounds."""
    one_process = len({block.process for block in blocks}) == 1
    units: dict[int, list[TimedBlock]] = {}
    for block in blocks:
        units.setdefault(block.placement if one_process else block.process, []).append(block)

    def log_ratio(chosen: Sequence[Sequence[TimedBlock]]) -> float:
        sides: tuple[list[TimedBlock], list[TimedBlock]] = ([], [])
        for block in chain.from_iterable(chosen):
            sides[block.kernel != kernel].append(block)
        means = [fsum(b.seconds for b in side) / max(1, sum(b.inner for b in side)) for side in sides]
        return log(max(means[0], LEAST_TIME)) - log(max(means[1], LEAST_TIME))

    return statistics.jackknife(list(units.values()), log_ratio, _LEVEL)


def is_disturbed(block: TimedBlock) -> bool:
    """Return whether other work took part of this block's time, or something stopped the process (see `_marked`)."""
    return not DISTURBANCES.isdisjoint(block.flags) or _STOPPED in block.flags


def _marked(blocks: Iterable[TimedBlock]) -> list[TimedBlock]:
    """Return the blocks, with the flag _STOPPED where something stopped the process, as a hypervisor does: much more of
    the time than usual was neither computing nor waiting for a core.

    What is usual depends on the kernel: one that waits for another thread or process does so in every block.
    """
    blocks = list(blocks)
    shares = [_unexplained(block) for block in blocks]
    by_kernel = defaultdict[str, list[float]](list)
    for block, share in zip(blocks, shares, strict=True):
        if share is not None:
            by_kernel[block.kernel].append(share)
    # below 0 if the thread also waited for its core just before or after the block
    most = {kernel: max(0.0, sorted(mine)[len(mine) // 4]) + _PAUSE for kernel, mine in by_kernel.items()}
    return [
        block if share is None or share <= most[block.kernel] else replace(block, flags=(*block.flags, _STOPPED))
        for block, share in zip(blocks, shares, strict=True)
    ]


def _unexplained(block: TimedBlock) -> float | None:
    """Return the share of a block's time that is neither the thread's processor time nor waiting for a core; None if
    the thread's time is unknown."""
    thread = block.figure(THREAD)
    if thread is None:
        return None
    return (block.seconds - thread - (block.figure(CORE_WAIT) or 0.0)) / max(block.seconds, LEAST_TIME)


def disturbed_share(blocks: Sequence[TimedBlock]) -> float:
    """Return the share of blocks that were preempted, throttled, stolen from or stopped."""
    return sum(map(is_disturbed, _marked(blocks))) / len(blocks) if blocks else 0.0


def judged(means: Means, twin: Means | None, blocks: Sequence[TimedBlock], margin: float) -> Means:
    """Return a kernel's ratio as it is reported: widened by what the baseline's twin shows if `blocks`, those of the
    kernel and the baseline, were disturbed, or if the twin differs from the baseline by more than the margin."""
    if twin is None or not (disturbed_share(blocks) > BUSY or differs(twin.interval, margin)):
        return means
    return with_twins(means, [twin])


def with_twins(means: Means, twins: Sequence[Means]) -> Means:
    """Widen an interval by what twins of the baseline, which run identical code, differ from it beyond their noise.

    The variance of that difference is the mean over the twins of value² − error², if positive; it adds to the variance
    of the mean.
    """
    bounded = [twin for twin in twins if twin.interval.bounded]
    if not bounded or not means.interval.bounded:
        return means
    variance = statistics.mean([twin.interval.value**2 - twin.error**2 for twin in bounded])
    if variance <= 0:
        return means
    t = statistics.t_quantile(0.5 + statistics.CONFIDENCE / 2, means.units - 1)
    return means.widened(t * (hypot(means.error, variance**0.5) - means.error))


def log_times(blocks: Iterable[TimedBlock], kernel: str) -> Means | None:
    """Return the logarithm of the seconds per call; None if the kernel has no blocks."""
    nested: Nested = {}
    for block in sorted(blocks, key=lambda b: (b.process, b.placement, b.round)):
        if block.kernel == kernel:
            values = nested.setdefault(block.process, {}).setdefault(block.placement, [])
            values.append(log(max(block.per_call, LEAST_TIME)))
    return averaged(nested)


def averaged(nested: Mapping[int, Mapping[int, Sequence[float]]]) -> Means | None:
    """Combine rounds and placements into a value per process (`statistics.centre`), and these values into an interval.

    Returns None if there are no processes.
    """
    if not nested:
        return None
    processes = {process: statistics.centre(list(inside.values())) for process, inside in nested.items()}
    rounds = [len(rounds) for inside in nested.values() for rounds in inside.values()]
    if len(processes) > 1:
        units = list(processes.values())
        interval = statistics.t_interval(units)
    else:
        ((value, inside),) = zip(processes.values(), nested.values(), strict=True)
        units = [statistics.median(values) for values in inside.values()]
        around = statistics.t_interval(units)
        # `centre` is not the mean of the placements' medians, so their interval is shifted to it.
        interval = around.map(lambda end: end - around.value + value)
    return Means(interval, processes, len(rounds), sum(rounds), statistics.autocorrelation(units))


def verdict(log_ratio: Interval, margin: float) -> Verdict:
    """Return `slower` or `faster` if the whole interval of a log ratio is beyond the margin, `same` if it is within;
    otherwise `inconclusive`.

    The margin is on the log scale, so that exchanging kernel and baseline only swaps `slower` and `faster`: with 2 %,
    faster means below 1 / 1.02.
    """
    edge = log1p(margin)
    if log_ratio.low > edge:
        return "slower"
    if log_ratio.high < -edge:
        return "faster"
    if log_ratio.low >= -edge and log_ratio.high <= edge:
        return "same"
    return "inconclusive"


def differs(log_ratio: Interval | None, margin: float) -> bool:
    """Return whether the whole interval is beyond the margin, in either direction; False if the ratio is unknown."""
    return log_ratio is not None and verdict(log_ratio, margin) in ("slower", "faster")
