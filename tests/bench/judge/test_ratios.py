"""Paired ratios by hand, and their intervals by simulation: how often the truth is inside."""

from __future__ import annotations

import math
from math import log

import numpy as np
import pytest

from ffncli.bench.judge.ratios import averaged, differs, log_times, paired, verdict
from ffncli.bench.judge.statistics import Interval
from tests.bench.units import blocks_of


def test_paired_within_rounds_by_hand() -> None:
    eager = blocks_of("eager", [[[0.0, 1.0], [2.0]], [[5.0]]])
    fast = blocks_of("fast", [[[0.1, 1.3], [2.6]], [[5.8]]], inner=3)
    found = paired([*fast, *eager], "fast", "eager")
    assert found is not None
    assert found.of_processes == pytest.approx({0: 0.3, 1: 0.8})  # the median of 0.1, 0.3 and 0.6
    assert (found.placements, found.rounds, found.units) == (3, 4, 2)
    half = 12.706204736174707 * 0.25  # t of one degree, s / √2 = 0.25
    assert (found.interval.value, found.interval.high) == pytest.approx((0.55, 0.55 + half))


def test_a_round_without_both_is_left_out() -> None:
    eager = blocks_of("eager", [[[0.0, 0.0]]])
    found = paired([*eager, *blocks_of("fast", [[[0.5]]])], "fast", "eager")
    assert found is not None
    assert found.rounds == 1
    assert paired(eager, "fast", "eager") is None
    assert log_times(eager, "fast") is None


def test_one_process_is_judged_by_its_placements() -> None:
    found = log_times(blocks_of("eager", [[[1.0], [2.0], [3.0]]]), "eager")
    assert found is not None
    assert found.one_process
    assert found.interval.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))
    single = log_times(blocks_of("eager", [[[1.0]]]), "eager")
    assert single is not None
    assert not single.interval.bounded


def test_order_of_blocks_is_no_matter() -> None:
    draw = np.random.default_rng(1)
    blocks = blocks_of("a", draw.normal(size=(3, 2, 4)).tolist()) + blocks_of("b", draw.normal(size=(3, 2, 4)).tolist())
    assert paired(blocks, "a", "b") == paired(blocks[::-1], "a", "b")


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [
        (0.021, 0.05, "slower"),
        (-0.05, -0.021, "faster"),
        (-0.019, 0.019, "same"),
        (0.001, 0.019, "same"),
        (0.0, 0.05, "inconclusive"),
        (-0.03, 0.03, "inconclusive"),
        (-math.inf, math.inf, "inconclusive"),
    ],
)
def test_verdict(low: float, high: float, word: str) -> None:
    assert verdict(Interval(0.0, low, high), 0.02) == word
    swapped = {"slower": "faster", "faster": "slower"}.get(word, word)
    assert verdict(Interval(0.0, -high, -low), 0.02) == swapped
    assert verdict(Interval(0.0, log(1.0201), log(1.5)), 0.02) == "slower"
    assert verdict(Interval(0.0, log(1.0199), log(1.5)), 0.02) == "inconclusive"


def test_the_verdict_is_that_of_ratios() -> None:
    draw = np.random.default_rng(3)
    for margin in (0.0, 0.003, 0.02, 0.3):
        for low, high in np.sort(draw.normal(0, max(margin, 0.01) * 1.5, (500, 2))).tolist():
            a, b = math.exp(low), math.exp(high)
            slower, faster = a > 1 + margin, b < 1 / (1 + margin)
            same = a >= 1 / (1 + margin) and b <= 1 + margin
            word = "slower" if slower else "faster" if faster else "same" if same else "inconclusive"
            assert verdict(Interval(0.0, low, high), margin) == word
            assert differs(Interval(0.0, low, high), margin) == (slower or faster)
    assert not differs(None, 0.0)


def covered(logs: np.ndarray, truth: float) -> float:
    """The share of trials whose interval holds the truth; `logs` is [trial, process, placement, round]."""
    inside = 0
    for trial in logs:
        found = averaged({p: dict(enumerate(map(list, placements))) for p, placements in enumerate(trial)})
        assert found is not None
        inside += found.interval.low <= truth <= found.interval.high
    return inside / len(logs)


def spiky(draw: np.random.Generator, shape: tuple[int, ...], scale: float, chance: float) -> np.ndarray:
    """Log times: jitter, and now and then a spike."""
    spikes = (draw.random(shape) < chance) * draw.exponential(0.5, shape)
    return draw.normal(0, scale, shape) + np.log1p(spikes)


def test_coverage_with_spikes() -> None:
    draw = np.random.default_rng(7)
    shape = (2000, 5, 3, 4)
    process = draw.normal(0, 0.003, (2000, 5, 1, 1))
    d = log(1.05) + process + spiky(draw, shape, 0.006, 0.05) - spiky(draw, shape, 0.006, 0.05)
    assert 0.92 <= covered(d, log(1.05)) <= 0.98


def test_coverage_with_placements_of_two_kinds() -> None:
    """One placement in four is 8 % slower for the kernel: the truth is the mean over placements."""
    draw = np.random.default_rng(8)
    slow = (draw.random((2000, 5, 4, 1)) < 0.25) * log(1.08)
    d = slow + draw.normal(0, 0.006, (2000, 5, 4, 4))
    assert covered(d, log(1.08) / 4) >= 0.90
    slow = (draw.random((2000, 5, 3, 1)) < 0.25) * log(1.08)
    assert covered(slow + draw.normal(0, 0.006, (2000, 5, 3, 4)), log(1.08) / 4) >= 0.90


def test_rounds_taken_for_the_unit_would_not_cover() -> None:
    """What units are for: with processes that differ, an interval over all rounds is far too narrow."""
    draw = np.random.default_rng(9)
    d = draw.normal(0, 0.01, (1000, 5, 1, 1)) + draw.normal(0, 0.006, (1000, 5, 3, 4))
    assert 0.92 <= covered(d, 0.0) <= 0.98
    assert covered(d.reshape(1000, 1, 60, 1), 0.0) < 0.8
