"""A GPU's clocks between blocks, with the host's counters."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from ffncli.bench.machine.counters import Counters, Snapshot, SystemCounters
from ffncli.bench.machine.nvml import GpuProbe, Sample, clock_flags
from ffncli.bench.timing.cuda_clock import CudaClock


@dataclass(frozen=True)
class GpuSnapshot(Snapshot):
    """The host's counts and a reading of the GPU."""

    gpu: Sample = field(default_factory=Sample)


class GpuCounters:
    """Counters for blocks that `clock` times.

    The host's flags matter only if the GPU waited for it: a block whose queue was never empty is not spoiled by a
    preempted host, so they count only in `launch-bound` blocks.
    """

    def __init__(self, clock: CudaClock, probe: GpuProbe | None = None, host: Counters | None = None) -> None:
        self._clock, self._probe = clock, probe
        self._host: Counters = host or SystemCounters()

    def read(self) -> GpuSnapshot:
        """The counts now."""
        host = self._host.read()
        counts = {count.name: getattr(host, count.name) for count in fields(Snapshot)}
        return GpuSnapshot(**counts, gpu=self._probe.read() if self._probe else Sample())

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        """`launch-bound` with the host's flags, or neither; then the GPU's (`nvml.clock_flags`)."""
        bound = ("launch-bound", *self._host.flags(before, after, seconds, 0)) if self._clock.launch_bound else ()
        if isinstance(before, GpuSnapshot) and isinstance(after, GpuSnapshot):
            return (*bound, *clock_flags(before.gpu, after.gpu))
        return bound
