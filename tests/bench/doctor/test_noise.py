"""What can be told apart, of blocks whose scatter is known; one real process."""

from __future__ import annotations

from math import exp, log, sqrt
from statistics import stdev

import pytest

from ffncli.bench.doctor import noise
from ffncli.bench.records import TWIN, TimedBlock

T4, T5 = 2.7764451, 2.5705818  # Student's t, 0.975, 4 and 5 degrees of freedom


def process(number: int, ratio: float = 1.0, drift: float = 1.0, flags: tuple[str, ...] = ()) -> list[TimedBlock]:
    """Three placements of four rounds; the twin takes `ratio` times as long, the second half `drift` times."""
    out = []
    for index in range(12):
        slow = 1e-3 * (drift if index >= 6 else 1.0)
        for position, (name, seconds) in enumerate(((noise.GEMM, slow), (TWIN, slow * ratio))):
            out.append(TimedBlock(number, "c", index // 4, index % 4, position, name, 2, 2 * seconds, flags))
    return out


def test_the_half_width_over_processes():
    logs = [0.004, -0.006, 0.001, 0.003, -0.002]
    blocks = [block for number, d in enumerate(logs) for block in process(number, exp(d))]
    found = noise.judged(blocks, 2, 9.5)
    half = T4 * stdev(logs) / sqrt(5)
    assert found.resolvable_difference == pytest.approx(exp(half) - 1, rel=1e-6)
    assert found.aa_ratio == pytest.approx(1.0)
    assert (found.aa_low, found.aa_high) == pytest.approx((exp(-half), exp(half)))
    assert (found.processes, found.rounds, found.threads, found.seconds) == (5, 60, 2, 9.5)
    assert found.troubled == 0


def test_a_twin_that_is_surely_slower_is_no_resolution():
    logs = [0.050, 0.051, 0.049, 0.052, 0.048]
    blocks = [block for number, d in enumerate(logs) for block in process(number, exp(d))]
    found = noise.judged(blocks, 2, 9.5)
    assert found.resolvable_difference == pytest.approx(exp(0.05 + T4 * stdev(logs) / sqrt(5)) - 1, rel=1e-6)


def test_timing_one_after_the_other_sees_the_drift_that_rounds_do_not():
    logs = [0.001, -0.001, 0.001, -0.001, 0.0]
    blocks = [block for number, d in enumerate(logs) for block in process(number, exp(d), drift=1.1)]
    found = noise.judged(blocks, 1, 9.5)
    expected = T5 * log(1.1) / sqrt(5)
    assert log(1 + found.sequential_difference) == pytest.approx(expected, rel=0.01)
    assert found.resolvable_difference < 0.002
    ours = T4 * stdev(logs) / sqrt(5)
    assert found.sequential_times_longer == pytest.approx((expected / ours) ** 2, rel=0.02)


def test_blocks_that_others_took_time_from_are_counted():
    blocks = [*process(0, flags=("preempted", "faults=3")), *process(1, 1.001, flags=("faults=3",)), *process(2)]
    assert noise.judged(blocks, 1, 1.0).troubled == pytest.approx(1 / 3)


def test_one_process_says_nothing():
    assert noise.judged(process(0), 1, 1.0) is None
    assert noise.judged([], 1, 1.0) is None


def test_seconds_are_shared_and_late_processes_left_out():
    asked, told, time = [], [], [100.0]
    slow = 0.0

    def run(number: int, threads: int, until: float) -> list[TimedBlock]:
        asked.append((number, threads, until))
        time[0] += slow
        return process(number, 1 + number / 1000)

    found = noise.measure_noise(10.0, 3, told.append, run, lambda: time[0])
    assert asked == [(n, 3, 100.0 + 2 * (n + 1)) for n in range(5)]
    assert told == [1] * 5
    assert found.processes == 5
    assert noise.measure_noise(2.0, 1, run=run, now=lambda: time[0]).processes == 3
    slow = 5.0
    assert noise.measure_noise(10.0, 1, run=run, now=lambda: time[0]).processes == 3
    assert noise.measure_noise(20.0, 1, run=run, now=lambda: time[0]).processes == 5


def test_a_real_process_measures_both_arms_and_a_failing_one_none(monkeypatch):
    blocks = noise._in_a_process(4, 1, 0.0)
    assert {block.kernel for block in blocks} == {noise.GEMM, TWIN}
    assert {block.process for block in blocks} == {4}
    assert {block.placement for block in blocks} >= {0, 1, 2}
    assert all(block.seconds > 0 for block in blocks)
    monkeypatch.setattr(noise.sys, "executable", "/bin/false")
    assert noise._in_a_process(4, 1, 0.0) == []
