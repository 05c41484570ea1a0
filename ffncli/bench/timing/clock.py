"""A clock that times a block of calls. All measuring code takes a clock as an argument, so that tests can pass their
own."""

import time
from collections.abc import Callable
from itertools import repeat
from typing import Protocol, TypeAlias

Call: TypeAlias = Callable[[], object]

_READ = time.perf_counter_ns  # saved before any user's file is loaded, as the file might replace it


class Clock(Protocol):
    """Times calls on one device."""

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Return the seconds that `inner` calls take to finish; `before` runs before every call, untimed."""

    def now(self) -> float:
        """Return seconds since a fixed moment, for time budgets."""

    def finish(self) -> None:
        """Wait until the device has finished all its work. Raises any error that occurred in that work."""


class CpuClock:
    """The monotonic clock with the highest resolution. A call on a CPU is finished when it returns."""

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Read the clock around all calls or, with `before`, around each call (two readings cost about 0.1 µs)."""
        read = _READ
        if before is None:
            start = read()
            for _ in repeat(None, inner):
                call()
            return (read() - start) * 1e-9
        total = 0
        for _ in repeat(None, inner):
            before()
            start = read()
            call()
            total += read() - start
        return total * 1e-9

    def now(self) -> float:
        """Return the seconds of the monotonic clock."""
        return monotonic_seconds()

    def finish(self) -> None:
        """Do nothing: a call on a CPU is finished when it returns."""


def monotonic_seconds() -> float:
    """Return the seconds of the monotonic clock that times blocks."""
    return _READ() * 1e-9
