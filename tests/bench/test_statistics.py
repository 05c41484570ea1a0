"""Statistics against mpmath, numpy and definitions by brute force."""

from __future__ import annotations

import itertools
import math
import random

import mpmath
import numpy as np
import pytest

from ffncli.bench import statistics


def exact_sf(t: float, df: int) -> mpmath.mpf:
    with mpmath.workdps(40):
        x = mpmath.mpf(df) / (df + mpmath.mpf(t) ** 2)
        tail = mpmath.betainc(mpmath.mpf(df) / 2, mpmath.mpf(1) / 2, 0, x, regularized=True) / 2
        return tail if t >= 0 else 1 - tail


@pytest.mark.parametrize("df", range(1, 201))
def test_t_against_mpmath(df: int) -> None:
    for t in (-3.0, -0.01, 0.0, 0.3, 1.0, 2.776, 12.0, 80.0):
        exact = exact_sf(t, df)
        assert abs(statistics.t_sf(t, df) - exact) <= 1e-11 * exact
    for p in (0.6, 0.95, 0.975, 0.9995):
        t = statistics.t_quantile(p, df)
        assert abs(exact_sf(t, df) - (1 - mpmath.mpf(p))) <= 1e-11 * (1 - p)
        assert statistics.t_quantile(1 - p, df) == pytest.approx(-t, rel=1e-9)


def test_t_of_tables() -> None:
    assert statistics.t_quantile(0.975, 4) == pytest.approx(2.7764451051977987, rel=1e-13)
    assert statistics.t_quantile(0.975, 1) == pytest.approx(math.tan(0.475 * math.pi), rel=1e-13)  # Cauchy
    assert statistics.t_quantile(0.5, 7) == 0
    assert statistics.t_sf(math.inf, 3) == 0
    assert statistics.t_sf(-math.inf, 3) == 1
    for wrong in ((0, 3), (1, 3), (0.5, 0)):
        with pytest.raises(ValueError):
            statistics.t_quantile(*wrong)


def bonferroni_closed(ps: list[float], index: int) -> float:
    """The adjusted p by closed testing: the largest Bonferroni p over all intersections that hold the hypothesis."""
    others = [i for i in range(len(ps)) if i != index]
    subsets = itertools.chain.from_iterable(itertools.combinations(others, n) for n in range(len(ps)))
    return max(min(1.0, (len(s) + 1) * min(ps[i] for i in (*s, index))) for s in subsets)


def test_holm_is_closed_testing() -> None:
    draw = random.Random(1)
    for n in range(1, 8):
        for _ in range(20):
            ps = [round(draw.random() ** 3, 2) for _ in range(n)]
            closed = [bonferroni_closed(ps, i) for i in range(n)]
            assert statistics.holm(ps) == pytest.approx(closed)
    assert statistics.holm([]) == ()


def test_spread_as_numpy() -> None:
    values = list(np.random.default_rng(3).normal(size=31))
    assert statistics.deviation(values) == pytest.approx(np.std(values, ddof=1))
    assert statistics.mad(values) == pytest.approx(1.4826 * np.median(np.abs(values - np.median(values))))
    away = np.array(values) - np.mean(values)
    assert statistics.autocorrelation(values) == pytest.approx(np.sum(away[1:] * away[:-1]) / np.sum(away**2))
    assert statistics.mad(list(np.random.default_rng(4).normal(size=20_001))) == pytest.approx(1, abs=0.02)


def test_autocorrelation_says_nothing_of_few_or_equal_values() -> None:
    assert statistics.autocorrelation([1, 2, 3, 4]) is None
    assert statistics.autocorrelation([2.0] * 9) is None
    assert statistics.autocorrelation([1, -1] * 4) == pytest.approx(-7 / 8)


def test_trimming_only_of_spikes() -> None:
    quiet = [1.0, 1.1, 0.9, 1.05, 0.95, 1.02]
    assert statistics.trimmed_mean(quiet) == statistics.mean(quiet)
    assert statistics.trimmed_mean([*quiet, 9.0]) == statistics.mean(sorted(quiet)[1:])  # one at each end
    assert statistics.trimmed_mean([1.0, 1.1, 9.0]) == statistics.mean([1.0, 1.1, 9.0])  # too few
    assert statistics.trimmed_mean([1.0, 1.1, 1.2, 9.0]) == pytest.approx(1.15)
    many = [math.sin(i) / 10 for i in range(39)]
    assert statistics.trimmed_mean([*many, 9.0]) == statistics.mean(sorted([*many, 9.0])[10:-10])
    assert statistics.trimmed_mean([1.0, 1.0, 1.0, 1.0, 5.0]) == pytest.approx(1.8)  # no MAD, no spikes


def test_interval() -> None:
    found = statistics.t_interval([1.0, 2.0, 3.0])
    assert (found.value, found.half_width) == (2, pytest.approx(4.302652729911275 / math.sqrt(3)))
    single = statistics.t_interval([4.0])
    assert (single.value, single.low, single.high, single.bounded) == (4, -math.inf, math.inf, False)
    assert found.map(lambda v: 2 * v).low == 2 * found.low


def test_interval_covers() -> None:
    draws = np.random.default_rng(5).normal(size=(2000, 5))
    found = [statistics.t_interval(list(row)) for row in draws]
    assert 0.94 <= np.mean([i.low <= 0 <= i.high for i in found]) <= 0.97


def test_interval_of_values_that_follow_each_other_is_wider() -> None:
    values = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]
    r = statistics.autocorrelation(values)
    assert r == pytest.approx(0.7)
    plain = statistics.deviation(values) / math.sqrt(10) * statistics.t_quantile(0.975, 9)
    assert statistics.t_interval(values).half_width == pytest.approx(plain * math.sqrt(1.7 / 0.3))
    assert statistics.widening(0.4) == statistics.widening(-0.9) == statistics.widening(None) == 1
