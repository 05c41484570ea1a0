"""`paired` compares the times of two kernels in the same rounds, with an interval over processes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum, hypot, log, log1p
from typing import Literal

from ffncli.bench.judge import statistics
from ffncli.bench.judge.statistics import Interval
from ffncli.bench.records import CORE_WAIT, DISTURBANCES, LEAST_TIME, OTHER_THREADS, THREAD, TimedBlock, Verdict

BUSY = 0.1  # share of disturbed blocks above which a ratio is judged as on a busy machine
_FEW = 3  # undisturbed blocks that a process must have, and processes that must have them
_STOPPED = 0.1  # of a block's time: neither computing nor waiting for a core, so something stopped the process
_ALIKE = 1.5  # blocks are disturbed equally often if the one lasts at most this many times the other
_UNEXPLAINED = 0.03  # of a block's time: neither computing nor waiting for a core, so the calls wait for something else

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

    def widened(self, by: float) -> "Means":
        """Return the same value with an interval that is wider by this much at both ends."""
        return replace(self, interval=Interval(self.interval.value, self.interval.low - by, self.interval.high + by))


def paired(blocks: Iterable[TimedBlock], kernel: str, baseline: str) -> Means | None:
    """Return the log ratio of `kernel` to `baseline`, paired within rounds; None if no round has both.

    If more than BUSY of the blocks were disturbed, the ratio is one of processor times where these are valid. Elsewhere
    it is that of the undisturbed blocks, which other work cannot have biased if the blocks of both last equally long.
    The interval is then widened by what all rounds show beyond their own noise.
    """
    times: dict[tuple[int, int, int], dict[str, TimedBlock]] = {}
    for block in blocks:
        if block.kernel in (kernel, baseline):
            times.setdefault((block.process, block.placement, block.round), {})[block.kernel] = block
    pairs = [(both[kernel], both[baseline]) for _, both in sorted(times.items()) if len(both) == 2]
    every = averaged(_log_ratios(pairs))
    if every is None or disturbed_share([block for pair in pairs for block in pair]) <= BUSY:
        return every
    if all(_computes_alone([pair[side] for pair in pairs]) for side in (0, 1)):
        alone = averaged(_log_ratios(pairs, "thread"))
        return replace(alone, clock="thread") if alone else None
    # Some kernels suffer more from other work than others, as do threads that wait for each other. The shortest blocks
    # suffered least: without undisturbed blocks, the interval has to hold their ratio, too.
    shift = abs(_of_shortest(pairs) - every.interval.value)
    if not _alike(pairs):
        # The longer blocks are disturbed more often, so the median is biased. The sum of all times is not, but it is
        # noisy: the interval has to hold both.
        return every.widened(max(shift, abs(_of_sums(pairs) - every.interval.value)))
    calm = _undisturbed(pairs)
    if calm is None:
        return every.widened(shift)
    shift = abs(calm.interval.value - every.interval.value) - every.interval.half_width
    return calm.widened(max(0.0, shift))


def _log_ratios(pairs: Iterable[Pair], clock: Literal["wall", "thread"] = "wall") -> Nested:
    nested: Nested = {}
    for pair in pairs:
        seconds = [block.seconds if clock == "wall" else block.figure(THREAD) or 0.0 for block in pair]
        one, base = (max(s / block.inner, LEAST_TIME) for s, block in zip(seconds, pair, strict=True))
        nested.setdefault(pair[0].process, {}).setdefault(pair[0].placement, []).append(log(one) - log(base))
    return nested


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
    """Return the ratio of the undisturbed blocks: a process's value is the median over its rounds in which both blocks
    are undisturbed or, if there are fewer than _FEW, the difference of the medians of both kernels' undisturbed blocks.
    None if fewer than _FEW processes have a value.
    """
    by: dict[int, list[Pair]] = {}
    for pair in pairs:
        by.setdefault(pair[0].process, []).append(pair)
    values, rounds = {}, 0
    for process, mine in by.items():
        sides = [[_log_time(pair[side]) for pair in mine if not is_disturbed(pair[side])] for side in (0, 1)]
        both = [_log_time(one) - _log_time(base) for one, base in mine if not (is_disturbed(one) or is_disturbed(base))]
        if min(map(len, sides)) < _FEW:
            continue
        together = len(both) >= _FEW
        values[process] = (
            statistics.median(both) if together else statistics.median(sides[0]) - statistics.median(sides[1])
        )
        rounds += len(both) if together else min(map(len, sides))
    if len(values) < _FEW:
        return None
    units = list(values.values())
    return Means(statistics.t_interval(units), values, len(values), rounds, statistics.autocorrelation(units))


def _log_time(block: TimedBlock) -> float:
    return log(max(block.per_call, LEAST_TIME))


def _of_shortest(pairs: Sequence[Pair]) -> float:
    """Return the log ratio of the least seconds per call of any block."""
    one, base = (min(map(_log_time, (pair[side] for pair in pairs))) for side in (0, 1))
    return one - base


def _of_sums(pairs: Sequence[Pair]) -> float:
    """Return the log ratio of the mean seconds per call of all blocks."""
    one, base = (
        fsum(pair[side].seconds for pair in pairs) / sum(pair[side].inner for pair in pairs) for side in (0, 1)
    )
    return log(max(one, LEAST_TIME)) - log(max(base, LEAST_TIME))


def is_disturbed(block: TimedBlock) -> bool:
    """Return whether other work took part of this block's time, or something stopped the process, as a hypervisor does
    with a virtual processor."""
    return not DISTURBANCES.isdisjoint(block.flags) or (_unexplained(block) or 0.0) > _STOPPED


def _unexplained(block: TimedBlock) -> float | None:
    """Return the share of a block's time that is neither the thread's processor time nor waiting for a core; None if
    the thread's time is unknown."""
    thread = block.figure(THREAD)
    if thread is None:
        return None
    return (block.seconds - thread - (block.figure(CORE_WAIT) or 0.0)) / max(block.seconds, LEAST_TIME)


def disturbed_share(blocks: Sequence[TimedBlock]) -> float:
    """Return the share of blocks that were preempted, throttled, stolen from or stopped."""
    return sum(map(is_disturbed, blocks)) / len(blocks) if blocks else 0.0


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
