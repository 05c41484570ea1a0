"""The race of `auto` on a simulated clock: who wins, in how much time, and what is not tried."""

import random
import re
from dataclasses import replace
from functools import partial

import pytest
import torch

from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.fresh_inputs import source_of
from ffncli.bench.timing.modes.auto import calibrate
from ffncli.bench.timing.reporter import REPORTER
from ffncli.block.recipe import FFNSpec, steps
from ffncli.errors import FFNError
from ffncli.kernels.kernel import Kernel, kernel_steps
from ffncli.run.engine.weights import random_weights
from tests.bench.fake_clock import FakeCounters

SPEC = FFNSpec(4, 8, "swiglu")
BLOCK = kernel_steps(steps(SPEC))
WEIGHTS = random_weights(BLOCK, torch.Generator().manual_seed(0))
CASE = Case("4x8:swiglu", "4x8:swiglu", SPEC, 3)


class Time:
    """A clock whose time passes in kernels alone; `first` calls of each take longer, every call is `noise` off."""

    def __init__(self, noise: float = 0.0, first: float = 1.0) -> None:
        self.at = 0.0
        self.calls: dict[str, int] = {}
        self.noise, self.first, self.draw = noise, first, random.Random(1)

    def kernel(self, name: str, seconds: float, **settings: object) -> Kernel:
        def build(steps, device, dtype):
            def run(x, params):
                self.calls[name] = self.calls.get(name, 0) + 1
                share = self.first if self.calls[name] == 1 else 1.0
                self.at += seconds * share * (1 + self.noise * self.draw.uniform(-1, 1))
                return x * 1.0

            return run

        return Kernel(name, build, **settings)

    def time(self, call, inner, before=None) -> float:
        start = self.at
        for _ in range(inner):
            if before:
                before()
            call()
        return self.at - start

    def now(self) -> float:
        return self.at

    def finish(self) -> None:
        pass


@pytest.fixture(autouse=True)
def quiet_counters(monkeypatch):
    """Time passes in the fake clock alone, so this machine's other work must not count."""
    monkeypatch.setattr("ffncli.bench.timing.modes.auto.SystemCounters", lambda threads: FakeCounters())


def race(clock: Time, kernels: list[Kernel], case: Case = CASE, **settings):
    return calibrate(case, BLOCK, [WEIGHTS], torch.randn(3, 4), kernels, clock, **settings)


@pytest.mark.parametrize("scale", [1e-5, 1e-3, 0.03, 0.4])
def test_the_fastest_wins_by_its_interval(scale):
    clock = Time(noise=0.03, first=4.0 if scale < 0.1 else 1.5)
    seconds = {"eager": 1.0, "a": 0.90, "b": 0.84, "c": 1.02, "d": 3.0}
    choice = race(clock, [clock.kernel(name, share * scale) for name, share in seconds.items()])
    assert choice.kernel == "b"
    ratio, *ends = map(float, re.findall(r"0\.\d{3}", choice.note))
    assert ratio == pytest.approx(0.84, rel=0.03 if scale < 0.1 else 0.06)
    assert not ends or ends[0] - 0.001 <= 0.84 <= ends[1] + 0.001
    assert bool(ends) == (scale < 0.1)  # of one call each there is no interval
    assert float(choice.note.split("timed for ")[1].split()[0]) <= 5.0
    assert clock.calls["d"] < clock.calls["b"]


def test_eager_unless_another_is_certainly_faster():
    clock = Time(noise=0.05)
    choice = race(clock, [clock.kernel("eager", 1e-3), clock.kernel("a", 0.9999e-3), clock.kernel("b", 1.0001e-3)])
    assert choice.kernel == "eager"
    assert race(clock, [clock.kernel("eager", 1e-3), clock.kernel("a", 2e-3)]).note == (
        "eager, the fastest of 2 kernels, timed for 0.3 s"
    )


def test_a_kernel_that_often_waits_costs_the_time_that_it_waits():
    """Its median is 3 % less than another's, but after every third call of another kernel it waits for a quarter."""
    clock = Time(noise=0.01)
    waiting, last, turn = clock.kernel("waiting", 0.0), -1.0, 0

    def build(steps, device, dtype):
        compute = waiting.build(steps, device, dtype)

        def run(x, params):
            nonlocal last, turn
            turn += clock.at != last  # another kernel was called
            clock.at += 6.9e-3 * (1.25 if turn % 3 == 0 else 1.0)
            last = clock.at
            return compute(x, params)

        return run

    kernels = [clock.kernel("eager", 0.05), Kernel("waiting", build), clock.kernel("steady", 7.1e-3)]
    assert race(clock, kernels).kernel == "steady"


def test_a_kernel_that_waits_after_every_write_of_its_input_costs_the_time_that_it_waits():
    """Its first call after an operation of torch waits for torch's threads; its next calls would not."""
    clock, written = Time(noise=0.01), [False]
    waiting = clock.kernel("waiting", 0.0)

    def build(steps, device, dtype):
        compute = waiting.build(steps, device, dtype)

        def run(x, params):
            clock.at += 12e-3 if written[0] else 6.9e-3
            written[0] = False
            return compute(x, params)

        return run

    kernels = [clock.kernel("eager", 0.05), Kernel("waiting", build), clock.kernel("steady", 8e-3)]
    assert race(clock, kernels).kernel == "waiting"
    assert race(clock, kernels, write=lambda: written.__setitem__(0, True)).kernel == "steady"


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_every_call_of_a_race_has_another_input(passes):
    seen: list[torch.Tensor] = []

    class Counting(Time):
        def time(self, call, inner, before=None):
            return super().time(call, inner, before) + 0.4 * inner

    def build(steps, device, dtype):
        def run(x, params):
            seen.append(x.detach().clone())
            return x @ params[0].T @ params[1] * 1.0

        return run

    case = replace(CASE, passes=passes)
    problem = Problem.of(case, 0)
    x = problem.other(1)
    write = partial(source_of(problem).write, x)
    kernels = [Kernel("eager", build), Kernel("a", build)]
    calibrate(case, BLOCK, [WEIGHTS], x, kernels, Counting(), write)
    assert len(seen) == len({tuple(one.flatten().tolist()) for one in seen}) > 4


@pytest.mark.parametrize("seed", range(20))
def test_a_host_that_takes_the_processor_away_does_not_decide(seed):
    """For a quarter of the time calls take five times as long, in stretches of some milliseconds; and eager, which is
    half as fast again, has dropped out before its interval is narrow."""
    clock = Time(noise=0.05)
    draw, spent = random.Random(seed), [0.0, 0.0]

    def stolen(seconds: float) -> float:
        if clock.at >= spent[1]:
            spent[:] = [clock.at + draw.expovariate(1 / 0.03), 0.0]
            spent[1] = spent[0] + draw.expovariate(1 / 0.01)
        return seconds * (5.0 if clock.at >= spent[0] else 1.0)

    def kernel(name: str, seconds: float) -> Kernel:
        inner = clock.kernel(name, 0.0)

        def build(steps, device, dtype):
            compute = inner.build(steps, device, dtype)

            def run(x, params):
                clock.at += stolen(seconds * clock.draw.uniform(0.95, 1.05))
                return compute(x, params)

            return run

        return Kernel(name, build)

    seconds = {"eager": 1.5e-4, "a": 1.02e-4, "b": 1e-4, "c": 1.3e-4, "d": 0.9e-4}
    choice = race(clock, [kernel(name, share) for name, share in seconds.items()])
    assert choice.kernel == "d"


def test_a_candidate_stays_whose_best_round_is_good():
    """Threads compete for the cores at first, for 4 ms in most blocks; later, this kernel is the fastest."""
    clock = Time()
    fast = clock.kernel("fast", 0.0)

    def build(steps, device, dtype):
        compute = fast.build(steps, device, dtype)

        def run(x, params):
            calls = clock.calls.get("fast", 0)
            clock.at += 0.7e-3 + 4e-3 * (10 < calls < 80 and calls // 9 % 3 > 0)
            return compute(x, params)

        return run

    assert race(clock, [clock.kernel("eager", 1e-3), clock.kernel("a", 0.8e-3), Kernel("fast", build)]).kernel == "fast"


def test_one_that_drops_out_at_once_is_compared_by_its_first_calls():
    """A host that was busy in the first rounds made the winner 34 times as slow as eager, whose calls were before."""
    clock = Time()

    def kernel(name: str, seconds: float) -> Kernel:
        inner = clock.kernel(name, seconds)

        def build(steps, device, dtype):
            compute = inner.build(steps, device, dtype)

            def run(x, params):
                clock.at += 50 * seconds * (7 <= clock.calls.get(name, 0) < 100)
                return compute(x, params)

            return run

        return Kernel(name, build)

    choice = race(clock, [clock.kernel("eager", 2e-2), kernel("a", 1e-3), kernel("b", 1.02e-3)])
    assert re.fullmatch(r"a, the fastest of 3 kernels \(0\.050 of eager's time\), timed for \d\.\d s", choice.note)


def test_five_seconds_of_timing_and_two_candidates_in_any_case():
    for scale, tried in ((1.0, 3), (2.0, 2), (30.0, 2)):
        clock = Time()
        kernels = [clock.kernel("eager", scale), *(clock.kernel(f"k{n}", 0.9 * scale) for n in range(6))]
        choice = race(clock, kernels)
        assert len(clock.calls) == tried
        assert choice.kernel == "k0"
        assert clock.at <= max(5.0, 2 * scale)


def test_calls_of_70_ms_are_timed_in_rounds():
    """Of first calls alone, in which every candidate is 8 % off, the fastest of seven would often lose."""
    for seed in range(10):
        clock = Time(noise=0.08)
        clock.draw.seed(seed)
        kernels = [clock.kernel("eager", 0.07), *(clock.kernel(f"k{n}", 0.069) for n in range(5))]
        assert race(clock, [*kernels, clock.kernel("fast", 0.062)]).kernel == "fast"
        assert clock.calls["fast"] >= 8


def test_one_call_must_be_faster_by_three_per_cent():
    for share, winner in ((0.98, "eager"), (0.96, "a")):
        clock = Time()
        assert race(clock, [clock.kernel("eager", 2.0), clock.kernel("a", 2.0 * share)]).kernel == winner


def test_a_kernel_that_raises_is_left_out_and_compiling_is_no_timing(monkeypatch):
    clock, heard = Time(first=1e6), []

    def broken(steps, device, dtype):
        def run(x, params):
            raise RuntimeError("no")

        return run

    kernels = [
        clock.kernel("eager", 1e-3, compiles=True), Kernel("broken", broken), clock.kernel("a", 5e-4, compiles=True),
    ]  # fmt: skip
    monkeypatch.setattr(REPORTER, "_send", heard.append)
    REPORTER.stage("compiling", "auto")
    choice = race(clock, kernels)
    assert (choice.kernel, heard) == ("a", [("stage", "compiling", "auto")] * 4)  # at first, then one for each kernel
    assert "timed for" in choice.note
    assert float(choice.note.split("timed for ")[1].split()[0]) <= 5.0
    with pytest.raises(FFNError, match="no kernel of the package computes this block here"):
        race(clock, [Kernel("broken", broken)])


def test_the_caches_are_emptied_before_every_call():
    clock, emptied = Time(), []
    race(clock, [clock.kernel("eager", 0.2), clock.kernel("a", 0.1)], flush=lambda: emptied.append(1))
    assert len(emptied) == sum(clock.calls.values())


def test_copies_are_taken_in_turn_and_gradients_asked_for():
    taken: list[float] = []

    def build(steps, device, dtype):
        def run(x, params):
            taken.append(float(params[0].detach().flatten()[0]))
            return x @ params[0].T @ params[1] * 1.0

        return run

    case = Case("4x8:swiglu", "4x8:swiglu", SPEC, 3, passes="forward+backward")
    copies = [{name: torch.full_like(t, float(n)) for name, t in WEIGHTS.items()} for n in (1, 2, 3)]

    class Counting(Time):
        def time(self, call, inner, before=None):
            for _ in range(inner):
                gradients = call()
                assert len(gradients) == 1 + len(WEIGHTS)
                assert gradients[1].shape == (8, 4)
            self.at += 0.4 * inner
            return 0.4

    calibrate(case, BLOCK, copies, torch.randn(3, 4), [Kernel("eager", build)], Counting())
    assert taken[:1] == [1.0]
    calibrate(case, BLOCK, copies, torch.randn(3, 4), [Kernel("eager", build), Kernel("a", build)], Counting())
    assert set(taken) == {1.0, 2.0, 3.0}


def test_a_race_with_much_between_its_calls_ends():
    """Emptying the caches takes long and is not timed: one call in a block, and half a minute in all."""
    clock = Time()

    def empties() -> None:
        clock.at += 1.0

    kernels = [clock.kernel("eager", 1e-3), clock.kernel("a", 0.9e-3), clock.kernel("b", 0.95e-3)]
    clock.time = lambda call, inner, before=None: _timed(clock, call, inner, before)
    choice = race(clock, kernels, flush=empties)
    assert choice.kernel in ("a", "eager")
    assert clock.at < 40


def _timed(clock: Time, call, inner, before) -> float:
    seconds = 0.0
    for _ in range(inner):
        before()
        start = clock.at
        call()
        seconds += clock.at - start
    return seconds


def test_whatever_a_library_raises_costs_one_contender():
    class Odd(Exception):
        pass

    def broken(steps, device, dtype):
        raise Odd("no")

    clock = Time()
    kernels = [clock.kernel("eager", 1e-3), Kernel("odd", broken, compiles=True), clock.kernel("a", 5e-4)]
    assert race(clock, kernels).kernel == "a"
