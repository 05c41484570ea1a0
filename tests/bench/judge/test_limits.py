"""The limits on kernels: what is beyond them and whose fault that is; what a case needs of memory."""

from dataclasses import replace

import pytest

from ffncli.bench.activity import RunningCode
from ffncli.bench.judge import limits
from ffncli.bench.judge.limits import WorkerLimits, call_limit, memory_limit
from ffncli.bench.judge.memory_need import explained, holders, memory_need, memory_text
from ffncli.bench.records import Case, Method, Outcome, Stage
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels.choice import choices

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
    assert (late.kernel, late.outcome.status, late.cases) == ("mine", "failed", (SMALL,))
    assert late.outcome.note == (
        "the worker timed out: a call took more than 10 s while it was checked (--call-time allows more)"
    )


def test_a_first_call_may_compile():
    one, first = watched(), RunningCode("mine", True, 1)
    assert one.excess(CHECKING, 0.0, 0.0, first, None) is None
    assert one.excess(CHECKING, 50.0, 0.0, first, None) is None
    late = one.excess(CHECKING, 50.5, 0.0, first, None)
    assert "building it and its first call took more than 50 s" in late.outcome.note


def test_while_timing_the_kernel_is_the_one_whose_block_runs():
    one = watched()
    assert one.excess(TIMING, 0.0, 0.0, RunningCode("eager", False, 7), None) is None
    assert one.excess(TIMING, 1.0, 0.0, RunningCode("mine", False, 8), None) is None
    late = one.excess(TIMING, 12.0, 0.0, RunningCode("mine", False, 8), None)
    assert (late.kernel, "a call took more than 10 s while it was timed" in late.outcome.note) == ("mine", True)


def test_our_own_work_has_no_limit():
    one = watched()
    for now in (0.0, 1000.0, 5000.0):
        assert one.excess(TIMING, now, 0.0, RunningCode("", False, 3), None) is None


def test_a_file_that_does_not_load_is_left_out_of_all_cases():
    one, stage = watched(), Stage(0, SMALL, "loading", "mine")
    assert one.excess(stage, 30.0, 0.0, RunningCode(), None) is None
    late = one.excess(stage, 30.5, 0.0, RunningCode(), None)
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


CASE = Case("s", "64x256:swiglu", FFNSpec(64, 256, "swiglu"), 1000)
BACKWARD = replace(CASE, passes="forward+backward", dtype="bf16")
WEIGHTS = 4 * 3 * 64 * 256
ACTIVATIONS = 4 * 1000 * (4 * 256 + 64)  # gate, up, act, hidden; the output


def test_forward():
    need = memory_need(CASE, 3)
    assert (need.weights, need.activations, need.gradients) == (WEIGHTS, ACTIVATIONS, 0)
    assert need.total == 3 * WEIGHTS + ACTIVATIONS


def test_backward_has_gradients_and_the_reference_of_them():
    need = memory_need(BACKWARD, 1)
    params = WEIGHTS // 4
    assert need.total == 2 * params + ACTIVATIONS + 2 * params + 2 * 8 * params


def test_of_a_mixture_one_expert_is_widened_at_a_time():
    """64 experts: their gradients are all there in float64, their weights are not."""
    mixture = replace(BACKWARD, spec=FFNSpec(64, 256, "swiglu", moe=MoE(64, 2)))
    expert, router, tokens = 3 * 64 * 256, 64 * 64, 1000
    params = 64 * expert + router
    need = memory_need(mixture, 1)
    assert need.weights == 2 * params
    assert need.gradients == 2 * params + 8 * params + 8 * (expert + router)
    assert need.activations > 2 * 2 * tokens * 2 * 4 * 256


@pytest.mark.parametrize(
    ("case", "arms", "each", "free", "end"),
    [
        (CASE, 0, 1, None, "and 4.352 MB of activations"),
        (CASE, 0, 1, 10_000_000, "; 10.00 MB was free"),
        (CASE, 0, 1, 3_000_000, "; 3.000 MB was free; --tokens 512 or --dtype bf16 would fit"),
        (CASE, 0, 1, 2_000_000, "; --tokens 256 would fit"),
        (CASE, 3, 10, 6_000_000, "; --dtype bf16 or --cache warm would fit"),
        (CASE, 0, 1, 1000, "; take a smaller block"),
        (replace(CASE, dtype="bf16"), 0, 1, 1_000_000, "; --tokens 256 would fit"),
        (BACKWARD, 0, 1, 2_300_000, "; --tokens 256 or --pass forward would fit"),
    ],
)
def test_what_would_fit(case, arms, each, free, end):
    text = memory_text(case, arms, each, free)
    assert text.startswith("64x256:swiglu with 1,000 tokens needs at least")
    assert text.endswith(end)


def test_one_copy_and_several():
    assert "at least 4.549 MB: 1 copy of its weights, 196.6 KB, and 4.352 MB of activations" in memory_text(
        CASE, 0, 1, 9
    )
    assert "at least 4.942 MB: 3 copies of its weights, 196.6 KB each, and 4." in memory_text(CASE, 2, 1, 9)


def test_only_oom_is_explained():
    fine = Outcome("eager")
    assert explained(fine, CASE, 0, 1, 1) is fine
    outcome = explained(replace(fine, status="oom", note="out of memory"), CASE, 0, 1, None)
    assert outcome.note.startswith("out of memory; 64x256:swiglu with")


def test_who_needs_a_copy():
    """The package's kernels share one if they must; a user's kernel has two, the referee's process one."""
    kernels = choices(["eager,packed", "mine=mine.py:mlp"])
    assert holders(kernels, 7, False) == 5
    assert holders(kernels, 1, False) == 2
    assert holders(kernels[:2], 1, True) == 1
