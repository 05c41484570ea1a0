"""A GPU's clock on a simulated GPU: it reads the GPU's time whatever the host takes, and says when it cannot."""

from itertools import combinations, pairwise
from random import Random

import pytest

from ffncli.bench.timing.clock import CpuClock
from ffncli.bench.timing.gpu.cuda_clock import LONGEST, CudaClock, clock_for
from tests.bench.fake_cuda import FakeCuda, FakeEvent, Ramp, unkind


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
    assert cuda.log.count("sleep") - before == 20 * 6  # one before each first wait, which is read as a clock
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
    block = cuda.log[-(50 + 1 + 3) :]
    assert block == ["synchronize", "sleep", *["kernel"] * 50, "synchronize", "synchronize"]


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
    assert clock._pace.waits
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


# --- an unkind GPU ----------------------------------------------------------------------------------------------------


def test_a_kind_host_on_an_unkind_gpu_is_not_accused():
    """Costs of events, their resolution, a clock that ramps: less than 2 % of a block, and no flag."""
    cuda = unkind()
    clock = CudaClock(cuda, cuda.now)
    for kernel, inner in ((2e-5, 50), (3e-6, 333), (4e-4, 3)):
        for _ in range(10):
            seconds = led_in(clock, call := (lambda kernel=kernel: cuda.launch(kernel)), inner)
            assert not clock.launch_bound
            assert not clock.other_stream
        assert cuda.rate == cuda.top
        assert inner * kernel <= seconds + 1e-6 < 1.02 * inner * kernel, call


def test_a_stall_at_any_place_of_a_block_is_flagged():
    """50 calls of 20 µs, which the host launches in 5 µs each, and one stall of 1 ms before any operation of it."""
    cuda, clock = clock_on()
    work = lambda: cuda.launch(2e-5)  # noqa: E731
    led_in(clock, work, 50)
    before = cuda.operations
    clock.time(work, 50)
    places, missed = cuda.operations - before, 0
    assert places > 55  # the launches, and what the clock asks
    spoiled = 0
    for place in range(places):
        for _ in range(4):
            clock.time(work, 1)
        cuda.stall_at(place, 1e-3)
        seconds = clock.time(work, 50)
        long = seconds > 1.05 * 50 * 2e-5
        spoiled += long
        missed += long and not clock.launch_bound
    assert spoiled >= 50
    assert missed == 0
    led_in(clock, work, 50)
    assert not clock.launch_bound


@pytest.mark.parametrize("stalls", [(3e-4, 3e-4), (2e-3, 2e-3), (8e-3, 8e-3), (1e-3, 1.8e-3)])
def test_late_lead_in_calls_do_not_switch_the_waiting_off(stalls):
    """Two of four lead-in calls come late; the block of 10 calls of 20 µs behind them reads 0.2 ms."""
    for late in combinations(range(4), 2):
        cuda, clock = clock_on(overhead=3e-5)
        calls = iter(range(1000))

        def work(cuda=cuda, calls=calls, late=late):
            if (number := next(calls)) in late:
                cuda.host += stalls[late.index(number)]
            cuda.launch(2e-5)

        assert led_in(clock, work, 10) == pytest.approx(10 * 2e-5), late
        assert not clock.launch_bound


def test_work_on_another_stream_is_noticed():
    """A kernel that launches on a stream of its own: 250 µs that the events do not see."""
    cuda, clock = clock_on(sync_cost=6e-6)
    side = cuda.Stream()

    def apart():
        with cuda.stream(side):
            cuda.launch(2.5e-4)

    assert led_in(clock, apart, 4) < 1e-5
    assert clock.other_stream
    led_in(clock, lambda: cuda.launch(2.5e-4), 4)
    assert not clock.other_stream  # it is of the last block only

    def joined():
        side.wait_stream(cuda.current_stream())
        apart()
        cuda.current_stream().wait_stream(side)

    assert led_in(clock, joined, 4) == pytest.approx(1e-3, rel=0.05)
    assert not clock.other_stream
    led_in(clock, apart, 4, lambda: cuda.launch(8e-5, "flush"))
    assert clock.other_stream


def test_a_host_whose_waits_become_slow_accuses_nobody():
    """On a virtual machine a wait for an idle GPU takes 5 µs in one process and 40 in the next."""
    cuda, clock = clock_on()
    side = cuda.Stream()

    def elsewhere():
        with cuda.stream(side):
            cuda.launch(250e-6)

    cuda.sync_cost = 60e-6
    led_in(clock, lambda: cuda.launch(1e-5), 50)
    assert not clock.other_stream
    assert not clock.leaves_work(lambda: cuda.launch(1e-5), 32)
    assert clock.leaves_work(elsewhere, 32)


def test_work_on_another_stream_is_noticed_among_replays():
    """A graph that holds none of it: what it launches outside runs all the same."""
    cuda, clock = clock_on()
    side = cuda.Stream()
    graph = cuda.CUDAGraph()
    graph.capture_begin()
    cuda.launch(1e-6)
    graph.capture_end()

    def replay():
        graph.replay()
        with cuda.stream(side):
            cuda.launch(1e-4)

    led_in(clock, replay, 8)
    assert clock.other_stream


def test_a_long_block_may_end_a_little_later_elsewhere():
    """20 µs, or 2 % of the block: as much may be the noise of two clocks."""
    for kernel, behind, noticed in ((1e-3, 19e-6, False), (1e-3, 25e-6, True), (1e-2, 190e-6, False)):
        cuda, clock = clock_on(sync_cost=1e-4)
        side = cuda.Stream()

        def call(cuda=cuda, side=side, kernel=kernel, behind=behind):
            cuda.launch(kernel)
            side.wait_stream(cuda.current_stream())
            with cuda.stream(side):
                cuda.launch(behind)

        led_in(clock, call, 1)
        assert clock.other_stream is noticed


def test_the_clock_of_the_gpu_before_a_block_is_counted():
    """A GPU that rests between the arms is slow in the blocks after that, and the figure is each block's."""
    cuda = unkind(ramp=Ramp(low=345e6, rise=2e10, fall=2e9))
    clock = CudaClock(cuda, cuda.now)
    readings = []
    for _ in range(100):
        clock.time(lambda: cuda.launch(2e-5), 50)
    for rest in (0.0, 0.2, 0.4, 0.0, 2.0):
        cuda.host += rest
        clock.time(work := (lambda: cuda.launch(2e-5)), 1)
        readings.append(clock.sm_hz / cuda.top)
        for _ in range(100):
            clock.time(work, 50)
        assert cuda.rate == cuda.top
    assert readings[0] == pytest.approx(1.0, rel=0.02)
    assert readings[3] == pytest.approx(1.0, rel=0.02)
    assert readings[1] == pytest.approx(1 - 0.2 * 2e9 / 1.98e9, rel=0.05)
    assert readings[2] == pytest.approx(1 - 0.4 * 2e9 / 1.98e9, rel=0.05)
    assert readings[4] == pytest.approx(345e6 / 1.98e9, rel=0.05)


def test_a_short_wait_is_no_clock_and_another_calls_reading_is_not_kept():
    cuda, clock = clock_on()
    work = lambda: cuda.launch(1e-3)  # noqa: E731
    clock.time(work, 1)
    assert clock.sm_hz == pytest.approx(1.5e9)
    cuda.rate = cuda.top = 1e9  # a wait of 30 µs now says nothing
    clock.time(work, 1)
    assert clock.sm_hz == pytest.approx(1.5e9)

    def waits():
        cuda.launch(1e-6)
        cuda.wait()

    for _ in range(3):
        clock.time(waits, 1)
    clock.time(waits, 10)
    assert clock.sm_hz == pytest.approx(1e9)
    cuda.stall_at(3, 1e-3)  # before the wait is launched, when its start has been recorded
    clock.time(lambda: cuda.launch(1e-3), 1)
    assert clock.sm_hz is None


@pytest.mark.parametrize(("depth", "seconds"), [(1024, 8.2e-3), (4096, 4.1e-3)])
def test_a_deeper_queue_lets_the_host_get_further_ahead(depth, seconds):
    """A host of 8 µs against a GPU of 2 µs: 2048 calls wait for the host once the places of the queue are used up."""
    cuda, clock = clock_on(overhead=8e-6, depth=depth)
    assert led_in(clock, lambda: cuda.launch(2e-6), 2048) == pytest.approx(seconds, rel=0.02)
    assert clock.launch_bound is (depth == 1024)


def test_the_hosts_seconds_are_those_of_launching():
    cuda, clock = clock_on(overhead=1e-5)
    led_in(clock, lambda: [cuda.launch(1e-6) for _ in range(4)], 25)
    assert clock.host_s == pytest.approx(25 * 4e-5, rel=0.02)
    led_in(clock, lambda: cuda.launch(1e-4), 9, lambda: cuda.launch(8e-5, "flush"))
    assert clock.host_s == pytest.approx(9 * 1e-5, rel=0.02)  # the flush is not the kernel's


def test_an_error_that_sticks_is_raised_at_the_end_of_the_block():
    cuda, clock = clock_on()

    def faulty():
        cuda.launch(1e-5)
        cuda.fault(when=cuda.free)

    with pytest.raises(RuntimeError, match="illegal memory access"):
        clock.time(faulty, 10)
    for call in (cuda.synchronize, cuda.empty_cache, lambda: cuda.launch(1e-6), lambda: clock.time(lambda: None, 1)):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            call()


def drawn_block(draw):
    """(seconds of a block of an unkind GPU over those without stalls, whether it was stalled, its clock)"""
    kernel, overhead = draw.choice([3e-6, 2e-5, 1e-4]), draw.choice([2e-6, 5e-6, 1e-5])
    flushed = draw.random() < 0.3
    inner = min(round(1e-3 / kernel), 40 if flushed else 400)
    cuda = unkind(overhead=overhead, depth=4096, ramp=None)
    clock = CudaClock(cuda, cuda.now)

    def work():
        cuda.launch(kernel)

    flush = (lambda: cuda.launch(8e-5, "flush")) if flushed else None
    clean = led_in(clock, work, inner, flush)
    for _ in range(4):
        clock.time(work, 1, flush)
    stalls = draw.randrange(3)
    for _ in range(stalls):
        cuda.stall_at(draw.randrange(4 * inner if flushed else inner), draw.choice([5e-5, 3e-4, 1e-3, 5e-3]))
    return clock.time(work, inner, flush) / clean, stalls > 0, clock


def test_stalls_drawn_at_random_are_flagged_where_they_spoil_a_block():
    draw, spoiled = Random(3), 0
    for _ in range(60):
        longer, stalled, clock = drawn_block(draw)
        spoiled += longer > 1.02
        assert clock.launch_bound or longer <= 1.02
        assert stalled or not clock.launch_bound
        assert not clock.other_stream
    assert spoiled >= 10


# --- what the clock cannot see, and says so ---------------------------------------------------------------------------


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


def logged_clock(**options):
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
    cuda, clock = logged_clock()
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
    cuda, clock = logged_clock()
    work = lambda: cuda.launch(kernel)  # noqa: E731
    clock.time(work, 125)
    assert segments(cuda, clock, work, inner) == expected


# --- how long the GPU waits -------------------------------------------------------------------------------------------


def test_the_wait_covers_the_launches_of_a_segment_and_the_hosts_delay_in_the_others():
    """20 µs, and 1.5 times what is needed. A new call is taken to need 200 µs of the host, and none of the GPU."""
    cuda, clock = logged_clock(overhead=3e-5)
    work = lambda: cuda.launch(2.5e-5)  # noqa: E731
    assert wait_before(cuda, clock, work) == pytest.approx(20e-6 + 1.5 * 200e-6, rel=1e-5)
    new = lambda: cuda.launch(2.5e-5)  # noqa: E731
    assert wait_before(cuda, clock, new, 40) == pytest.approx(20e-6 + 1.5 * 40 * 200e-6, rel=1e-5)
    clock.time(work, 200)  # 30 µs of the host, 25 of the GPU, 5 calls in a segment
    assert wait_before(cuda, clock, work, 20) == pytest.approx(20e-6 + 1.5 * (5 * 30e-6 + 15 * 5e-6), rel=1e-2)
    assert wait_before(cuda, clock, work, 10**4) == pytest.approx(LONGEST, rel=1e-5)


def test_a_gpu_that_is_slower_than_its_host_waits_for_a_segment_alone():
    cuda, clock = logged_clock(overhead=5e-6)
    work = lambda: cuda.launch(2.5e-5)  # noqa: E731
    clock.time(work, 200)
    for inner in (5, 50, 200):
        assert wait_before(cuda, clock, work, inner) == pytest.approx(20e-6 + 1.5 * 5 * 5e-6, rel=1e-2)


def test_a_first_call_that_was_just_in_time_is_not_taken_for_late():
    """The host needs longer for it than the GPU is to wait; but the wait has begun later, and is not over yet."""
    cuda, clock = logged_clock(overhead=5e-6)

    def work():
        cuda.host += 320e-6
        cuda.launch(1e-3)

    clock.time(work, 1)
    assert not clock.launch_bound
    assert wait_before(cuda, clock, work) == pytest.approx(20e-6 + 1.5 * 325e-6, rel=1e-5)


def test_a_stall_of_the_host_costs_a_known_call_no_longer_wait():
    cuda, clock = logged_clock(overhead=5e-6)
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
    cuda, clock = logged_clock(overhead=5e-6)
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
    cuda, clock = logged_clock(cycles_per_s=1.41e9)
    work, flush = (lambda: cuda.launch(2e-5)), (lambda: cuda.launch(8e-5, "flush"))
    for _ in range(3):
        clock.time(work, 1, flush)
        assert clock.sm_hz == pytest.approx(1.41e9)
    clock.time(work, 20, flush)
    assert wait_before(cuda, clock, work, 20, flush) == pytest.approx(20e-6 + 1.5 * 2 * 5e-6, rel=0.2)
    assert clock.cycles_per_s == pytest.approx(1.41e9)


# --- what the GPU still does ------------------------------------------------------------------------------------------


def test_the_end_of_a_kernels_work_is_waited_for_and_what_sticks_is_raised():
    cuda, clock = logged_clock()
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
    cuda, clock = logged_clock(sync_cost=1e-4)
    cuda.host = uptime
    assert clock.leaves_work(apart(cuda, cuda.Stream(), kernel, behind), 1) is noticed


def test_what_another_arm_left_is_not_this_ones():
    """10 ms of work on another stream from before a block are waited for before it begins."""
    cuda, clock = logged_clock()
    with cuda.stream(cuda.Stream()):
        cuda.launch(1e-2)
    assert clock.time(lambda: cuda.launch(1e-3), 1) == pytest.approx(1e-3)
    assert not clock.other_stream


@pytest.mark.parametrize(("kernel", "behind", "noticed"), LEFT)
def test_calls_that_are_timed_one_by_one_may_leave_as_much(kernel, behind, noticed):
    cuda, clock = logged_clock(sync_cost=1e-4)
    call = apart(cuda, cuda.Stream(), kernel, behind)
    for _ in range(2):
        clock.time(call, 1, lambda: cuda.launch(8e-5, "flush"))
        assert clock.other_stream is noticed
