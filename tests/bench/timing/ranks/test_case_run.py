"""What the ranks of a machine share is divided among them, so that weights which are to be cold are."""

import math

import pytest

from ffncli.bench.machine import machine
from ffncli.bench.records import Case, Job, Method
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.placed_kernel import touched
from ffncli.bench.timing.placement import caching
from ffncli.bench.timing.ranks.case_run import RankInStep
from ffncli.block.recipe import FFNSpec
from ffncli.block.shard import Ranks
from tests.bench.fake_ranks import on_ranks

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
    return caching("cold-weights", [reads], reads, llc, free).copies


@pytest.mark.parametrize(
    ("device", "here", "sharing"),
    [("cpu", "4", 4), ("cpu", "", 4), ("cpu", "2", 2), ("cpu", "1", 1), ("cuda", "4", 1)],
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
