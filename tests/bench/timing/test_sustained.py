"""Turns of 300 ms on a simulated GPU whose clock sinks under load."""

from math import exp
from statistics import fmean

import pytest

from ffncli.bench.activity import SIZE
from ffncli.bench.records import TimedBlock
from ffncli.bench.timing.modes.sustained import Turns, note, sustained, sustained_remarks
from ffncli.bench.timing.reporter import REPORTER
from ffncli.bench.timing.rounds import Arm
from tests.bench.fake_nvml import FakeNvml, probe_of


class Sinking:
    """A clock whose every call takes longer than the one before: exp(rate) for each second so far."""

    def __init__(self, rate=0.0):
        self.rate, self.wall, self.turns = rate, 0.0, []

    def now(self):
        return self.wall

    def time(self, call, inner, before=None):
        name, seconds = call()
        taken = inner * seconds * exp(self.rate * self.wall)
        self.wall += 0.4 if taken > 0.2 else taken  # turns evenly apart, so that the drift is linear in them
        self.turns.append((name, taken))
        return taken


def arms(slow=1.1):
    return Arm("packed", lambda: ("packed", slow * 1e-3)), Arm("eager", lambda: ("eager", 1e-3))


def ratio(kernel: Turns, baseline: Turns) -> float:
    """Below 1 the kernel is faster."""
    return kernel.time_s / baseline.time_s


def test_four_turns_a_b_b_a_of_at_least_300_ms():
    clock = Sinking()
    found = sustained(*arms(), clock)
    assert [name for name, _ in clock.turns[-4:]] == ["packed", "eager", "eager", "packed"]
    assert all(0.3 <= taken < 0.4 for _, taken in clock.turns[-4:])
    assert ratio(*found) == pytest.approx(1.1)
    assert found[0] == Turns("packed", [pytest.approx(1.1e-3)] * 2)


def test_a_replay_of_many_calls_counts_as_many():
    def replay():
        return "packed", 40 * 1.1e-3

    found = sustained(Arm("packed", replay, calls=40), arms()[1], Sinking())
    assert ratio(*found) == pytest.approx(1.1)


def test_a_clock_that_sinks_evenly_cancels():
    clock = Sinking(rate=0.1)
    assert ratio(*sustained(*arms(), clock)) == pytest.approx(1.1, rel=1e-9)
    turns = [taken for _, taken in clock.turns[-4:]]
    assert turns[3] / turns[0] == pytest.approx(exp(0.1 * 1.2))  # it did sink


def test_each_arm_has_its_clock_and_power():
    nvml = FakeNvml()

    class Loaded(Sinking):
        def time(self, call, inner, before=None):
            name, _ = call()
            nvml.sm, nvml.milliwatts = (1200, 640_000) if name == "packed" else (1400, 500_000)
            return super().time(call, inner, before)

    found = sustained(*arms(), Loaded(), probe_of("1234", nvml)[0])
    assert [(turns.clocks_mhz, turns.powers_w) for turns in found] == [([1200] * 2, [640] * 2), ([1400] * 2, [500] * 2)]
    states = "packed 1200 MHz 640 W, eager 1400 MHz 500 W, two turns of each: 1.100 and 1.100"
    assert note(*found, 1.0) == f"sustained 1.100 ({states}), at equal clock 1.000"


def test_power_is_the_energy_of_a_turn_not_the_mean_of_the_last_second():
    """A card whose power reading is the mean of its last second, three turns: both sides would read the same."""
    nvml, watts, drawn = FakeNvml(), {"packed": 640, "eager": 500}, []

    class Drawing(Sinking):
        def time(self, call, inner, before=None):
            began, (name, _) = self.wall, call()
            taken = super().time(call, inner, before)
            drawn.extend([watts[name]] * round(1000 * (self.wall - began)))  # a value for each millisecond
            nvml.milliwatts = 1000 * sum(drawn[-1000:]) / len(drawn[-1000:])
            nvml.millijoules = sum(drawn)
            return taken

    nvml.millijoules = 0
    kernel, baseline = sustained(*arms(), Drawing(), probe_of("1234", nvml)[0])
    assert fmean(kernel.powers_w) == pytest.approx(640, rel=5e-3)
    assert fmean(baseline.powers_w) == pytest.approx(500, rel=5e-3)
    nvml.refuses.add("energy")  # a card before Volta: only the mean, in which the sides can hardly be told apart
    kernel, baseline = sustained(*arms(), Drawing(), probe_of("1234", nvml)[0])
    assert abs(fmean(kernel.powers_w) - fmean(baseline.powers_w)) < 70


def test_turns_in_which_the_gpu_waited_for_the_host_say_so():
    class Waiting(Sinking):
        launch_bound = False

        def time(self, call, inner, before=None):
            self.launch_bound = call()[0] == "packed"
            return super().time(call, inner, before)

    found = sustained(*arms(), Waiting())
    assert [turns.launch_bound for turns in found] == [True, False]
    assert note(*found, 1.1) == (
        "sustained: the GPU waited for the host in these turns, so its clock is not the clock under full load"
    )


def test_turns_that_disagree_say_nothing():
    """Two turns of each have no interval: a ratio on whose side only one of the pairs lies is not shown."""

    class Uneven(Sinking):
        def time(self, call, inner, before=None):
            taken = super().time(call, inner, before)
            return taken * (1.3 if len(self.turns) == self.last else 1.0)

    clock = Sinking()
    sustained(*arms(slow=1.0), clock)
    uneven = Uneven()
    uneven.last = len(clock.turns)
    found = sustained(*arms(slow=1.0), uneven)
    pairs = [a / b for a, b in zip(found[0].times, found[1].times, strict=True)]
    assert pairs == [pytest.approx(1.0), pytest.approx(1.3)]
    assert ratio(*found) == pytest.approx(1.3**0.5)
    assert note(*found, 1.05) == ""
    assert "two turns of each: 1.000 and 1.300" in note(*found, 0.95)


def test_the_flush_goes_along():
    seen = []

    class Watching(Sinking):
        def time(self, call, inner, before=None):
            seen.append(before)
            return super().time(call, inner, before)

    kernel, baseline = arms()
    flush = object()
    sustained(Arm("packed", kernel.call, flush), Arm("eager", baseline.call, flush), Watching())
    assert set(seen) == {flush}


@pytest.mark.parametrize(
    ("equal", "said"), [(1.0, False), (1.0099, False), (1.0101, True), (0.9902, False), (0.99, True)]
)
def test_a_note_only_where_the_ratios_differ_by_more_than_one_percent(equal, said):
    found = Turns("packed", [1e-3, 1e-3]), Turns("eager", [1e-3, 1e-3])
    assert bool(note(*found, equal)) is said
    if said:
        assert (
            note(*found, equal) == f"sustained 1.000 (two turns of each: 1.000 and 1.000), at equal clock {equal:.3f}"
        )


def test_one_percent_is_not_more_than_one_percent():
    found = Turns("packed", [1.01, 1.01]), Turns("eager", [1.0, 1.0])
    assert ratio(*found) == 1.01
    assert note(*found, 1.0) == ""


class Counted(Sinking):
    """How many calls each of its times had, and whose code the parent saw then."""

    def __init__(self, rate=0.0):
        super().__init__(rate)
        self.inner, self.seen = [], []

    def time(self, call, inner, before=None):
        self.inner.append(inner)
        self.seen.append(REPORTER.read().kernel)
        return super().time(call, inner, before)


def test_a_turn_has_as_many_calls_as_a_tenth_more_than_300_ms_take():
    """From one call of 1 ms by a hundredth and a tenth of a turn; a turn that is long enough is not tried again."""
    clock = Counted()
    sustained(Arm("eager", lambda: ("eager", 1e-3)), Arm("packed", lambda: ("packed", 1e-3)), clock)
    assert clock.inner == [1, 4, 33, 330] * 2 + [330] * 4


def test_what_empties_caches_before_each_call_is_part_of_a_turn():
    """Calls of 10 µs, each after 90 µs of reading other memory: turns of 300 ms have 3,300 of them, not 33,000."""

    class Flushing(Counted):
        def time(self, call, inner, before=None):
            taken = super().time(call, inner, before)
            self.wall += 9 * taken
            return taken

    clock = Flushing()
    sustained(*(Arm(name, lambda name=name: (name, 1e-5), object()) for name in ("packed", "eager")), clock)
    assert max(clock.inner) == 3300


def test_calls_that_get_faster_are_tried_four_times():
    """A clock that rises under load: each try is too short by what it has gained since, and the last one counts."""

    class Rising(Counted):
        def time(self, call, inner, before=None):
            taken = super().time(lambda: ("eager", 1e-3 * 0.7 ** len(self.inner)), inner, before)
            self.wall += taken
            return taken

    clock = Rising()
    sustained(*arms(), clock)
    assert len(clock.inner) == 2 * 6 + 4
    assert clock.inner[:6] == sorted(clock.inner[:6])


def test_the_parent_sees_whose_turn_it_is():
    REPORTER.share(bytearray(SIZE), ("packed", "eager"))
    try:
        clock = Counted()
        sustained(*arms(), clock)
        assert clock.seen == ["packed"] * 4 + ["eager"] * 4 + ["packed", "eager", "eager", "packed"]
        assert REPORTER.read().kernel == ""
    finally:
        REPORTER.share(bytearray(SIZE), ())


def test_pairs_are_of_turns_one_after_the_other_and_one_pair_may_decide_nothing():
    found = Turns("packed", [1.1, 1.3]), Turns("eager", [1.0, 1.0])
    assert "sustained 1.196" in note(*found, 1.0)
    assert "sustained 1.196" in note(*found, 1.05)
    assert note(*found, 1.1) == ""  # one pair says the same as at equal clock
    assert "sustained 1.196" in note(*found, 1.4)


def test_every_kernel_is_compared_with_the_baseline_only():
    """A kernel of no block has no ratio at equal clock; nor has any without a baseline."""
    timed = [
        TimedBlock(0, "case", 0, number, 0, name, 1, seconds)
        for number in range(8)
        for name, seconds in (("packed", 1e-3), ("eager", 1e-3))
    ]
    packed, eager = arms(slow=1.2)
    late = Arm("late", lambda: ("late", 1e-3))
    by_name = {"packed": packed, "late": late, "eager": eager}
    clock = Counted()
    remarks = sustained_remarks(by_name, "eager", timed, clock, None)
    assert remarks == {"packed": "sustained 1.200 (two turns of each: 1.200 and 1.200), at equal clock 1.000"}
    assert len(clock.inner) == 2 * 4 + 4
    assert sustained_remarks({"packed": packed}, "eager", timed, clock, None) == {}
