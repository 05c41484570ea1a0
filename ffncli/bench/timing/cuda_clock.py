"""CudaClock: the GPU's time for a block of calls, by events, with the queue filled before the GPU may start.

A GPU works through a queue that the host fills. Timed from an empty queue, a call of 10 µs that takes the host 30 µs to
launch reads 30 µs: the host is measured, not the kernel. So the GPU is first kept busy by a kernel that only waits,
just long enough for the host to get ahead, and the block is timed by two events after it. If the host still falls
behind (a call that waits for the GPU, such as a mixture that reads its routing), the block is flagged `launch-bound`.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Any, TypeAlias

import torch

from ffncli.bench.timing.clock import Call, Clock, CpuClock

Cuda: TypeAlias = Any  # torch.cuda, or a stand-in: Event, _sleep, synchronize

LONGEST = 0.02  # s; waiting longer costs more than it gains
_UNKNOWN = 200e-6  # s; assumed for the host's launch of a new call
_AHEAD = 1.5  # times the host's estimated need
_AT_LEAST = 20e-6  # s
_WAKING = 2_000_000  # cycles, about 1 ms: a GPU at rest runs slowly at first
_GIVEN_UP = 2  # after this many misses in a row the call itself must be waiting for the GPU


@dataclass
class _Pace:
    """The pace of the call timed last, in seconds per call: for the host to launch it, for the GPU to run it."""

    host: float | None = None
    gpu: float | None = None
    missed: int = 0

    def waiting(self, inner: int) -> float:
        """Seconds for which the GPU should wait: one launch, and the host's delay against the GPU over the block."""
        if self.missed >= _GIVEN_UP:
            return 0.0
        host = _UNKNOWN if self.host is None else self.host
        lost = max(0.0, host - (self.gpu or 0.0))
        return min(LONGEST, _AT_LEAST + _AHEAD * (host + (inner - 1) * lost))

    def learn(self, host: float, gpu: float, behind: bool) -> None:
        """Keep the host's least time: if the queue is full, the host waits for the GPU and only seems slow."""
        self.missed = self.missed + 1 if behind and self.host is not None else 0
        self.host = host if self.host is None else min(self.host, host)
        if not behind:
            self.gpu = gpu


class CudaClock:
    """Times calls on the current GPU. Everything runs in the current stream; the host waits at the ends of blocks only.

    `launch_bound` concerns the block timed last: the GPU's queue was empty at some point, so the time includes launches
    too. `cuda` is torch.cuda or a stand-in, `wall` the host's clock in seconds.
    """

    def __init__(self, cuda: Cuda = torch.cuda, wall: Callable[[], float] = time.perf_counter) -> None:
        self.launch_bound = False
        self._cuda, self._wall = cuda, wall
        self._pace = _Pace()
        self._timed: Callable[[], object] = _nothing
        self._events: list[Any] = []
        self.cycles_per_s = 1.0
        for _ in range(5):
            self._wait_on_gpu(_WAKING)

    def now(self) -> float:
        """Seconds of the host's clock."""
        return self._wall()

    def finish(self) -> None:
        """Wait for the GPU; raises RuntimeError if a kernel has spoilt it for this process."""
        self._cuda.synchronize()

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Seconds of the GPU for `inner` calls; with `before`, the sum over calls timed separately.

        An event costs the GPU a few microseconds; with `before` every call's time includes them.
        """
        if self._timed() is not call:  # lead-in calls come first, so that a block's pace is known when it counts
            self._pace, self._timed = _Pace(), _reference(call)
        self._cuda.synchronize()
        if before is None:
            return self._together(call, inner)
        return self._each(call, inner, before)

    def _together(self, call: Call, inner: int) -> float:
        asleep, start, last, end = self._taken(4)
        cycles = self._fill(asleep, inner)
        start.record()
        began = self._wall()
        behind = False
        for done in range(inner):
            if done == inner - 1:
                last.record()
            call()
            if done == 0:
                behind = start.query()
        end.record()
        # The host's lead changes evenly from the first call to the last: ahead at both ends means ahead throughout.
        behind = last.query() or behind
        host = self._wall() - began
        self._cuda.synchronize()
        seconds = _seconds(start, end)
        self._learn(cycles, _seconds(asleep, start), host / inner, seconds / inner, behind)
        return seconds

    def _each(self, call: Call, inner: int, before: Call) -> float:
        asleep, awake, *events = self._taken(2 + 2 * inner)
        starts, ends = events[0::2], events[1::2]
        cycles = self._fill(asleep, inner)
        awake.record()
        began = self._wall()
        behind = False
        for start, end in zip(starts, ends, strict=True):
            before()
            start.record()
            call()
            end.record()
            behind = start.query() or behind
        host = self._wall() - began
        self._cuda.synchronize()
        self._learn(cycles, _seconds(asleep, awake), host / inner, _seconds(awake, ends[-1]) / inner, behind)
        return sum(_seconds(start, end) for start, end in zip(starts, ends, strict=True))

    def _taken(self, count: int) -> list[Any]:
        """Events to use; made once, since making one takes the host as long as a launch."""
        while len(self._events) < count:
            self._events.append(self._cuda.Event(enable_timing=True))
        return self._events[:count]

    def _fill(self, asleep: Any, inner: int) -> int:
        """Put the wait at the head of the queue; returns its cycles."""
        cycles = ceil(self._pace.waiting(inner) * self.cycles_per_s)
        asleep.record()
        if cycles:
            self._cuda._sleep(cycles)
        return cycles

    def _learn(self, cycles: int, waited: float, host: float, gpu: float, behind: bool) -> None:
        self.launch_bound = behind
        self._pace.learn(host, gpu, behind)
        if cycles > 0 and waited > 0:  # the highest clock so far: when it drops, the wait is only longer than needed
            self.cycles_per_s = max(self.cycles_per_s, cycles / waited)

    def _wait_on_gpu(self, cycles: int) -> None:
        start, end = self._taken(2)
        self._cuda.synchronize()
        self._cuda._sleep(cycles // 10)  # so that the start is not recorded before the launch
        start.record()
        self._cuda._sleep(cycles)
        end.record()
        self._cuda.synchronize()
        self.cycles_per_s = max(self.cycles_per_s, cycles / max(_seconds(start, end), 1e-9))


def _nothing() -> object:
    return None


def _reference(call: Call) -> Callable[[], object]:
    """A weak reference to the call: a strong one would keep the buffers of a finished placement."""
    try:
        return weakref.ref(call)
    except TypeError:  # some objects have no weak references; they count as new every time
        return _nothing


def _seconds(start: Any, end: Any) -> float:
    """Seconds between two past events; torch returns milliseconds."""
    return float(start.elapsed_time(end)) * 1e-3


def clock_for(device: str) -> Clock:
    """The clock of `cpu`, `cuda` or `cuda:1`; the GPU becomes this process's current one, whose queue is timed."""
    if not device.startswith("cuda"):
        return CpuClock()
    torch.cuda.set_device(torch.device(device if ":" in device else "cuda:0"))
    return _cuda_clock(device)


@cache
def _cuda_clock(device: str) -> CudaClock:
    """One for each device: its measurement of the GPU's cycles is valid for all cases."""
    return CudaClock()
