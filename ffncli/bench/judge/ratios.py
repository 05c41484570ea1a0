"""`paired` compares the times of two kernels in the same rounds, with an interval over processes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p

from ffncli.bench.judge import statistics
from ffncli.bench.judge.statistics import Interval
from ffncli.bench.records import LEAST_TIME, TimedBlock, Verdict

Nested = dict[int, dict[int, list[float]]]  # process → placement → one value per round


@dataclass(frozen=True)
class Means:
    """Mean logarithms, one for each process, with an interval over processes.

    For a single process the interval is over its placements: it describes the precision within this process only.
    `placements` and `rounds` are counts over all processes. `correlation` is the correlation of neighbouring processes
    (or placements, for a single process); if it exceeds `statistics.CORRELATED`, the interval has been widened.
    """

    interval: Interval
    of_processes: Mapping[int, float]
    placements: int
    rounds: int
    correlation: float | None = None

    @property
    def one_process(self) -> bool:
        """Whether the interval is over placements."""
        return len(self.of_processes) == 1

    @property
    def units(self) -> int:
        """The number of values that the interval is computed over."""
        return self.placements if self.one_process else len(self.of_processes)


def paired(blocks: Iterable[TimedBlock], kernel: str, baseline: str) -> Means | None:
    """Return the log ratio of `kernel` to `baseline`, paired within rounds; None if no round has both."""
    times: dict[tuple[int, int, int], dict[str, float]] = {}
    for block in blocks:
        if block.kernel in (kernel, baseline):
            key = (block.process, block.placement, block.round)
            times.setdefault(key, {})[block.kernel] = max(block.per_call, LEAST_TIME)
    nested: Nested = {}
    for (process, placement, _), both in sorted(times.items()):
        if len(both) == 2:
            d = log(both[kernel]) - log(both[baseline])
            nested.setdefault(process, {}).setdefault(placement, []).append(d)
    return averaged(nested)


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
