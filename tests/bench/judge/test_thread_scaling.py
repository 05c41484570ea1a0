"""Speed-up and efficiency of more threads, of times that are known."""

from __future__ import annotations

from dataclasses import replace
from math import exp, log, sqrt

import pytest

from ffncli.bench.judge.thread_scaling import thread_scaling
from ffncli.bench.records import Case
from ffncli.bench.results.row import ResultRow
from ffncli.block.recipe import FFNSpec

CASES = tuple(Case("8x16", "8x16", FFNSpec(8, 16, "relu"), 32, threads=n) for n in (4, 1, 2))


def row(case: Case, times: tuple[float, ...], **more) -> ResultRow:
    return ResultRow(**{"case": case.key, "kernel": "eager", "status": "ok", "process_times_s": times, **more})


def test_the_fewest_threads_are_the_measure_of_the_others():
    four, one, two = CASES
    rows = [row(four, (0.5, 0.5)), row(one, (1.6, 1.6)), row(two, (1.0, 1.0))]
    assert [(s.case, s.base_threads, s.threads) for s in thread_scaling(CASES, rows)] == [
        (two.key, 1, 2),
        (four.key, 1, 4),
    ]
    assert [(s.speed_up, s.efficiency) for s in thread_scaling(CASES, rows)] == [
        (pytest.approx(1.6), pytest.approx(0.8)),
        (pytest.approx(3.2), pytest.approx(0.8)),
    ]


def test_the_interval_is_students_of_both_sides_together():
    """Logs of both sides have the spread 0.01, three processes each: t of 4 degrees of freedom is 2.77645 in tables."""
    _, one, two = CASES
    before, after = (tuple(exp(log(mean) + step) for step in (-0.01, 0.0, 0.01)) for mean in (2.0, 1.25))
    (found,) = thread_scaling(CASES, [row(one, before), row(two, after)])
    half = 2.77645 * 0.01 * sqrt(2 / 3)
    assert (found.speed_up, found.efficiency) == (pytest.approx(1.6), pytest.approx(0.8))
    assert found.speed_up_low == pytest.approx(1.6 * exp(-half), rel=1e-6)
    assert found.speed_up_high == pytest.approx(1.6 * exp(half), rel=1e-6)


def test_one_process_has_no_interval():
    _, one, two = CASES
    (found,) = thread_scaling(CASES, [row(one, (2.0,)), row(two, (1.0,))])
    assert (found.speed_up, found.speed_up_low, found.speed_up_high) == (pytest.approx(2.0), None, None)


@pytest.mark.parametrize("more", [{"status": "failed"}, {"kernel": "packed"}, {"process_times_s": ()}])
def test_nothing_is_scaled_by_what_has_no_time(more):
    _, one, two = CASES
    assert thread_scaling(CASES, [row(one, (2.0, 2.0)), row(two, (1.0, 1.0), **more)]) == ()


def test_only_what_differs_in_threads_alone_is_compared():
    one = CASES[1]
    for other in (replace(one, threads=2, tokens=64), replace(one, threads=2, dtype="bf16")):
        assert thread_scaling((one, other), [row(one, (2.0, 2.0)), row(other, (1.0, 1.0))]) == ()
    gpu = [replace(one, device="cuda", threads=n) for n in (1, 2)]
    assert thread_scaling(gpu, [row(case, (1.0, 1.0)) for case in gpu]) == ()


def test_no_speed_up_is_across_machines():
    four, one, two = CASES
    rows = [row(one, (1.6, 1.6), host="a"), row(two, (1.0, 1.0), host="b"), row(four, (0.5, 0.5), host="b")]
    (only,) = thread_scaling(CASES, rows)
    assert (only.base_threads, only.threads, only.speed_up) == (2, 4, pytest.approx(2.0))
