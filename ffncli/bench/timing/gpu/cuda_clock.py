"""CudaClock: the GPU's time for a block of calls, measured by events; the queue is filled before the GPU may start.

A GPU works through a queue that the host fills. Timed from an empty queue, a 10 µs call that takes the host 30 µs to
launch seems to take 30 µs: this measures the host, not the kernel. So the GPU first runs a kernel that only waits, just
long enough for the host to get ahead, and the block is timed by two events after it. If the host still falls behind,
the block is flagged `launch-bound`. This happens if a call waits for the GPU (such as an MoE block that reads its
routing), or if the host loses its core for a moment.

The block is launched in segments of about 125 µs of GPU time, with a marker between them. When the host has launched a
whole segment, the GPU must not have reached the segment's first marker yet. This detects a queue that ran empty
anywhere in the block. A marker costs the GPU one event, 1 to 2 µs, and the host a recording and a query: about 1 % of a
block, equal for all arms.
"""

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import cache
from itertools import repeat
from math import ceil
from statistics import median
from typing import Any, TypeAlias

import torch

from ffncli.bench.machine.counters import Counters, Snapshot, SystemCounters
from ffncli.bench.machine.devices import GpuProbe, Sample, clock_flags
from ffncli.bench.records import HOST_SECONDS, OTHER_STREAM
from ffncli.bench.timing.clock import Call, Clock, CpuClock

Cuda: TypeAlias = Any  # torch.cuda or a stand-in with Event, _sleep and synchronize
LONGEST = 0.02  # s; a longer wait costs more than it gains
_UNKNOWN = 200e-6  # s; the assumed time of the host to launch a new call
_AHEAD = 1.5  # factor on the host's estimated time
_AT_LEAST = 20e-6  # s
_WAKING = 2_000_000  # cycles, about 1 ms: an idle GPU is slow at first
_SEGMENT = 125e-6  # s of GPU time between two markers
_FIRST_SEGMENT = 16  # calls per segment, in a block whose pace is unknown
_RESOLUTION = 0.5e-6  # s; resolution of events
# A wait this long gives the SM clock to within 2 %. The first call of an arm's lead-in, whose pace is unknown, waits
# longer, so the clock is known for every block at no extra cost.
_READS_CLOCK = 200e-6  # s
_ELSEWHERE, _ELSEWHERE_SHARE = 20e-6, 0.02  # s, and fraction of the block: how much later other streams may finish
_SM_CYCLES = torch.version.hip is None  # the waiting kernel counts cycles of the SM clock, except on some AMD GPUs


@dataclass
class _Pace:
    """The pace of the call timed last: the host's seconds to launch a call, and the GPU's seconds to run it.

    `waits` is true if the call itself waits for the GPU: then no lead helps; None until that is known. `late` is the
    host's time for the first segment if it was as long as the GPU's wait, otherwise 0. Either the call waits, or the
    host stalled; waiting twice as long next time shows which is true.
    """

    host: float | None = None
    gpu: float | None = None
    waits: bool | None = None
    late: float = 0.0

    def segment(self, inner: int) -> int:
        """Return the number of calls between two markers in a block of `inner` calls."""
        if self.gpu is None:
            return min(inner, _FIRST_SEGMENT)
        return min(inner, max(1, round(_SEGMENT / self.gpu))) if self.gpu > 0 else inner

    def waiting(self, inner: int, segment: int) -> float:
        """Return the seconds that the GPU must wait: the time of one segment's launches, plus the host's delay in the
        other segments."""
        if self.waits:
            return 0.0
        host = _UNKNOWN if self.host is None else self.host
        lost = max(0.0, host - (self.gpu or 0.0))
        need = _AT_LEAST + _AHEAD * (segment * host + (inner - segment) * lost)
        return min(LONGEST, max(need, 2 * self.late))

    def learn(self, block: "_Block", inner: int) -> None:
        """Learn the pace from a block. The host's minimum time counts: when the queue is full, the host waits for the
        GPU and only seems slow."""
        if block.waited > 0:
            if block.first < block.waited:
                self.waits, self.late = False, 0.0
            elif block.behind and self.waits is None:
                self.waits, self.late = (True if self.late else None), block.first
        host = block.host / inner
        self.host = host if self.host is None else min(self.host, host)
        if not block.behind:
            self.gpu = max(0.0, block.gpu) / inner


@dataclass
class _Block:
    """The times of a block, in seconds: the GPU's requested wait, the host's time until the first segment was launched,
    the host's time for all launches, and the GPU's time. `behind`: the queue was empty at some point. `reads_clock`:
    the SM clock can be computed from the wait, which was long enough and was launched in time."""

    waited: float
    first: float = 0.0
    host: float = 0.0
    gpu: float = 0.0
    behind: bool = False
    reads_clock: bool = False


class CudaClock:
    """Times calls on the current GPU. Everything runs in the current stream; the host waits only at the ends of blocks.

    Its attributes describe the block timed last. `launch_bound` is true if the GPU's queue was empty at some point, so
    the time includes launches. `other_stream` is true if the GPU still had other, untimed work when the current stream
    had finished. `host_s` is the time that the host took to launch the block's calls. `sm_hz` is the SM clock before
    the block or at its lead-in, or None if unknown. Arguments: `cuda` is torch.cuda or a stand-in, `wall` the host's
    clock in seconds.
    """

    thread_seconds: float | None = None
    quartile_seconds: float | None = None

    def __init__(self, cuda: Cuda = torch.cuda, wall: Callable[[], float] = time.perf_counter) -> None:
        self.launch_bound = self.other_stream = False
        self.host_s: float | None = None
        self.sm_hz: float | None = None
        self._cuda, self._wall = cuda, wall
        self._pace = _Pace()
        self._timed: Callable[[], object] = _nothing
        self._events: list[Any] = []
        self.cycles_per_s = 1.0
        for _ in range(5):
            self._wait_on_gpu(_WAKING)
        self._empty = median(self._wait_on_gpu(0) for _ in range(5))

    def now(self) -> float:
        """Return the seconds of the host's clock."""
        return self._wall()

    def finish(self) -> None:
        """Wait for the GPU; raises RuntimeError if a kernel has made it unusable for this process."""
        self._cuda.synchronize()

    def time(self, call: Call, inner: int, before: Call | None = None) -> float:
        """Return the GPU's seconds for `inner` calls; with `before`, the sum over calls that are timed separately.

        An event costs the GPU a few microseconds; with `before`, every call's time includes them.
        """
        if self._timed() is not call:  # the lead-in calls teach the pace before a block is timed
            self._pace, self._timed, self.sm_hz = _Pace(), _reference(call), None
        self._cuda.synchronize()
        if before is None:
            return self._together(call, inner)
        return self._each(call, inner, before)

    def _together(self, call: Call, inner: int) -> float:
        asleep, start, marker, end = self._taken(4)
        segment = self._pace.segment(inner)
        filling = self._wall()
        block, cycles = self._fill(asleep, inner, segment)
        start.record()
        began, reached = self._wall(), start
        for launched in range(0, inner, segment):
            if launched:
                block.behind = reached.query() or block.behind
                marker.record()
                reached = marker
            for _ in repeat(None, min(segment, inner - launched)):
                call()
            if not launched:
                block.first = self._wall() - filling
        self.host_s = block.host = self._wall() - began
        end.record()
        block.behind = reached.query() or block.behind
        more = self._finished(end)
        seconds = _seconds(start, end)
        block.gpu = seconds - self._empty - _RESOLUTION  # so that a single call does not seem longer than one of many
        self._learn(block, inner, cycles, _seconds(asleep, start))
        self.other_stream = more > max(_ELSEWHERE, _ELSEWHERE_SHARE * seconds)
        return seconds

    def _each(self, call: Call, inner: int, before: Call) -> float:
        asleep, awake, *events = self._taken(2 + 2 * inner)
        starts, ends = events[0::2], events[1::2]
        filling = self._wall()
        block, cycles = self._fill(asleep, inner, 1)
        awake.record()
        began, in_calls = self._wall(), 0.0
        for start, end in zip(starts, ends, strict=True):
            before()
            start.record()
            called = self._wall()
            call()
            in_calls += self._wall() - called
            end.record()
            block.behind = start.query() or block.behind
            block.first = block.first or self._wall() - filling
        block.host, self.host_s = self._wall() - began, in_calls
        more = self._finished(ends[-1])
        block.gpu = _seconds(awake, ends[-1]) - self._empty - _RESOLUTION
        self._learn(block, inner, cycles, _seconds(asleep, awake))
        seconds = sum(_seconds(start, end) for start, end in zip(starts, ends, strict=True))
        self.other_stream = more > max(_ELSEWHERE, _ELSEWHERE_SHARE * seconds)
        return seconds

    def leaves_work(self, call: Call, calls: int) -> bool:
        """Return True if the GPU is still working on other streams when the current stream has finished these calls.

        Here, all streams start with an empty queue. In a timed block, the other streams have a lead, as only the
        current one waits.
        """
        (end,) = self._taken(1)
        self._cuda.synchronize()
        began = self._wall()
        for _ in range(calls):
            call()
        end.record()
        more = self._finished(end)
        return more > max(_ELSEWHERE, _ELSEWHERE_SHARE * (self._wall() - began))

    def _taken(self, count: int) -> list[Any]:
        """Return events to use. They are created once, since creating one takes the host as long as a launch."""
        while len(self._events) < count:
            self._events.append(self._cuda.Event(enable_timing=True))
        return self._events[:count]

    def _fill(self, asleep: Any, inner: int, segment: int) -> tuple[_Block, int]:
        """Put the wait at the head of the queue; return the block, and the cycles of its wait."""
        block = _Block(self._pace.waiting(inner, segment))
        cycles = ceil(block.waited * self.cycles_per_s)
        block.reads_clock = _SM_CYCLES and block.waited >= _READS_CLOCK
        if block.reads_clock:  # so that the start event is not recorded before the wait is launched
            self._cuda._sleep(ceil(_AT_LEAST * self.cycles_per_s))
        asleep.record()
        if cycles:
            self._cuda._sleep(cycles)
        block.reads_clock = block.reads_clock and not asleep.query()
        return block, cycles

    def _finished(self, end: Any) -> float:
        """Wait for the GPU; return the seconds for which it still worked after the current stream had finished.

        A second wait, with nothing left for the GPU to do, measures what a wait costs the host at that moment: on one
        virtual machine, 5 µs in one process and 40 µs in the next.
        """
        end.synchronize()
        return self._synchronized() - self._synchronized()

    def _synchronized(self) -> float:
        began = self._wall()
        self._cuda.synchronize()
        return self._wall() - began

    def _learn(self, block: _Block, inner: int, cycles: int, waited: float) -> None:
        self.launch_bound = block.behind
        self._pace.learn(block, inner)
        if cycles > 0 and waited > 0:  # the highest clock so far; at a lower clock, the wait is only longer than needed
            self.cycles_per_s = max(self.cycles_per_s, cycles / waited)
            if block.reads_clock:
                self.sm_hz = cycles / waited

    def _wait_on_gpu(self, cycles: int) -> float:
        """Return the GPU's seconds between two events that have a wait of `cycles` between them (0: nothing)."""
        start, end = self._taken(2)
        self._cuda.synchronize()
        self._cuda._sleep(_WAKING // 10)  # so that the start event is not recorded before the wait is launched
        start.record()
        if cycles:
            self._cuda._sleep(cycles)
        end.record()
        self._cuda.synchronize()
        seconds = _seconds(start, end)
        self.cycles_per_s = max(self.cycles_per_s, cycles / max(seconds, 1e-9))
        return seconds


def _nothing() -> object:
    return None


def _reference(call: Call) -> Callable[[], object]:
    """Return a weak reference to the call: a strong reference would keep the buffers of a finished placement."""
    try:
        return weakref.ref(call)
    except TypeError:  # some objects cannot be weakly referenced; they always count as new
        return _nothing


def _seconds(start: Any, end: Any) -> float:
    """Return the seconds between two past events, which torch measures in milliseconds."""
    return float(start.elapsed_time(end)) * 1e-3


def clock_for(device: str, threads: int = 1) -> Clock:
    """Return the clock of `cpu`, `cuda` or `cuda:1`, for calls that compute on this number of threads. A GPU becomes
    this process's current GPU, whose queue is timed."""
    if not device.startswith("cuda"):
        return CpuClock(threads)
    torch.cuda.set_device(torch.device(device if ":" in device else "cuda:0"))
    return _cuda_clock(device)


@cache
def _cuda_clock(device: str) -> CudaClock:
    """Return the device's clock, created once, as its measurement of the GPU's cycles is valid for all cases."""
    return CudaClock()


# --- a GPU's clocks between blocks, with the host's counters ----------------------------------------------------------


@dataclass(frozen=True)
class GpuSnapshot(Snapshot):
    """The host's counters, and the GPU's clocks, power and temperature, at one moment."""

    gpu: Sample = field(default_factory=Sample)


class GpuCounters:
    """Counters for blocks timed by `clock`.

    The host's flags matter only if the GPU waited for the host, so they are kept only in `launch-bound` blocks.
    `preempted` is always kept, because only the clock's own markers show that the queue was never empty.
    """

    def __init__(self, clock: CudaClock, probe: GpuProbe | None = None, host: Counters | None = None) -> None:
        self._clock, self._probe = clock, probe
        self._host: Counters = host or SystemCounters(launching=True)

    def read(self) -> GpuSnapshot:
        """Return the current counts."""
        host = self._host.read()
        counts = {count.name: getattr(host, count.name) for count in fields(Snapshot)}
        return GpuSnapshot(**counts, gpu=self._probe.read() if self._probe else Sample())

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        """Return a block's flags: the host's, as the class says; `launch-bound` if the GPU waited, `other-stream` if it
        had untimed work left; `host=0.00025`, the seconds spent launching; then the GPU's own (`clock_flags`)."""
        clock, host = self._clock, self._host.flags(before, after, seconds, 0)
        flags = ["launch-bound", *host] if clock.launch_bound else [flag for flag in host if flag == "preempted"]
        if clock.other_stream:
            flags.append(OTHER_STREAM)
        if clock.host_s is not None:
            flags.append(f"{HOST_SECONDS}={clock.host_s:.3g}")
        if isinstance(before, GpuSnapshot) and isinstance(after, GpuSnapshot):
            flags += clock_flags(before.gpu, after.gpu, clock.sm_hz)
        return tuple(flags)


def counters_for(clock: Clock, threads: int, probe: GpuProbe | None = None) -> Counters:
    """Return the counters for blocks timed by `clock`, whose calls compute on this number of threads."""
    return GpuCounters(clock, probe) if isinstance(clock, CudaClock) else SystemCounters(threads=threads)
