"""A clock that times a block of calls. All measuring code takes a clock as an argument, so that tests can pass their
own."""

import time
from collections.abc import Callable
from itertools import repeat
from statistics import quantiles
from typing import Protocol, TypeAlias

Call: TypeAlias = Callable[[], object]

# saved before any user's file is loaded, as the file might replace them
_READ, _THREAD = time.perf_counter_ns, time.thread_time_ns


class Clock(Protocol):
    """Times calls on one device. `thread_seconds` is the processor time of the calling thread in the calls of the last
    `time`, `quartile_seconds` the lower quartile of these calls' times; None if the clock does not read them."""

    thread_seconds: float | None
    quartile_seconds: float | None

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Return the seconds that `inner` calls take to finish; `before` runs before every call, untimed."""

    def now(self) -> float:
        """Return seconds since a fixed moment, for time budgets."""

    def finish(self) -> None:
        """Wait until the device has finished all its work. Raises any error that occurred in that work."""


class CpuClock:
    """The monotonic clock with the highest resolution. A call on a CPU is finished when it returns.

    The thread's own clock is read outside of each reading of the monotonic clock, so its seconds contain that reading.
    It is read only where calls compute on one thread: elsewhere it says little, and reading it may cost the thread its
    core (see `SystemCounters`).
    """

    thread_seconds: float | None = None
    quartile_seconds: float | None = None

    def __init__(self, threads: int = 1) -> None:
        self._alone = threads == 1

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Read the clock around all calls or, with `before`, around each call (two readings cost about 0.1 µs)."""
        read, read_thread = _READ, _THREAD if self._alone else int
        calls: list[int] = []
        total_thread = 0
        if before is None:
            start_thread, start = read_thread(), read()
            for _ in repeat(None, inner):
                call()
            calls, total_thread = [read() - start], read_thread() - start_thread
        for _ in repeat(None, inner if before else 0):
            before()  # type: ignore[misc]
            start_thread, start = read_thread(), read()
            call()
            calls.append(read() - start)
            total_thread += read_thread() - start_thread
        self.thread_seconds = total_thread * 1e-9 if self._alone else None
        self.quartile_seconds = quantiles(calls, n=4)[0] * 1e-9 if before and inner > 2 else None
        return sum(calls) * 1e-9

    def now(self) -> float:
        """Return the seconds of the monotonic clock."""
        return monotonic_seconds()

    def finish(self) -> None:
        """Do nothing: a call on a CPU is finished when it returns."""


def monotonic_seconds() -> float:
    """Return the seconds of the monotonic clock that times blocks."""
    return _READ() * 1e-9
