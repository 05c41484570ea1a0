"""Clock: times a block of calls. It is an argument of everything that measures, so that tests can use their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import repeat
from typing import Protocol, TypeAlias

Call: TypeAlias = Callable[[], object]

_READ = time.perf_counter_ns  # as it is now, before a user's file is loaded


class Clock(Protocol):
    """Times calls on one device."""

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Seconds of `inner` calls, the device finished; `before` runs ahead of every call and is not counted."""

    def now(self) -> float:
        """Seconds since some moment, for budgets."""

    def finish(self) -> None:
        """Wait until the device has finished all its work. Raises what that work has left broken."""


class CpuClock:
    """The monotonic clock of highest resolution. A call on a CPU is finished when it returns."""

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """One reading around all calls; with `before`, one around each (two readings cost some 0.1 µs)."""
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
        """Seconds of the monotonic clock."""
        return monotonic_seconds()

    def finish(self) -> None:
        """All is finished."""


def monotonic_seconds() -> float:
    """Seconds of the monotonic clock, as blocks are timed by it."""
    return _READ() * 1e-9
