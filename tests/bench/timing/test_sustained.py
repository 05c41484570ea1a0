"""Turns of 300 ms on a simulated GPU whose clock sinks under load."""

from math import exp

import pytest

from ffncli.bench.machine.nvml import probe_of
from ffncli.bench.timing.rounds import Arm
from ffncli.bench.timing.sustained import Sustained, SustainedSide, note, sustained
from tests.bench.fake_nvml import FakeNvml


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


def test_four_turns_a_b_b_a_of_at_least_300_ms():
    clock = Sinking()
    found = sustained(*arms(), clock)
    assert [name for name, _ in clock.turns[-4:]] == ["packed", "eager", "eager", "packed"]
    assert all(0.3 <= taken < 0.4 for _, taken in clock.turns[-4:])
    assert found.ratio == pytest.approx(1.1)
    assert found.kernel == SustainedSide("packed", pytest.approx(1.1e-3))


def test_a_replay_of_many_calls_counts_as_many():
    def replay():
        return "packed", 40 * 1.1e-3

    found = sustained(Arm("packed", replay, calls=40), arms()[1], Sinking())
    assert found.ratio == pytest.approx(1.1)


def test_a_clock_that_sinks_evenly_cancels():
    clock = Sinking(rate=0.1)
    assert sustained(*arms(), clock).ratio == pytest.approx(1.1, rel=1e-9)
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
    assert (found.kernel.clock_mhz, found.kernel.power_w) == (1200, 640)
    assert (found.baseline.clock_mhz, found.baseline.power_w) == (1400, 500)
    assert note(found, 1.0) == "sustained 1.100 (packed 1200 MHz 640 W, eager 1400 MHz 500 W), at equal clock 1.000"


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
    found = Sustained(SustainedSide("packed", 1e-3), SustainedSide("eager", 1e-3))
    assert bool(note(found, equal)) is said
    if said:
        assert note(found, equal) == f"sustained 1.000, at equal clock {equal:.3f}"
