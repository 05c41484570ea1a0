"""Rounds on a fake clock: order, lead-in, number of calls, budget, precision, what a drift does."""

import gc
import itertools
import random
from collections import Counter
from dataclasses import replace
from math import log, pi, sqrt

import numpy as np
import pytest

from ffncli.bench.judge import statistics
from ffncli.bench.judge.ratios import paired, verdict
from ffncli.bench.records import ANCHOR, GEMM, TWIN, Method, TimedBlock
from ffncli.bench.timing import rounds
from ffncli.bench.timing.rounds import Arm, Measured, Plan
from tests.bench.fake_clock import FakeClock, FakeCounters, Work, placing

PLAN = Plan("eager", ("eager", "fast"), block=5e-3, placements=3, rounds=4, target=0.02, budget=4.0, seed=0)
TIMES = {"eager": 2e-4, TWIN: 2e-4, "fast": 1e-4, ANCHOR: 1e-3}


def measured(clock: FakeClock, times: dict[str, float] = TIMES, plan: Plan = PLAN, **placed: float) -> Measured:
    return rounds.measure(0, "case", placing(clock, times, **placed), clock, FakeCounters(), plan)  # type: ignore[arg-type]


@pytest.mark.parametrize("n", range(1, 9))
def test_orders_are_balanced(n: int) -> None:
    names = [str(i) for i in range(n)]
    drawn = rounds.orders(names, random.Random(n))
    size = n if n % 2 == 0 else 2 * n
    for _ in range(3):  # square after square
        square = list(itertools.islice(drawn, size))
        assert all(sorted(row) == names for row in square)
        places = Counter((name, place) for row in square for place, name in enumerate(row))
        assert set(places.values()) == {size // n}
        followers = Counter(pair for row in square for pair in itertools.pairwise(row))
        if n > 1:
            assert len(followers) == n * (n - 1)
            assert len(set(followers.values())) == 1


def test_no_arm_stands_twice_in_one_place_over_few_rounds() -> None:
    for seed in range(50):
        rows = list(itertools.islice(rounds.orders("abcdef", random.Random(seed)), 4))
        assert all(len(set(place)) == 4 for place in zip(*rows, strict=True))


def test_orders_are_drawn_afresh() -> None:
    seen = {next(rounds.orders("abcdef", random.Random(seed))) for seed in range(200)}
    assert len(seen) > 120
    assert {row[0] for row in seen} == set("abcdef")


def test_all_blocks_last_equally_long() -> None:
    """So that a disturbance hits each arm equally often, whatever its calls take."""
    found = measured(FakeClock(), {**TIMES, GEMM: 1e-6, "slow": 1.1e-3})
    assert {b.kernel: b.inner for b in found.blocks} == {
        "eager": 25, TWIN: 25, "fast": 50, ANCHOR: 5, GEMM: 5000, "slow": 5,
    }  # fmt: skip
    assert all(4e-3 < b.seconds < 6e-3 for b in found.blocks)
    nothing = measured(FakeClock(), {"eager": 1e-4, "fast": 0.0})
    assert max(b.inner for b in nothing.blocks) <= 2**30


def test_kernels_that_take_nearly_equally_long_make_as_many_calls() -> None:
    """Calls become faster within a block, so a kernel that made fewer of them would look slower."""
    found = measured(FakeClock(), {"eager": 2e-4, "fast": 2.3e-4, TWIN: 1.8e-4, "other": 2.5e-4})
    assert {b.kernel: b.inner for b in found.blocks} == {"eager": 25, "fast": 25, TWIN: 25, "other": 20}


def test_a_block_on_one_thread_keeps_the_lower_quartile_of_its_calls() -> None:
    clock = FakeClock(thread_seconds=4e-3, quartile_seconds=1.9e-4)
    assert {b.figure("quartile") for b in measured(clock, plan=replace(PLAN, threads=1)).blocks} == {1.9e-4}
    assert {b.figure("quartile") for b in measured(clock, plan=replace(PLAN, threads=2)).blocks} == {None}


def test_a_round_holds_every_arm_once_in_a_balanced_order() -> None:
    four = {"eager": 2e-4, TWIN: 2e-4, "fast": 1.99e-4, "other": 1e-3}
    found = measured(FakeClock(), four, replace(PLAN, budget=9.0))
    by_round = Counter((b.placement, b.round) for b in found.blocks)
    assert set(by_round.values()) == {4}
    assert len(by_round) == 24  # of each placement twice the least number, since the budget allows it
    places = Counter((b.placement, b.kernel, b.position) for b in found.blocks)
    assert set(places.values()) == {2}  # 8 rounds, 4 arms: every arm in every place of every placement
    assert [b.position for b in found.blocks] == [0, 1, 2, 3] * 24


def test_arms_that_only_describe_are_in_fewer_rounds() -> None:
    found = measured(FakeClock(), {**TIMES, GEMM: 1e-4})
    of = {name: {b.round for b in found.blocks if b.kernel == name} for name in (*TIMES, GEMM)}
    assert of["eager"] == of[TWIN] == of["fast"] == set(range(8))
    assert of[ANCHOR] == set(range(0, 8, 2))
    assert of[GEMM] == {0, 4}
    assert all(sorted(b.position for b in same) == list(range(len(same))) for same in rounds_of(found))


def test_a_slow_arm_takes_part_in_fewer_rounds() -> None:
    times = {**TIMES, "slow": 0.05, "slowish": 4e-3}
    found = measured(FakeClock(), times)
    of = {name: {b.round for b in found.blocks if b.kernel == name} for name in times}
    assert of["eager"] == of["fast"] == of["slowish"] == set(range(8))
    count = Counter(b.kernel for b in found.blocks)
    assert count["slow"] * 7 <= count["eager"] + 7
    assert len(of["slow"]) == count["slow"] >= 2  # not always in the same round of a placement
    spent = {name: sum(b.seconds for b in found.blocks if b.kernel == name) for name in times}
    assert spent["slow"] < 0.5 * sum(spent.values())


def test_a_slow_arm_is_not_called_to_estimate_its_time() -> None:
    """Its first call is its estimate; one that was much too high is lowered by the blocks."""

    def with_slow(clock: FakeClock, seconds: float, first: float):
        return lambda placement: [Arm("eager", Work(2e-4)), Arm("slow", Work(seconds), slow_s=first)]

    clock = FakeClock()
    plan = replace(PLAN, kernels=("eager", "slow"), placements=1)
    found = rounds.measure(0, "case", with_slow(clock, 0.7, 0.8), clock, FakeCounters(), plan)
    slow = [b for b in found.blocks if b.kernel == "slow"]
    assert {b.inner for b in slow} == {1}
    assert sum(inner for work, inner in clock.asked if work.seconds == 0.7) == len(slow)  # neither lead-in nor estimate
    clock = FakeClock()
    found = rounds.measure(0, "case", with_slow(clock, 2e-4, 0.8), clock, FakeCounters(), plan)
    inner = [b.inner for b in found.blocks if b.kernel == "slow"]
    assert inner[0] == 1
    assert inner[-1] == 25


def test_a_certain_ratio_is_not_made_more_precise() -> None:
    """An arm of three times the time is certain after the first placement, one of 1.03 times never is."""
    times = {"eager": 2e-4, "near": 2.06e-4, "far": 6e-4}
    plan = replace(PLAN, kernels=("eager", "near", "far"), target=1e-6)
    found = measured(FakeClock(jitter=0.01), times, plan)
    count = Counter((b.kernel, b.placement) for b in found.blocks)
    assert count["near", 0] == count["far", 0] == 8
    assert count["near", 2] == 8
    assert count["far", 2] == 2
    alone = measured(FakeClock(jitter=0.01), {"eager": 2e-4, "far": 6e-4}, replace(plan, kernels=("eager", "far")))
    assert alone.reached
    assert {b.placement for b in alone.blocks} == {0, 1, 2}
    assert not measured(FakeClock(jitter=0.01), {"eager": 2e-4, "near": 2.06e-4}, plan).reached


def test_blocks_are_shorter_on_a_busy_machine() -> None:
    clock = FakeClock(jitter=0.01)
    busy = FakeCounters([("preempted",) if n % 5 == 0 else () for n in range(10_000)])
    found = rounds.measure(
        0, "c", placing(clock, TIMES), clock, busy, replace(PLAN, kernels=("eager", TWIN), target=0.0)
    )
    inner = {b.placement: b.inner for b in found.blocks if b.kernel == "eager"}
    assert [inner[n] for n in range(6)] == [25, 13, 6, 3, 3, 3]  # 0.5 ms at least
    times = {"eager": 2e-4, "twice": 1.9e-3}
    busy = FakeCounters([("preempted",)] * 10_000)
    plan = replace(PLAN, kernels=("eager", "twice"), target=0.0)
    found = rounds.measure(0, "c", placing(clock, times), clock, busy, plan)
    last = {b.kernel: b.inner for b in found.blocks}
    assert last in ({"eager": 10, "twice": 1}, {"eager": 9, "twice": 1})  # still equally long

    class Waiting(FakeCounters):
        def read(self):  # type: ignore[no-untyped-def]
            return replace(super().read(), waited=0.3 * clock.now())

    clock = FakeClock(jitter=0.01)
    found = rounds.measure(0, "c", placing(clock, TIMES), clock, Waiting(), PLAN)
    assert {b.inner for b in found.blocks if b.kernel == "eager"} == {6}
    assert {b.inner for b in measured(FakeClock(jitter=0.01)).blocks if b.kernel == "eager"} == {25}


def rounds_of(found: Measured) -> list[list[TimedBlock]]:
    """The blocks of each round."""
    by: dict[tuple[int, int], list[TimedBlock]] = {}
    for block in found.blocks:
        by.setdefault((block.placement, block.round), []).append(block)
    return list(by.values())


def test_another_seed_or_process_is_another_order() -> None:
    def order(process: int, seed: int) -> list[str]:
        clock = FakeClock()
        plan = replace(PLAN, seed=seed)
        found = rounds.measure(process, "case", placing(clock, TIMES), clock, FakeCounters(), plan)
        return [b.kernel for b in found.blocks]

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    assert order(0, 1) != order(1, 0)


def test_lead_in_of_quick_and_of_long_calls() -> None:
    clock = FakeClock()
    work = {"eager": Work(2e-3), "fast": Work(0.03)}
    rounds.measure(0, "c", lambda _: [Arm(n, w) for n, w in work.items()], clock, FakeCounters(), PLAN)
    after = clock.asked[::-1]
    inner = {"eager": 5, "fast": 3}
    blocks = [w for w, n in clock.asked if n > 1 and w is work["eager"]]
    assert blocks
    for name, calls in (("eager", 1), ("fast", 1)):
        asked = list(itertools.takewhile(lambda a: a[0] is work[name], (a for a in after if a[0] is work[name])))  # noqa: B023
        assert asked[0][1] == inner[name]
        assert [n for _, n in asked[1 : 1 + calls]] == [1] * calls, name


def test_lead_in_goes_on_until_calls_agree_and_has_an_end() -> None:
    def lead_in(slow: int, jitter: float = 0.0, seconds: float = 1e-5) -> int:
        clock = FakeClock(jitter=jitter)
        measurement = rounds._Measurement(0, "c", clock, FakeCounters(), PLAN)
        arm = Arm("eager", Work(seconds, slow=slow))
        measurement.wall["eager"] = seconds
        measurement._lead_in(arm)
        return len(clock.asked)

    assert lead_in(0) == lead_in(2) == 4
    assert lead_in(3) == 5  # the fourth is the first at full speed, the fifth agrees with it
    assert lead_in(7) == 4  # equally slow calls agree
    assert max(lead_in(0, jitter=2.0) for _ in range(3)) <= 12
    assert lead_in(0, seconds=1e-4) == 2  # longer calls need fewer
    assert lead_in(1, seconds=1e-4) == 3
    assert lead_in(3, seconds=0.0009) == 2  # bounded in time, too
    assert lead_in(0, seconds=0.0012) == 1  # the first call fills the caches


def test_precise_enough_ends_at_the_least() -> None:
    found = measured(FakeClock(jitter=0.001))
    assert found.reached
    assert {b.placement for b in found.blocks} == {0, 1, 2}


def test_imprecise_goes_on_until_the_budget() -> None:
    clock = FakeClock(jitter=0.5)
    found = measured(clock)
    assert not found.reached
    assert clock.now() <= PLAN.budget
    assert clock.now() > 0.8 * PLAN.budget


def test_the_budget_is_kept_even_by_long_calls() -> None:
    """Every arm is timed at least once, even if that takes longer than the budget."""
    clock = FakeClock(jitter=0.5)
    found = measured(clock, {"eager": 3.0, "fast": 2.0})
    assert Counter(b.kernel for b in found.blocks) == {"eager": 1, "fast": 1}
    clock = FakeClock(jitter=0.1)
    found = measured(clock, {"eager": 0.2, "fast": 0.1})
    assert clock.now() < 1.2 * PLAN.budget
    assert Counter(b.placement for b in found.blocks if b.kernel == "fast").total() >= 3
    clock = FakeClock(jitter=0.5)
    alone = measured(clock, {"eager": 3.0, "fast": 2.0}, replace(PLAN, processes=1))
    assert {b.placement for b in alone.blocks} == {0, 1, 2}  # its interval is over placements


def test_target_is_met_by_what_is_reached() -> None:
    """A process that says it has reached its target is as precise as that: over many, not by its own account."""
    plan = rounds.plan_of(Method(precision=0.01, max_time=600), "eager", ("eager", "fast"))
    means = []
    for seed in range(60):
        clock = FakeClock(jitter=0.03, seed=seed)
        found = measured(clock, {"eager": 2e-4, "fast": 1.98e-4}, plan)
        assert found.reached
        of = paired(found.blocks, "fast", "eager")
        means.append(of.interval.value - log(0.99))
    over_five = statistics.t_quantile(0.975, 4) * statistics.deviation(means) / sqrt(5)
    assert 0.003 < over_five < 0.0125


def test_costly_placing_gets_more_rounds() -> None:
    found = measured(FakeClock(jitter=0.001), cost=0.5)
    assert found.spent["placing"] == pytest.approx(1.5)
    per_placement = Counter(b.placement for b in found.blocks if b.kernel == "eager")
    assert min(per_placement.values()) > 4
    clock = FakeClock(jitter=0.001)
    measured(clock, cost=1.0, plan=replace(PLAN, placements=3, budget=4.0))
    assert clock.now() <= 4.5  # a quarter of the time placing, but within the budget
    free = replace(PLAN, budget=1000.0)
    found = measured(FakeClock(jitter=0.001), plan=free, cost=0.5)
    assert found.spent["placing"] <= 0.15 * sum(found.spent.values()) + 1e-9


def test_spent_is_all_of_the_time() -> None:
    clock = FakeClock(jitter=0.01)
    found = measured(clock, cost=0.01)
    assert sum(found.spent.values()) == pytest.approx(clock.now())
    assert found.spent["blocks"] == pytest.approx(sum(b.seconds for b in found.blocks))
    assert found.spent["blocks"] + found.spent["lead_in"] > 0.8 * clock.now() - found.spent["warm_up"]
    assert found.spent["rest"] == pytest.approx(0, abs=1e-9)


def test_what_runs_ahead_of_calls_bounds_them() -> None:
    """A flush of 20 ms before calls of 10 µs: not 500 of them a block."""
    clock = FakeClock()
    flush = Work(0.02)
    found = rounds.measure(
        0, "c", lambda _: [Arm(n, Work(1e-5), before=flush) for n in ("eager", "fast")], clock, FakeCounters(), PLAN
    )
    assert {b.inner for b in found.blocks} == {4}
    assert [b.seconds for b in found.blocks] == pytest.approx([4e-5] * len(found.blocks))


def test_no_garbage_is_collected_in_blocks_and_collecting_is_restored() -> None:
    states = []

    class Watching(FakeCounters):
        def read(self):  # type: ignore[no-untyped-def]
            states.append(gc.isenabled())
            return super().read()

    clock = FakeClock()
    assert gc.isenabled()
    rounds.measure(0, "c", placing(clock, TIMES), clock, Watching(), PLAN)
    assert states
    assert not any(states[2:])  # the first two are around the search for the number of calls
    assert gc.isenabled()
    gc.disable()
    try:
        rounds.measure(0, "c", placing(clock, TIMES), clock, FakeCounters(), PLAN)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_an_error_of_a_kernel_comes_out_and_collecting_is_restored() -> None:
    def raises() -> None:
        raise RuntimeError("mine")

    class Calling(FakeClock):
        def time(self, call, inner, before=None):  # type: ignore[no-untyped-def]
            call()
            return super().time(Work(1e-3), inner)

    with pytest.raises(RuntimeError, match="mine"):
        rounds.measure(0, "c", lambda _: [Arm("eager", raises)], Calling(), FakeCounters(), PLAN)
    assert gc.isenabled()


def test_flags_are_kept_and_a_placement_is_gone_before_the_next() -> None:
    import weakref

    clock, alive = FakeClock(), []

    def place(placement: int) -> list[Arm]:
        assert not any(ref() for ref in alive)
        arms = [Arm(n, Work(s)) for n, s in TIMES.items()]
        alive.extend(weakref.ref(arm.call.__self__ if hasattr(arm.call, "__self__") else arm.call) for arm in arms)
        clock.asked.clear()
        return arms

    class Forgetting(FakeClock):
        def time(self, call, inner, before=None):  # type: ignore[no-untyped-def]
            seconds = super().time(call, inner, before)
            self.asked.clear()
            return seconds

    clock = Forgetting()
    found = rounds.measure(0, "c", place, clock, FakeCounters([("preempted", "faults=3")]), PLAN)
    assert found.blocks[0].flags == ("preempted", "faults=3")
    assert found.blocks[1].flags == ()


def test_a_kernel_that_is_no_arm_holds_up_nothing() -> None:
    found = measured(FakeClock(), plan=replace(PLAN, kernels=("eager", "fast", "absent")))
    assert found.reached


def test_drift_of_20_percent_leaves_two_of_one_the_same() -> None:
    clock = FakeClock(jitter=0.004, drift=lambda now: 1 + 0.2 * now / 3)
    found = measured(clock, plan=replace(PLAN, target=0.0, budget=3.0))
    ratio = paired(found.blocks, TWIN, "eager")
    assert verdict(ratio.interval, 0.02) == "same"
    assert abs(ratio.interval.value) < 0.005


def test_plan_of_a_method() -> None:
    plan = rounds.plan_of(Method(), "eager", ["eager"], "cpu", 2)
    assert (plan.block, plan.budget, plan.threads, plan.processes) == (4e-3, 4.0, 2, 5)
    assert plan.target == pytest.approx(log(1.01) * sqrt(5) * 0.6)  # the rest is for differences between processes
    cuda = rounds.plan_of(Method(block=None), "eager", ["eager"], "cuda:0", 2)
    assert (cuda.block, cuda.threads) == (1e-3, 0)


def test_half_width_by_hand() -> None:
    placements = [[0.0, 0.0], [0.3, 0.3], [0.6, 0.6]]
    t4, t2 = 2.7764451051977987, 4.302652729911275
    assert rounds.half_width(placements, 5) == pytest.approx(t4 * 0.3 / sqrt(3))
    assert rounds.half_width(placements, 1) == pytest.approx(t2 * 0.3 / sqrt(3))
    agree = [[-0.1, 0.1], [-0.1, 0.1], [-0.1, 0.1]]  # medians agree by chance: rounds do not
    assert rounds.half_width(agree, 5) == pytest.approx(t4 * sqrt(pi / 2) * 1.4826 * 0.1 / sqrt(3), rel=1e-4)
    assert rounds.half_width([[0.1]], 5) == float("inf")


def test_one_block_that_was_long_does_not_make_a_process_go_on() -> None:
    draw = np.random.default_rng(2)
    placements = [list(row) for row in draw.normal(0, 0.005, size=(3, 8))]
    quiet = rounds.half_width(placements, 5)
    placements[1][3] = 4.6  # a hundred times as long
    assert rounds.half_width(placements, 5) < 1.5 * quiet
    assert rounds.half_width([[v * 10 for v in row] for row in placements], 5) > 5 * quiet


@pytest.mark.parametrize("what", ["record", "clock"])
def test_what_was_changed_while_it_was_measured_is_found(monkeypatch, what: str) -> None:
    made, counters = [], FakeCounters()
    start = rounds._Measurement.__init__
    monkeypatch.setattr(rounds._Measurement, "__init__", lambda self, *more: (made.append(self), start(self, *more))[1])
    clock = FakeClock()
    place, placements = placing(clock, TIMES), []

    def changing(number: int):
        placements.append(number)
        if number == 1 and what == "clock":
            made[0].clock = replace(clock)
        if number == 1 and what == "record":
            block = next(block for block in made[0].blocks if block.kernel == "fast")
            object.__setattr__(block, "seconds", block.seconds * 0.99)
        return place(number)

    words = {"record": "the records of fast's blocks were rewritten", "clock": "the clock of the measurement"}
    with pytest.raises(rounds.ChangedRecords, match=words[what]):
        rounds.measure(0, "c", changing, clock, counters, PLAN)
    assert placements[1] == 1
