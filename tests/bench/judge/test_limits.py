"""The limits on kernels: what is beyond them, whose fault that is, and what the limits are."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.bench.activity import RunningCode
from ffncli.bench.judge import limits
from ffncli.bench.judge.limits import WorkerLimits, call_limit, memory_limit
from ffncli.bench.records import Case, Method, Stage
from ffncli.block.recipe import FFNSpec

MB = 10**6
SMALL = Case("s", "s", FFNSpec(8, 16, bias=False), tokens=4)
OTHER = replace(SMALL, tokens=5)
CHECKING, TIMING = Stage(0, SMALL, "checking", "mine"), Stage(0, SMALL, "timing")
METHOD = Method(call_time=10.0, load_time=30.0)


def watched(method: Method = METHOD, most: int | None = 1000 * MB) -> WorkerLimits:
    return WorkerLimits(method, (SMALL, OTHER), most, since=0.0)


# --- how large --------------------------------------------------------------------------------------------------------


def test_a_small_block_has_two_minutes_and_a_large_one_what_its_work_needs():
    assert call_limit(SMALL, Method()) == 120.0
    assert call_limit(SMALL, METHOD) == 10.0
    large = Case("s", "s", FFNSpec(8192, 28672, "swiglu"), tokens=8192)
    flops, weights, ends = 8192 * 2 * 3 * 8192 * 28672, 3 * 8192 * 28672 * 4, 2 * 8192 * 8192 * 4
    assert call_limit(large, Method()) == pytest.approx(flops / 1e9 + (weights + ends) / 1e8)


def test_memory_is_limited_to_most_of_what_is_free(monkeypatch):
    monkeypatch.setattr(limits, "available_memory", lambda: 1000)
    assert memory_limit(Method()) == 900
    assert memory_limit(Method(memory_limit=5000)) == 5000
    monkeypatch.setattr(limits, "available_memory", lambda: None)
    assert memory_limit(Method()) is None


# --- time -------------------------------------------------------------------------------------------------------------


def test_a_call_has_its_time_from_when_it_began():
    one, first = watched(), RunningCode("mine", False, 1)
    assert one.excess(CHECKING, 100.0, 90.0, first, None) is None
    assert one.excess(CHECKING, 110.0, 90.0, first, None) is None
    assert one.excess(CHECKING, 111.0, 90.0, replace(first, count=2), None) is None  # the next call
    assert one.excess(CHECKING, 121.0, 90.0, replace(first, count=2), None) is None
    late = one.excess(CHECKING, 121.5, 90.0, replace(first, count=2), None)
    assert late is not None
    assert (late.kernel, late.outcome.status, late.cases) == ("mine", "failed", (SMALL,))
    assert late.outcome.note == (
        "the worker timed out: a call took more than 10 s while it was checked (--call-time allows more)"
    )


def test_a_first_call_may_compile():
    one, first = watched(), RunningCode("mine", True, 1)
    assert one.excess(CHECKING, 0.0, 0.0, first, None) is None
    assert one.excess(CHECKING, 50.0, 0.0, first, None) is None
    late = one.excess(CHECKING, 50.5, 0.0, first, None)
    assert late is not None
    assert "building it and its first call took more than 50 s" in late.outcome.note


def test_while_timing_the_kernel_is_the_one_whose_block_runs():
    one = watched()
    assert one.excess(TIMING, 0.0, 0.0, RunningCode("eager", False, 7), None) is None
    assert one.excess(TIMING, 1.0, 0.0, RunningCode("mine", False, 8), None) is None
    late = one.excess(TIMING, 12.0, 0.0, RunningCode("mine", False, 8), None)
    assert late is not None
    assert (late.kernel, "a call took more than 10 s while it was timed" in late.outcome.note) == ("mine", True)


def test_our_own_work_has_no_limit():
    one = watched()
    for now in (0.0, 1000.0, 5000.0):
        assert one.excess(TIMING, now, 0.0, RunningCode("", False, 3), None) is None


def test_a_file_that_does_not_load_is_left_out_of_all_cases():
    one, stage = watched(), Stage(0, SMALL, "loading", "mine")
    assert one.excess(stage, 30.0, 0.0, RunningCode(), None) is None
    late = one.excess(stage, 30.5, 0.0, RunningCode(), None)
    assert late is not None
    assert (late.kernel, late.cases) == ("mine", (SMALL, OTHER))
    assert late.outcome.note == "the worker did not load its file within 30 s (--load-time allows more)"


# --- memory -----------------------------------------------------------------------------------------------------------


def looks(one: WorkerLimits, *looked: tuple[Stage, str, int]):
    """What is beyond the limit at the last of these looks: (the stage, whose code runs, MB held)."""
    found = None
    for number, (stage, kernel, held) in enumerate(looked):
        assert found is None
        found = one.excess(stage, 0.0, 0.0, RunningCode(kernel, False, number), held * MB)
    return found


def test_the_kernel_whose_calls_made_memory_grow_is_to_blame():
    steps = (TIMING, "", 300), (TIMING, "mine", 700), (TIMING, "eager", 800), (TIMING, "mine", 900)
    found = looks(watched(), *steps, (TIMING, "eager", 1001))
    assert (found.kernel, found.outcome.status) == ("mine", "oom")
    assert found.outcome.note == "the worker used more than 1.000 GB of memory (--memory-limit allows more)"


def test_what_a_kernel_freed_is_not_held_against_it():
    steps = (CHECKING, "mine", 800), (TIMING, "", 100), (TIMING, "eager", 600)
    assert looks(watched(), *steps, (TIMING, "", 1100)).kernel == "eager"


def test_no_kernel_is_blamed_for_our_own_memory():
    assert looks(watched(), (TIMING, "", 900), (TIMING, "mine", 960), (TIMING, "", 5000)) is None


def test_a_case_begins_with_what_the_one_before_left():
    one = watched()
    assert looks(one, (TIMING, "mine", 900)) is None
    one.begin_case()
    assert looks(one, (TIMING, "eager", 1100)).kernel == "eager"


def test_memory_that_grows_is_looked_at_more_often():
    one = watched()
    hurried = []
    for held in (400, 560, 565, 640, 641):
        looks(one, (TIMING, "mine", held))
        hurried.append(one.hurried)
    assert hurried == [False, True, False, True, False]


def test_where_memory_is_not_known_none_is_too_much():
    assert watched(most=None).excess(TIMING, 0.0, 0.0, RunningCode("mine", False, 1), 10**15) is None
    assert watched().excess(TIMING, 0.0, 0.0, RunningCode("mine", False, 1), None) is None
