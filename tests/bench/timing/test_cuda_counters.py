"""A block's flags on a GPU: the host's count only where the GPU waited for it."""

from ffncli.bench.machine.counters import Snapshot
from ffncli.bench.machine.nvml import probe_of
from ffncli.bench.timing.cuda_clock import CudaClock
from ffncli.bench.timing.cuda_counters import GpuCounters, GpuSnapshot
from tests.bench.fake_cuda import FakeCuda
from tests.bench.fake_nvml import FakeNvml


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


def test_the_host_is_none_of_the_gpus_business_while_the_queue_is_full():
    clock = CudaClock(cuda := FakeCuda(), cuda.now)
    clock.time(lambda: cuda.launch(1e-3), 1)
    flags, host = flags_of(clock, probe_of("1234", FakeNvml())[0])
    assert flags == ("sm=1410", "power=312")
    assert host.threads is None


def test_a_block_that_waited_for_the_host_has_the_hosts_flags():
    clock = CudaClock(cuda := FakeCuda(overhead=1e-3), cuda.now)
    clock.time(lambda: cuda.launch(1e-6), 1000)
    flags, host = flags_of(clock, None)
    assert flags == ("launch-bound", "preempted")
    assert host.threads == 0  # the processor time of the host is not judged


def test_snapshots_without_a_gpu_are_understood():
    clock = CudaClock(cuda := FakeCuda(), cuda.now)
    assert GpuCounters(clock).flags(Snapshot(), Snapshot(), 1e-3, 1) == ()
