"""A GPU's clocks between blocks, with the host's counters."""

from __future__ import annotations

from dataclasses import field, fields

from ffncli.bench.machine.counters import Counters, Snapshot, SystemCounters
from ffncli.bench.machine.devices import GpuProbe, Sample, clock_flags
from ffncli.bench.records import HOST_SECONDS, OTHER_STREAM
from ffncli.bench.timing.cuda_clock import CudaClock
from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class GpuSnapshot(Snapshot):
    """The host's counts and a reading of the GPU."""

    gpu: Sample = field(default_factory=Sample)


class GpuCounters:
    """Counters for blocks that `clock` times.

    The host's flags matter only if the GPU waited for it, so they count only in `launch-bound` blocks; `preempted`
    always does: nothing but the clock's own markers says that the queue was never empty.
    """

    def __init__(self, clock: CudaClock, probe: GpuProbe | None = None, host: Counters | None = None) -> None:
        self._clock, self._probe = clock, probe
        self._host: Counters = host or SystemCounters(launching=True)

    def read(self) -> GpuSnapshot:
        """The counts now."""
        host = self._host.read()
        counts = {count.name: getattr(host, count.name) for count in fields(Snapshot)}
        return GpuSnapshot(**counts, gpu=self._probe.read() if self._probe else Sample())

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        """`launch-bound` with the host's flags, or `preempted` alone; `other-stream` if the GPU had work left that was
        not timed; `host=0.00025`, the seconds of launching; then the GPU's flags (`nvml.clock_flags`)."""
        clock, host = self._clock, self._host.flags(before, after, seconds, 0)
        flags = ["launch-bound", *host] if clock.launch_bound else [flag for flag in host if flag == "preempted"]
        if clock.other_stream:
            flags.append(OTHER_STREAM)
        if clock.host_s is not None:
            flags.append(f"{HOST_SECONDS}={clock.host_s:.3g}")
        if isinstance(before, GpuSnapshot) and isinstance(after, GpuSnapshot):
            flags += clock_flags(before.gpu, after.gpu, clock.sm_hz)
        return tuple(flags)
