"""One rank of a case: a clock that all ranks read alike, and what each does together with the others."""

import math

import pytest

from ffncli.bench.machine import machine
from ffncli.bench.records import Case, Job, Method
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing import rounds
from ffncli.bench.timing.placed_kernel import touched
from ffncli.bench.timing.placement import caching
from ffncli.bench.timing.ranks.case_run import RankInStep
from ffncli.bench.timing.ranks.channel import RankClock
from ffncli.block.recipe import FFNSpec
from ffncli.block.shard import Ranks
from tests.bench.fake_clock import FakeClock, FakeCounters, placing
from tests.bench.fake_ranks import on_ranks
from tests.bench.units import CASE, QUICK, TIMES

TWO = Ranks(2)


class Scripted:
    """A clock whose calls take the seconds of a list."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds = iter(seconds)

    def time(self, call, inner, before=None) -> float:
        return sum(next(self.seconds) for _ in range(inner))

    def now(self) -> float:
        return 0.0

    def finish(self) -> None:
        pass


def test_every_call_lasts_as_long_as_on_its_slowest_rank():
    taken = [[1.0, 5.0, 2.0], [4.0, 1.0, 3.0]]

    def timed(channel):
        clock = RankClock(Scripted(taken[channel.rank]), channel)
        return clock.time(lambda: None, 3, before=lambda: None)

    assert on_ranks(TWO, timed) == [4.0 + 5.0 + 3.0] * 2


@pytest.mark.parametrize(("each_call", "before"), [(True, None), (False, lambda: None)])
def test_a_block_of_calls_that_are_timed_together_is_that_of_the_slowest_rank(each_call, before):
    taken = [[1.0, 5.0, 2.0], [4.0, 1.0, 3.0]]

    def timed(channel):
        return RankClock(Scripted(taken[channel.rank]), channel, each_call).time(lambda: None, 3, before)

    assert on_ranks(TWO, timed) == [8.0, 8.0]


def test_what_is_done_before_a_call_is_over_on_all_ranks_when_it_begins():
    ready = []

    def timed(channel):
        seen = []
        clock = RankClock(Scripted([1.0, 1.0]), channel)
        own = clock.clock.time
        clock.clock.time = lambda call, inner, before=None: seen.append(len(ready)) or own(call, inner)
        clock.time(lambda: None, 2, before=lambda: ready.append(channel.rank))
        return seen

    for seen in on_ranks(TWO, timed):
        assert seen[0] >= 2
        assert seen[1] >= 4


def test_ranks_whose_own_clocks_differ_time_the_same_blocks():
    def measured(channel):
        own = FakeClock(jitter=0.05, seed=channel.rank, time_now=1000.0 * channel.rank)
        plan = rounds.plan_of(QUICK, "eager", ["eager", "packed"])
        times = {name: seconds * (1 + channel.rank) for name, seconds in TIMES.items()}
        clock = RankClock(own, channel)
        return rounds.measure(0, CASE.key, placing(own, times), clock, FakeCounters(), plan)

    first, second = on_ranks(TWO, measured)
    assert first.blocks == second.blocks
    assert (first.reached, first.spent) == (second.reached, second.spent)
    eager = [block.per_call for block in first.blocks if block.kernel == "eager"]
    assert sum(eager) / len(eager) == pytest.approx(2e-3, rel=0.1)  # rank 1 takes twice as long


def test_on_the_way_out_of_an_error_nobody_is_waited_for():
    def broken(channel):
        clock = RankClock(FakeClock(time_now=7.0), channel)
        if channel.rank:
            return "elsewhere"
        try:
            raise ValueError
        except ValueError:
            return clock.now()

    assert on_ranks(TWO, broken) == [7.0, "elsewhere"]


def test_a_rank_that_breaks_its_call_raises():
    def timed(channel):
        def call():
            raise ZeroDivisionError

        own = FakeClock()
        own.time = lambda call, inner, before=None: call()
        return RankClock(own, channel).time(call, 1)

    assert [type(error) for error in on_ranks(TWO, timed)] == [ZeroDivisionError] * 2


LLC, ROOM = 1 << 20, 1 << 34
SPEC = FFNSpec(16, 64, "swiglu")
WEIGHTS = 3 * 16 * 64 * 4


def cold_copies(ranks: Ranks, device: str) -> int:
    """How many copies of its part of the weights every rank has."""
    case = Case("s", "s", SPEC, tokens=4, cache="cold-weights", ranks=ranks)
    reads = touched(Problem.of(case, 5))

    def room(channel) -> tuple[int, int | None]:
        job = Job(0, (case,), (), None, Method())
        of_device = Case("s", "s", SPEC, tokens=4, cache="cold-weights", device=device, ranks=ranks)
        return RankInStep(channel).llc_and_room(of_device, job)

    first, *others = on_ranks(ranks, room)
    assert others == [first] * (ranks.world_size - 1)
    llc, free = first
    return caching("cold-weights", [(reads, reads)], llc, free).copies


@pytest.mark.parametrize(
    ("device", "here", "sharing"), [("cpu", "4", 4), ("cpu", "", 4), ("cpu", "2", 2), ("cpu", "1", 1), ("cuda", "4", 1)]
)
def test_the_copies_of_all_ranks_at_a_cache_are_three_times_as_large(device, here, sharing, monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", here)
    monkeypatch.setattr(machine, "llc_and_room", lambda device, most: (LLC, ROOM))
    copies = cold_copies(Ranks(4), device)
    assert copies * sharing * WEIGHTS / 4 >= 3 * LLC
    assert (copies - 1) * sharing * WEIGHTS / 4 < 3 * LLC
    assert copies == math.ceil(3 * LLC / (sharing * WEIGHTS / 4))


def test_the_ranks_of_a_machine_share_its_memory(monkeypatch):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    monkeypatch.setattr(machine, "llc_and_room", lambda device, most: (LLC, ROOM))
    case = Case("s", "s", SPEC, tokens=4, ranks=Ranks(2))
    job = Job(0, (case,), (), None, Method())

    def room(channel):
        return RankInStep(channel).llc_and_room(case, job)

    assert on_ranks(Ranks(2), room) == [(LLC // 2, ROOM // 2)] * 2
    monkeypatch.setattr(machine, "llc_and_room", lambda device, most: (LLC, None))
    assert on_ranks(Ranks(2), room) == [(LLC // 2, None)] * 2
