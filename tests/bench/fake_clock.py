"""A clock whose time passes by a model, so that tests of timing are exact and take no time."""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from math import exp

from ffncli.bench.machine.counters import Snapshot
from ffncli.bench.timing.clock import Call
from ffncli.bench.timing.rounds import Arm


@dataclass
class Work:
    """A call that takes `seconds` on a fake clock. `slow` first calls after it was made take `times` as long."""

    seconds: float
    slow: int = 0
    times: float = 3.0
    calls: int = 0

    def __call__(self) -> None:
        self.calls += 1


@dataclass
class FakeClock:
    """Time passes when work is timed: `drift(now)` × exp(jitter) × its seconds, at times a spike.

    `asked` counts what was timed, as (work, inner).
    """

    drift: Callable[[float], float] = lambda now: 1.0
    jitter: float = 0.0
    spike_chance: float = 0.0
    spike: float = 1.0  # relative, exponential
    seed: int = 0
    time_now: float = 0.0
    asked: list[tuple[Work, int]] = field(default_factory=list)
    thread_seconds: float | None = None
    quartile_seconds: float | None = None

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        assert isinstance(call, Work)
        self.asked.append((call, inner))
        calls = inner + (call.times - 1) * max(0, min(inner, call.slow - call.calls))
        call.calls += inner
        seconds = calls * call.seconds * self.drift(self.time_now) * exp(self.random.gauss(0, self.jitter))
        if self.random.random() < self.spike_chance:
            seconds *= 1 + self.random.expovariate(1 / self.spike)
        ahead = inner * before.seconds if isinstance(before, Work) else 0.0
        self.time_now += seconds + ahead
        return seconds

    def now(self) -> float:
        return self.time_now


@dataclass
class FakeCounters:
    """Counters that say what a test wants: the flags of block after block, then none."""

    script: Iterable[Sequence[str]] = ()
    reads: int = 0

    def __post_init__(self) -> None:
        self._next = iter(self.script)

    def read(self) -> Snapshot:
        self.reads += 1
        return Snapshot()

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        return tuple(next(self._next, ()))


def placing(clock: FakeClock, seconds: dict[str, float], cost: float = 0.0) -> Callable[[int], list[Arm]]:
    """`place` for arms that take so many seconds; placing itself takes `cost`."""

    def place(placement: int) -> list[Arm]:
        clock.time_now += cost
        return [Arm(name, Work(s)) for name, s in seconds.items()]

    return place
