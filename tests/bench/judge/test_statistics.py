"""Statistics against mpmath, numpy and brute force; ratios and what they decide, by hand and by simulation."""

import itertools
import math
import random
from math import exp, log

import mpmath
import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.bench.judge import statistics
from ffncli.bench.judge.ratios import averaged, differs, log_times, paired, verdict
from ffncli.bench.judge.statistics import Interval, mean_ratio, welch
from ffncli.bench.judge.warnings import resolvable_difference
from tests.bench.stored import row
from tests.bench.units import blocks_of


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


def test_the_value_of_a_process_is_the_median_of_its_rounds_where_placements_agree() -> None:
    draw = np.random.default_rng(6)
    alike = [list(row) for row in draw.standard_t(2, size=(4, 8))]
    assert not statistics.differ(alike)
    assert statistics.centre(alike) == pytest.approx(np.median(np.ravel(alike)))
    alike[2][:4] = [400.0, -390.0, 420.0, 410.0]  # half of a placement that was disturbed
    assert abs(statistics.centre(alike)) < 0.5
    assert statistics.centre([[1.0, 2.0, 9.0]]) == 2.0
    assert statistics.centre([[1.0], [2.0], [9.0]]) == 2.0  # one round each: no telling them apart
    assert statistics.centre([[3.0, 3.0], [3.0, 3.0]]) == 3.0


def test_placements_that_differ_count_alike_unless_they_were_disturbed() -> None:
    low, high = [0.0, 0.1, -0.1, 0.05], [8.0, 8.1, 7.9, 8.05]
    assert statistics.differ([low, low, low, high])
    assert statistics.centre([low, low, low, high]) == pytest.approx(3 * 0.025 / 4 + 8.025 / 4)
    wild = [8.0, 400.0, 8.1, 8.2]
    assert statistics.differ([low, low, low, wild])
    assert statistics.centre([low, low, low, wild]) == pytest.approx(0.025, abs=0.01)
    assert statistics.centre([[0.0] * 4] * 3 + [[8.0] * 4] * 2) == pytest.approx(3.2)


def test_whether_placements_differ_as_by_ranks_of_pandas() -> None:
    draw, said = np.random.default_rng(11), []
    for _ in range(400):
        groups = [list(np.round(draw.normal(shift, 1, 6), 1)) for shift in (0, 0, draw.normal(0, 1))]
        ranks = pd.Series(np.ravel(groups)).rank().to_numpy().reshape(3, 6)
        h = 12 / (18 * 19) * (ranks.sum(1) ** 2 / 6).sum() - 3 * 19
        said.append(h > 5.991465)
        assert statistics.differ(groups) == said[-1] or abs(h - 5.991465) < 0.2
    assert 0.1 < np.mean(said) < 0.9
    alike = [statistics.differ([list(row) for row in draw.normal(size=(4, 8))]) for _ in range(2000)]
    assert 0.02 < np.mean(alike) < 0.08


def test_quantiles_of_chi_squared_beside_a_table() -> None:
    table = {1: 3.841, 2: 5.991, 3: 7.815, 4: 9.488, 7: 14.067, 10: 18.307, 30: 43.773, 100: 124.342}
    for df, value in table.items():
        assert statistics.chi_squared(0.95, df) == pytest.approx(value, rel=0.03)
    assert statistics.chi_squared(0.99, 5) == pytest.approx(15.086, rel=0.03)


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


def test_the_interval_of_a_median_holds_for_any_distribution():
    """The ranks are those of published tables (Conover 1999, A.3): of 6 values the least and the largest, of 20 the
    6th and the 15th; and it covers the median of a skewed distribution."""
    assert statistics.median_interval([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == statistics.Interval(3.5, 1.0, 6.0)
    assert not statistics.median_interval([1.0, 2.0, 3.0, 4.0, 5.0]).bounded
    assert statistics.median_interval([float(n) for n in range(1, 21)]) == statistics.Interval(10.5, 6.0, 15.0)
    draw, inside = random.Random(0), 0
    for _ in range(2000):
        interval = statistics.median_interval([draw.expovariate(1.0) for _ in range(15)])
        inside += interval.low <= math.log(2) <= interval.high
    assert 0.95 <= inside / 2000 <= 0.985  # 96.5 % of ranks 4 and 12


# --- test welch -------------------------------------------------------------------------------------------------------


BASE = (0.10, 0.13, 0.11, 0.16)
NEW = (0.21, 0.18, 0.26, 0.19, 0.24, 0.22)


def tail(t: float, df: float) -> float:
    """P(T > t) of Student's t by integrating its density."""
    mpmath.mp.dps = 30
    scale = mpmath.gamma((df + 1) / 2) / (mpmath.sqrt(df * mpmath.pi) * mpmath.gamma(mpmath.mpf(df) / 2))
    return float(scale * mpmath.quad(lambda x: (1 + x * x / df) ** (-(df + 1) / 2), [t, t + 5, t + 50, mpmath.inf]))


def test_the_interval_is_the_textbooks():
    shift = welch(BASE, NEW)
    assert shift is not None
    means = [math.fsum(v) / len(v) for v in (BASE, NEW)]
    squares = [
        math.fsum((x - m) ** 2 for x in v) / (len(v) - 1) / len(v) for v, m in zip((BASE, NEW), means, strict=True)
    ]
    df = sum(squares) ** 2 / (squares[0] ** 2 / 3 + squares[1] ** 2 / 5)
    assert shift.mean == pytest.approx(means[1] - means[0], rel=1e-13)
    assert shift.error == pytest.approx(math.sqrt(sum(squares)), rel=1e-13)
    assert shift.df == pytest.approx(df, rel=1e-13)
    found = shift.ratio()
    assert found.value == pytest.approx(math.exp(shift.mean))
    assert tail((math.log(found.high) - shift.mean) / shift.error, df) == pytest.approx(0.025, rel=1e-9)
    assert math.log(found.high) - shift.mean == pytest.approx(shift.mean - math.log(found.low), rel=1e-12)


def test_the_one_sided_p_is_the_tail_beyond_the_threshold():
    shift = welch(BASE, NEW)
    t = (shift.mean - math.log(1.03)) / shift.error
    assert shift.p_above(0.03) == pytest.approx(tail(t, shift.df), rel=1e-9)
    # the same decision as the one-sided lower bound: on the boundary p is the level
    bound = math.expm1(shift.mean - 2.0 * shift.error)
    assert shift.p_above(bound) == pytest.approx(tail(2.0, shift.df), rel=1e-9)


def test_equal_spreads_and_counts_have_the_pooled_degrees_of_freedom():
    shift = welch((0.0, 1.0, 2.0), (5.0, 6.0, 7.0))
    assert (shift.mean, shift.df) == (5.0, pytest.approx(4.0))
    assert shift.error == pytest.approx(math.sqrt(2 / 3))


def test_without_spread_the_interval_is_a_point():
    shift = welch((0.5,) * 3, (0.25,) * 3)
    assert (shift.ratio().low, shift.ratio().high) == (shift.ratio().value,) * 2
    assert (shift.p_above(-0.5), shift.p_above(0.0)) == (0.0, 1.0)


def test_one_process_has_no_interval():
    assert welch((0.1,), NEW) is None
    assert welch(NEW, (0.1,)) is None
    assert mean_ratio((0.0,), (math.log(1.5),)) == pytest.approx(1.5)
    assert mean_ratio((), (1.0,)) is None


def test_tiny_spreads_do_not_vanish_when_squared():
    shift = welch((0.0, 1e-160, -1e-160), (1.0, 1.0, 1.0))
    assert shift.df == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("counts", "noises"), [((5, 5), (1, 1)), ((3, 8), (1, 1)), ((5, 5), (1, 4)), ((3, 10), (4, 1))]
)
def test_coverage(counts, noises):
    """Of 2000 intervals, 92 to 98 % hold the truth, whatever the spreads of the sides."""
    drawn, held = random.Random(7), 0
    for _ in range(2000):
        base, new = (
            [0.01 * noise * drawn.gauss(0, 1) for _ in range(n)] for n, noise in zip(counts, noises, strict=True)
        )
        shift = welch(base, [x + 0.05 for x in new])
        found = shift.ratio()
        held += found.low <= math.exp(0.05) <= found.high
    assert 0.92 <= held / 2000 <= 0.98


logs = st.lists(st.floats(-20, 5), min_size=2, max_size=6)


@given(logs, logs)
def test_a_swap_inverts_the_ratio(base, new):
    forth, back = welch(base, new), welch(new, base)
    assert forth.mean == -back.mean
    assert (forth.error, forth.df) == (pytest.approx(back.error), pytest.approx(back.df))
    if math.isfinite(forth.ratio().high) and back.ratio().low > 0:
        assert math.log(forth.ratio().high) == pytest.approx(-math.log(back.ratio().low), abs=1e-9)


def test_paired_within_rounds_by_hand() -> None:
    eager = blocks_of("eager", [[[0.0, 1.0], [2.0]], [[5.0]]])
    fast = blocks_of("fast", [[[0.1, 1.3], [2.6]], [[5.8]]], inner=3)
    found = paired([*fast, *eager], "fast", "eager")
    assert found.of_processes == pytest.approx({0: 0.3, 1: 0.8})  # the median of 0.1, 0.3 and 0.6
    assert (found.placements, found.rounds, found.units) == (3, 4, 2)
    half = 12.706204736174707 * 0.25  # t of one degree, s / √2 = 0.25
    assert (found.interval.value, found.interval.high) == pytest.approx((0.55, 0.55 + half))


def test_a_round_without_both_is_left_out() -> None:
    eager = blocks_of("eager", [[[0.0, 0.0]]])
    found = paired([*eager, *blocks_of("fast", [[[0.5]]])], "fast", "eager")
    assert found.rounds == 1
    assert paired(eager, "fast", "eager") is None
    assert log_times(eager, "fast") is None


def test_one_process_is_judged_by_its_placements() -> None:
    found = log_times(blocks_of("eager", [[[1.0], [2.0], [3.0]]]), "eager")
    assert found.one_process
    assert found.interval.half_width == pytest.approx(4.302652729911275 / math.sqrt(3))
    single = log_times(blocks_of("eager", [[[1.0]]]), "eager")
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


@given(st.floats(-2, 2), st.floats(1e-4, 1.0), st.floats(0.005, 0.1))
def test_an_interval_as_wide_decides_from_there_on(center, half_width, margin):
    size = resolvable_difference(row(ratio_low=exp(center - half_width), ratio_high=exp(center + half_width)), margin)
    for factor, words in ((1.0001, ("slower", "faster")), (0.9999, ("inconclusive", "inconclusive"))):
        shift = log(1 + size) * factor
        found = [verdict(Interval(at, at - half_width, at + half_width), margin) for at in (shift, -shift)]
        if half_width > 2 * margin:  # else what is nearer may be the same, which is a verdict too
            assert tuple(found) == words


@pytest.mark.parametrize(
    "changes",
    [{"kernel": "eager"}, {"status": "failed"}, {"ratio_low": None}, {"ratio_high": None}],
)
def test_nothing_is_resolved(changes):
    assert resolvable_difference(row(**{"ratio_low": 0.9, "ratio_high": 1.1, **changes}), 0.02) is None
