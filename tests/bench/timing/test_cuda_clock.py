"""A GPU's clock on a simulated GPU: it reads the GPU's time whatever the host takes, and says when it cannot."""

import pytest

from ffncli.bench.timing.clock import CpuClock
from ffncli.bench.timing.cuda_clock import LONGEST, CudaClock, clock_for
from tests.bench.fake_cuda import FakeCuda


def clock_on(**options):
    cuda = FakeCuda(**options)
    return cuda, CudaClock(cuda, cuda.now)


def led_in(clock, call, inner, before=None):
    """As a block is timed: lead-in calls of the same arm first."""
    for _ in range(4):
        clock.time(call, 1, before)
    return clock.time(call, inner, before)


@pytest.mark.parametrize("overhead", [1e-7, 5e-6, 3e-5, 1e-4])
@pytest.mark.parametrize("kernel", [2e-6, 3e-5, 4e-4])
@pytest.mark.parametrize("inner", [1, 2, 17])
def test_the_time_is_the_gpus_whether_it_or_the_host_is_slower(overhead, kernel, inner):
    cuda, clock = clock_on(overhead=overhead)
    seconds = led_in(clock, lambda: cuda.launch(kernel), inner)
    assert seconds == pytest.approx(inner * kernel, rel=1e-9)
    assert not clock.launch_bound


def test_without_waiting_the_host_would_be_timed():
    """The oracle of the simulation: an empty queue reads launches."""
    cuda = FakeCuda(overhead=3e-5)
    start, end = cuda.Event(True), cuda.Event(True)
    start.record()
    for _ in range(10):
        cuda.launch(1e-6)
    end.record()
    cuda.synchronize()
    assert start.elapsed_time(end) * 1e-3 == pytest.approx(10 * 3e-5 + 1e-6)


def test_a_call_of_many_kernels():
    cuda, clock = clock_on(overhead=8e-6)
    seconds = led_in(clock, lambda: [cuda.launch(1e-6) for _ in range(40)], 10)
    assert seconds == pytest.approx(10 * 40e-6)
    assert not clock.launch_bound


def test_a_host_that_cannot_keep_up_is_said():
    """500 calls in which the host loses 1 ms each: more than the longest waiting."""
    cuda, clock = clock_on()

    def slow_host(gpu):
        cuda.host += 1e-3 - cuda.overhead
        cuda.launch(gpu)

    seconds = led_in(clock, lambda: slow_host(1e-6), 500)
    assert clock.launch_bound
    assert seconds == pytest.approx(500e-3 - LONGEST, rel=0.05)
    assert led_in(clock, lambda: slow_host(5e-3), 4) == pytest.approx(20e-3)
    assert not clock.launch_bound  # it is of the last block only


def test_a_call_that_waits_for_the_gpu_is_said_and_not_waited_for():
    cuda, clock = clock_on(overhead=5e-6)

    def routed():
        cuda.launch(2e-5)
        cuda.wait()
        cuda.launch(2e-5)

    seconds = led_in(clock, routed, 10)
    assert clock.launch_bound
    assert seconds == pytest.approx(10 * (2 * 2e-5 + 5e-6), rel=0.15)  # the second launch finds an idle GPU
    assert cuda.log[-23:].count("sleep") == 0


def test_a_queue_of_limited_depth_does_not_make_the_host_look_slow():
    """Behind 64 launches the host waits; the GPU never does."""
    cuda, clock = clock_on(overhead=1e-6, depth=64)
    before = cuda.log.count("sleep")
    for _ in range(20):
        assert led_in(clock, lambda: cuda.launch(4e-6), 2000) == pytest.approx(2000 * 4e-6)
        assert not clock.launch_bound
    assert cuda.log.count("sleep") - before == 100
    assert clock._pace.host == pytest.approx(1e-6)


@pytest.mark.parametrize(("overhead", "kernel"), [(2e-6, 5e-5), (3e-5, 1e-6)])
def test_what_runs_before_each_call_is_not_timed(overhead, kernel):
    cuda, clock = clock_on(overhead=overhead)
    seconds = led_in(clock, lambda: cuda.launch(kernel), 9, lambda: cuda.launch(8e-5, "flush"))
    assert seconds == pytest.approx(9 * kernel)
    assert not clock.launch_bound
    assert [name for name in cuda.log[-20:] if name != "synchronize"][-18:] == ["flush", "kernel"] * 9


def test_the_host_waits_at_the_ends_of_blocks_only():
    cuda, clock = clock_on()
    led_in(clock, lambda: cuda.launch(1e-5), 50)
    block = cuda.log[-(50 + 1 + 2) :]
    assert block == ["synchronize", "sleep", *["kernel"] * 50, "synchronize"]


def test_waiting_costs_little_where_the_gpu_is_slower():
    cuda, clock = clock_on(overhead=1e-5)
    for _ in range(4):
        clock.time(work := (lambda: cuda.launch(1e-4)), 1)
    before = cuda.now()
    clock.time(work, 10)
    assert cuda.now() - before < 1.1e-3


def test_the_gpus_cycles_are_measured():
    assert clock_on(cycles_per_s=1.41e9)[1].cycles_per_s == pytest.approx(1.41e9)


def test_the_clock_now_is_the_hosts():
    cuda, clock = clock_on()
    cuda.host = 12.5
    assert clock.now() == 12.5


def test_the_processor_has_its_own_clock():
    assert isinstance(clock_for("cpu"), CpuClock)


def test_another_call_is_met_anew():
    """One that waits for the GPU says nothing of the next."""
    cuda, clock = clock_on()
    led_in(clock, lambda: (cuda.launch(1e-6), cuda.wait()), 5)
    assert clock._pace.missed > 1
    assert led_in(clock, lambda: cuda.launch(1e-6), 5) == pytest.approx(5e-6)
    assert not clock.launch_bound


def test_a_host_that_falls_behind_a_flush_is_said():
    cuda, clock = clock_on()

    def routed():
        cuda.launch(1e-6)
        cuda.wait()
        cuda.launch(1e-6)

    led_in(clock, routed, 5, lambda: cuda.launch(8e-5, "flush"))
    assert clock.launch_bound
