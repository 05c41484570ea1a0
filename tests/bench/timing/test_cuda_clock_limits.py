"""Where a GPU's clock draws its lines: how often it looks, what is late, what waits, what runs on another stream."""

from itertools import pairwise

import pytest

from ffncli.bench.timing.gpu.cuda_clock import LONGEST, CudaClock
from tests.bench.fake_cuda import FakeCuda, FakeEvent


class Logged(FakeCuda):
    """Its log has events too, and `waits` the seconds for which kernels were told to wait."""

    def __init__(self, **options):
        super().__init__(**options)
        self.waits = []

    def Event(self, enable_timing=False):
        cuda = self

        class Event(FakeEvent):
            def record(self):
                super().record()
                cuda.log.append("event")

        return Event(self, enable_timing)

    def _sleep(self, cycles):
        self.waits.append(cycles / self.top)
        super()._sleep(cycles)


def clock_on(**options):
    cuda = Logged(**options)
    return cuda, CudaClock(cuda, cuda.now)


def segments(cuda, clock, call, inner):
    """The numbers of kernels between the events of a block."""
    del cuda.log[:]
    clock.time(call, inner)
    events = [at for at, name in enumerate(cuda.log) if name == "event"]
    return [later - at - 1 for at, later in pairwise(events[1:])]  # the first one is before the wait


def wait_before(cuda, clock, call, inner=1, before=None):
    """Seconds for which the GPU waits before this block: the longer one of two waits is meant."""
    del cuda.waits[:]
    clock.time(call, inner, before)
    return max(cuda.waits, default=0.0)


# --- how often it looks -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("inner", "expected"), [(1, [1]), (16, [16]), (17, [16, 1]), (40, [16, 16, 8])])
def test_a_new_call_is_looked_at_every_16_calls(inner, expected):
    cuda, clock = clock_on()
    assert segments(cuda, clock, lambda: cuda.launch(2e-5), inner) == expected


@pytest.mark.parametrize(
    ("kernel", "inner", "expected"),
    [
        (2.5e-5, 12, [5, 5, 2]),  # 125 µs are 5 calls
        (1e-6, 300, [126, 126, 48]),  # 0.5 µs, an event's resolution, is taken off the time of 125 calls
        (2.5e-5, 3, [3]),
        (1e-3, 3, [1, 1, 1]),  # a call that lasts longer is a segment of its own
        (0.0, 40, [40]),
    ],
)
def test_a_known_call_is_looked_at_every_125_microseconds(kernel, inner, expected):
    cuda, clock = clock_on()
    work = lambda: cuda.launch(kernel)  # noqa: E731
    clock.time(work, 125)
    assert segments(cuda, clock, work, inner) == expected


# --- how long the GPU waits -------------------------------------------------------------------------------------------


def test_the_wait_covers_the_launches_of_a_segment_and_the_hosts_delay_in_the_others():
    """20 µs, and 1.5 times what is needed. A new call is taken to need 200 µs of the host, and none of the GPU."""
    cuda, clock = clock_on(overhead=3e-5)
    work = lambda: cuda.launch(2.5e-5)  # noqa: E731
    assert wait_before(cuda, clock, work) == pytest.approx(20e-6 + 1.5 * 200e-6, rel=1e-5)
    new = lambda: cuda.launch(2.5e-5)  # noqa: E731
    assert wait_before(cuda, clock, new, 40) == pytest.approx(20e-6 + 1.5 * 40 * 200e-6, rel=1e-5)
    clock.time(work, 200)  # 30 µs of the host, 25 of the GPU, 5 calls in a segment
    assert wait_before(cuda, clock, work, 20) == pytest.approx(20e-6 + 1.5 * (5 * 30e-6 + 15 * 5e-6), rel=1e-2)
    assert wait_before(cuda, clock, work, 10**4) == pytest.approx(LONGEST, rel=1e-5)


def test_a_gpu_that_is_slower_than_its_host_waits_for_a_segment_alone():
    cuda, clock = clock_on(overhead=5e-6)
    work = lambda: cuda.launch(2.5e-5)  # noqa: E731
    clock.time(work, 200)
    for inner in (5, 50, 200):
        assert wait_before(cuda, clock, work, inner) == pytest.approx(20e-6 + 1.5 * 5 * 5e-6, rel=1e-2)


def test_a_first_call_that_was_just_in_time_is_not_taken_for_late():
    """The host needs longer for it than the GPU is to wait; but the wait has begun later, and is not over yet."""
    cuda, clock = clock_on(overhead=5e-6)

    def work():
        cuda.host += 320e-6
        cuda.launch(1e-3)

    clock.time(work, 1)
    assert not clock.launch_bound
    assert wait_before(cuda, clock, work) == pytest.approx(20e-6 + 1.5 * 325e-6, rel=1e-5)


def test_a_stall_of_the_host_costs_a_known_call_no_longer_wait():
    cuda, clock = clock_on(overhead=5e-6)
    work = lambda: cuda.launch(1e-3)  # noqa: E731
    clock.time(work, 1)
    known = wait_before(cuda, clock, work)
    cuda.stall_at(4, 8e-3)
    clock.time(work, 1)
    assert clock.launch_bound
    assert wait_before(cuda, clock, work) == pytest.approx(known)


@pytest.mark.parametrize("flushed", [False, True])
def test_a_late_first_call_is_given_twice_its_time_once(flushed):
    """A host that stalls for 1 ms is waited for longer, and is in time; what waits for the GPU is not, whatever wait
    it gets, and gets none any more."""
    cuda, clock = clock_on(overhead=5e-6)
    cuda.host = 1e6
    before = (lambda: cuda.launch(8e-5, "flush")) if flushed else None

    def stalls():
        cuda.host += 1e-3
        cuda.launch(1e-5)

    clock.time(stalls, 1, before)
    assert clock.launch_bound
    assert wait_before(cuda, clock, stalls, 1, before) == pytest.approx(2e-3, rel=0.05)
    assert not clock.launch_bound

    def waits():
        cuda.launch(1e-5)
        cuda.wait()

    found = [wait_before(cuda, clock, waits, 1, before) for _ in range(4)]
    assert found[1] > 2 * found[0] * 0.9
    assert found[2:] == [0.0, 0.0]
    assert clock.launch_bound


def test_before_each_call_there_is_the_wait_of_one():
    """A block of calls that are timed one by one: the SM clock is read before the first, as in any other block."""
    cuda, clock = clock_on(cycles_per_s=1.41e9)
    work, flush = (lambda: cuda.launch(2e-5)), (lambda: cuda.launch(8e-5, "flush"))
    for _ in range(3):
        clock.time(work, 1, flush)
        assert clock.sm_hz == pytest.approx(1.41e9)
    clock.time(work, 20, flush)
    assert wait_before(cuda, clock, work, 20, flush) == pytest.approx(20e-6 + 1.5 * 2 * 5e-6, rel=0.2)
    assert clock.cycles_per_s == pytest.approx(1.41e9)


# --- what the GPU still does ------------------------------------------------------------------------------------------


def test_the_end_of_a_kernels_work_is_waited_for_and_what_sticks_is_raised():
    cuda, clock = clock_on()
    cuda.launch(1.0)
    clock.finish()
    assert cuda.now() >= 1.0
    cuda.fault()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        clock.finish()


def apart(cuda, side, kernel, behind):
    """A call that leaves work of `behind` seconds on another stream when its own is done."""

    def call():
        cuda.launch(kernel)
        side.wait_stream(cuda.current_stream())
        with cuda.stream(side):
            cuda.launch(behind)

    return call


LEFT = [(1e-3, 15e-6, False), (1e-3, 30e-6, True), (1e-2, 190e-6, False), (1e-2, 220e-6, True), (1e-5, 15e-6, False)]


@pytest.mark.parametrize(("kernel", "behind", "noticed"), LEFT)
@pytest.mark.parametrize("uptime", [0.0, 1e6])
def test_work_that_is_left_is_measured_against_the_calls(kernel, behind, noticed, uptime):
    """20 µs or 2 % of their time, also by a host's clock that began long ago."""
    cuda, clock = clock_on(sync_cost=1e-4)
    cuda.host = uptime
    assert clock.leaves_work(apart(cuda, cuda.Stream(), kernel, behind), 1) is noticed


def test_what_another_arm_left_is_not_this_ones():
    """10 ms of work on another stream from before a block are waited for before it begins."""
    cuda, clock = clock_on()
    with cuda.stream(cuda.Stream()):
        cuda.launch(1e-2)
    assert clock.time(lambda: cuda.launch(1e-3), 1) == pytest.approx(1e-3)
    assert not clock.other_stream


@pytest.mark.parametrize(("kernel", "behind", "noticed"), LEFT)
def test_calls_that_are_timed_one_by_one_may_leave_as_much(kernel, behind, noticed):
    cuda, clock = clock_on(sync_cost=1e-4)
    call = apart(cuda, cuda.Stream(), kernel, behind)
    for _ in range(2):
        clock.time(call, 1, lambda: cuda.launch(8e-5, "flush"))
        assert clock.other_stream is noticed
