"""Welch's interval held to mpmath, to the pooled interval where both agree, and to simulation."""

from __future__ import annotations

import math
import random

import mpmath
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.bench.judge.welch import mean_ratio, welch

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
    assert shift is not None
    t = (shift.mean - math.log(1.03)) / shift.error
    assert shift.p_above(0.03) == pytest.approx(tail(t, shift.df), rel=1e-9)
    # the same decision as the one-sided lower bound: on the boundary p is the level
    bound = math.expm1(shift.mean - 2.0 * shift.error)
    assert shift.p_above(bound) == pytest.approx(tail(2.0, shift.df), rel=1e-9)


def test_equal_spreads_and_counts_have_the_pooled_degrees_of_freedom():
    shift = welch((0.0, 1.0, 2.0), (5.0, 6.0, 7.0))
    assert shift is not None
    assert (shift.mean, shift.df) == (5.0, pytest.approx(4.0))
    assert shift.error == pytest.approx(math.sqrt(2 / 3))


def test_without_spread_the_interval_is_a_point():
    shift = welch((0.5,) * 3, (0.25,) * 3)
    assert shift is not None
    assert (shift.ratio().low, shift.ratio().high) == (shift.ratio().value,) * 2
    assert (shift.p_above(-0.5), shift.p_above(0.0)) == (0.0, 1.0)


def test_one_process_has_no_interval():
    assert welch((0.1,), NEW) is None
    assert welch(NEW, (0.1,)) is None
    assert mean_ratio((0.0,), (math.log(1.5),)) == pytest.approx(1.5)
    assert mean_ratio((), (1.0,)) is None


def test_tiny_spreads_do_not_vanish_when_squared():
    shift = welch((0.0, 1e-160, -1e-160), (1.0, 1.0, 1.0))
    assert shift is not None
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
        assert shift is not None
        found = shift.ratio()
        held += found.low <= math.exp(0.05) <= found.high
    assert 0.92 <= held / 2000 <= 0.98


logs = st.lists(st.floats(-20, 5), min_size=2, max_size=6)


@given(logs, logs)
def test_a_swap_inverts_the_ratio(base, new):
    forth, back = welch(base, new), welch(new, base)
    assert forth is not None
    assert back is not None
    assert forth.mean == -back.mean
    assert (forth.error, forth.df) == (pytest.approx(back.error), pytest.approx(back.df))
    if math.isfinite(forth.ratio().high) and back.ratio().low > 0:
        assert math.log(forth.ratio().high) == pytest.approx(-math.log(back.ratio().low), abs=1e-9)
