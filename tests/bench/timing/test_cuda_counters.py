"""A block's flags on a GPU: the host's count only where the GPU waited for it."""

import os
from dataclasses import replace
from pathlib import Path

from ffncli.bench.machine import counters as host_counters
from ffncli.bench.machine.counters import Snapshot
from ffncli.bench.timing.gpu.cuda_clock import CudaClock, GpuCounters, GpuSnapshot
from tests.bench.fake_cuda import FakeCuda
from tests.bench.fake_nvml import FakeNvml, probe_of


class Preempted:
    threads = None

    def read(self):
        return Snapshot(preemptions=3, load=2.5)

    def flags(self, before, after, seconds, threads):
        self.threads = threads
        assert before.preemptions == after.preemptions == 3
        return ("preempted",)


def flags_of(clock, probe):
    counters = GpuCounters(clock, probe, host := Preempted())
    before, after = counters.read(), counters.read()
    assert isinstance(before, GpuSnapshot)
    assert before.load == 2.5
    return counters.flags(before, after, 1e-3, 4), host


def test_only_a_preempted_host_counts_while_the_queue_is_full():
    """The clock's own reading of the SM clock, 1500 MHz, stands in place of NVML's."""
    clock = CudaClock(cuda := FakeCuda(), cuda.now)
    clock.time(lambda: cuda.launch(1e-3), 1)
    flags, host = flags_of(clock, probe_of("1234", FakeNvml())[0])
    assert flags == ("preempted", "host=5e-06", "sm=1500", "power=312")
    assert host.threads == 0


def test_work_that_was_not_timed_is_a_flag():
    clock, side = CudaClock(cuda := FakeCuda(), cuda.now), cuda.Stream()

    def apart():
        with cuda.stream(side):
            cuda.launch(1e-3)

    clock.time(apart, 1)
    assert "other-stream" in flags_of(clock, None)[0]


def test_a_reading_of_another_arms_block_is_not_written_again():
    """Where an answer of NVML takes 1 ms, it is asked every 100 ms: the blocks between have no power of their own."""
    wall = [0.0]
    nvml = FakeNvml(cost=1e-3, wall=wall)
    clock = CudaClock(cuda := FakeCuda(), cuda.now)
    counters = GpuCounters(clock, probe_of("1234", nvml, lambda: wall[0])[0], Preempted())
    wall[0] = 1.0
    seen = []
    for block in range(400):
        nvml.milliwatts, nvml.bits = (700_000, 0x40) if block < 20 else (300_000, 0)
        before = counters.read()
        wall[0] += 1e-3
        seen.append(counters.flags(before, counters.read(), 1e-3, 0))
    powers = [flag for flags in seen for flag in flags if flag.startswith("power=")]
    assert powers == ["power=700", *["power=300"] * (len(powers) - 1)]
    assert 3 <= len(powers) <= 6
    assert sum("gpu-throttled" in flags for flags in seen) == 1


def test_a_block_that_waited_for_the_host_has_the_hosts_flags():
    clock = CudaClock(cuda := FakeCuda(overhead=1e-3), cuda.now)
    clock.time(lambda: cuda.launch(1e-6), 1000)
    flags, host = flags_of(clock, None)
    assert flags[:2] == ("launch-bound", "preempted")
    assert flags[2:] == ("host=1",)  # and no clock: the host was too slow to launch the wait in time
    assert host.threads == 0  # the processor time of the host is not judged


def test_the_readings_before_and_after_are_not_mixed_up():
    """The power is that after the block; the host's counts are taken in their order."""
    order = []

    class Host(Preempted):
        def read(self):
            return Snapshot(preemptions=len(order))

        def flags(self, before, after, seconds, threads):
            return (f"preempted by {after.preemptions - before.preemptions}",)

    clock = CudaClock(cuda := FakeCuda(overhead=1e-3), cuda.now)
    clock.time(lambda: cuda.launch(1e-6), 1000)
    counters = GpuCounters(clock, probe_of("1234", FakeNvml())[0], Host())
    before = counters.read()
    order.append("block")
    after = GpuSnapshot(preemptions=1, gpu=replace(before.gpu, power_w=500.0))
    flags = counters.flags(before, after, 1e-3, 1)
    assert flags[:2] == ("launch-bound", "preempted by 1")
    assert flags[-1] == "power=500"
    assert counters.flags(Snapshot(), after, 1e-3, 1)[-1].startswith("host=")
    assert counters.flags(before, Snapshot(), 1e-3, 1)[-1].startswith("host=")


def test_only_threads_that_launch_are_asked_how_long_they_waited(monkeypatch):
    """A thread that delays no launch has waited for a core: on a GPU that is no preempted host."""
    folders = []
    monkeypatch.setattr(host_counters._Waiting, "look_for_threads", lambda self: folders.append(self._only))
    GpuCounters(CudaClock(cuda := FakeCuda(), cuda.now)).read()
    (asked,) = folders
    assert asked(Path(f"/proc/self/task/{os.getpid()}"))
    assert not asked(Path("/proc/self/task/0"))


def test_snapshots_without_a_gpu_are_understood():
    clock = CudaClock(cuda := FakeCuda(), cuda.now)
    assert GpuCounters(clock).flags(Snapshot(), Snapshot(), 1e-3, 1) == ()
