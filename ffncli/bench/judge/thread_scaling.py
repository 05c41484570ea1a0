"""How much faster a kernel is on more threads: cases that are otherwise equal, by the times of their processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import log

from ffncli.bench.judge.statistics import exp_or_inf
from ffncli.bench.judge.welch import mean_ratio, welch
from ffncli.bench.records import Case
from ffncli.bench.results.row import ResultRow
from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class ThreadScaling:
    """One kernel of one case on `threads` threads, compared with the fewest measured, `base_threads`.

    `speed_up` is the time there over the time here, with its 95 % interval if each has two processes or more;
    `efficiency` is the speed-up over the quotient of the threads: 1 if twice the threads take half the time.
    """

    case: str
    kernel: str
    base_threads: int
    threads: int
    speed_up: float
    speed_up_low: float | None
    speed_up_high: float | None
    efficiency: float


def thread_scaling(cases: Sequence[Case], rows: Sequence[ResultRow]) -> tuple[ThreadScaling, ...]:
    """A record for every row that has one on fewer threads of the same machine; none for a GPU, where threads only
    launch."""
    hosts = {row.case: row.host for row in rows}
    times = {(row.case, row.kernel): [*map(log, row.process_times_s)] for row in rows if row.status == "ok"}
    scalings = []
    for fewest, case in _pairs(cases, hosts):
        for kernel in dict.fromkeys(row.kernel for row in rows):
            before, after = times.get((fewest.key, kernel), []), times.get((case.key, kernel), [])
            speed_up = mean_ratio(after, before)
            if speed_up is None:
                continue
            shift = welch(after, before)
            interval = shift.log_ratio.map(exp_or_inf) if shift else None
            scalings.append(
                ThreadScaling(
                    case.key, kernel, fewest.threads, case.threads, speed_up,
                    interval.low if interval else None, interval.high if interval else None,
                    speed_up * fewest.threads / case.threads,
                )
            )  # fmt: skip
    return tuple(scalings)


def _pairs(cases: Sequence[Case], hosts: Mapping[str, str]) -> list[tuple[Case, Case]]:
    """(the case on the fewest threads, the same case on more); `hosts` has the machine of each case."""
    alike: dict[tuple[Case, str | None], list[Case]] = {}
    for case in cases:
        if case.device == "cpu":
            alike.setdefault((replace(case, threads=1), hosts.get(case.key)), []).append(case)
    groups = [sorted(group, key=lambda case: case.threads) for group in alike.values()]
    return [(group[0], case) for group in groups for case in group[1:]]
