"""The cost of a call, measured alike in the process that runs users' kernels and in the referee's process, so that the
two can be compared."""

import time
from collections.abc import Callable

INPUTS_OF_CALLS = (1, 2)  # numbers of inputs: a mixture's tokens go to the same experts in both processes
_SECONDS, _LEAST_CALLS, _MOST_SECONDS = 0.01, 8, 0.5


def call_cost(call: Callable[[], object], turn: Callable[[int], object], threads: int) -> tuple[int, float]:
    """Return (the least nanoseconds of a call, the mean page faults of a call), over some 10 ms of calls.

    The nanoseconds are this thread's processor time or, with several `threads`, those of the clock. `turn(n)` prepares
    call n, untimed.
    """
    import resource  # not on Windows, which has no referee's process

    read = time.thread_time_ns if threads == 1 else time.perf_counter_ns
    times, faults, began, spent = list[int](), 0, time.monotonic(), 0.0
    while spent < (_SECONDS if len(times) >= _LEAST_CALLS or not times else _MOST_SECONDS):
        turn(len(times))
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, read()
        call()
        times.append(read() - start)
        faults += resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
        spent = time.monotonic() - began
    return min(times), faults / len(times)
