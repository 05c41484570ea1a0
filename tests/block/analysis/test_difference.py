"""How far activations are apart, against mpmath and against brute force over float64."""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise, permutations
from random import Random

import mpmath
import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import curve
from ffncli.block.analysis.difference import SHOWN, difference, minus
from ffncli.block.formulas import with_learned
from ffncli.run.engine.functions import NAMESPACE
from tests.oracles.exact import EXACT

X = torch.cat([torch.linspace(-40, 40, 800_001, dtype=torch.float64), torch.tensor([-1e6, 1e6], dtype=torch.float64)])


@cache  # not all at once: other tests' processes import this file too
def values(name: str) -> torch.Tensor:
    learned = {n: torch.tensor(v, dtype=torch.float64) for n, v in TABLE[name].learned.items()}
    return TABLE[name].f(X, with_learned(NAMESPACE, learned))


DENSITY = torch.exp(-X[:-2] * X[:-2] / 2) * (80 / 800_000 / math.sqrt(2 * math.pi))


@pytest.mark.parametrize(
    ("name", "printed", "at", "bracket"),
    [("gelu_tanh", "4.73e-04", "2.70", (2.5, 3.0)), ("quick_gelu", "2.03e-02", "2.27", (2.0, 2.6)),
     ("silu", "1.93e-01", "1.97", (1.5, 2.5)), ("relu", "1.70e-01", "0.75", (0.5, 1.0))],
)  # fmt: skip
def test_from_gelu(name, printed, at, bracket):
    d = difference(name, "gelu")
    assert (f"{d.maximum:.2e}", f"{d.at:.2f}", d.symmetric) == (printed, at, True)

    def gap(x: mpmath.mpf) -> mpmath.mpf:
        return EXACT[name](x) - EXACT["gelu"](x)

    with mpmath.workdps(50):
        where = mpmath.findroot(lambda x: mpmath.diff(gap, x), bracket, solver="anderson")
        largest = abs(gap(where))
    assert d.maximum == pytest.approx(float(largest), rel=1e-11)
    assert d.at == pytest.approx(float(where), rel=1e-6)
    assert d.places == (d.at, -d.at)


def test_a_kink_of_both_has_the_lower_order():
    """relu's slope jumps at 0, relu²'s second derivative does: the slope of their difference jumps."""
    for f_, g in (("relu", "relu2"), ("relu2", "relu")):
        assert minus(curve(f_), curve(g)).row.kinks == ((0.0, 1),)


NEIGHBOURS = {pair for a, b in pairwise(TABLE) for pair in ((a, b), (b, a))}
FAR = [pair for pair in permutations(TABLE, 2) if pair not in NEIGHBOURS]
PAIRS = sorted({*NEIGHBOURS, *Random(0).sample(FAR, 60), *((name, name) for name in [*TABLE][:1])})


def test_the_pairs_have_every_activation_on_either_side_and_differences_of_every_kind():
    assert {name for name, _ in PAIRS} == {against for _, against in PAIRS} == {*TABLE}
    drawn = [difference(*pair) for pair in PAIRS if pair not in NEIGHBOURS]
    assert {name for d in drawn for name in (d.name, d.against)} == {*TABLE}
    kinds = {(d.maximum is None, d.towards is None, d.symmetric) for d in drawn}  # unbounded, reached, at -at too
    assert kinds == {(True, True, False), (True, True, True), (False, True, False), (False, True, True),
                     (False, False, False)}  # fmt: skip


@pytest.mark.parametrize(("name", "against"), PAIRS)
def test_pairs(name, against):
    d = difference(name, against)
    gap = (values(name) - values(against)).abs()
    far = gap[-2:].max().item()
    if d.maximum is None:
        assert far > 100
        x, largest = d.within
        shown = X.abs() <= SHOWN
        assert largest == pytest.approx(gap[shown].max().item(), rel=1e-6, abs=1e-15)
        assert abs(x) <= SHOWN
        assert d.at is d.towards is None
    else:
        assert far < 100
        assert d.maximum == pytest.approx(gap.max().item(), rel=1e-6, abs=1e-12)
        assert d.maximum >= gap[:-2].max().item() * (1 - 1e-12)
        assert (d.at is None) == (d.towards is not None or name == against)
    for x in d.places if d.within is None else ():
        with mpmath.workdps(30):
            assert float(abs(EXACT[name](mpmath.mpf(x)) - EXACT[against](mpmath.mpf(x)))) == pytest.approx(d.maximum)
    gap = gap[:-2]
    assert d.mean == pytest.approx((gap * DENSITY).sum().item(), rel=1e-6, abs=1e-9)
    assert d.rms == pytest.approx((gap * gap * DENSITY).sum().sqrt().item(), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("name", TABLE)
def test_no_difference_from_itself(name):
    d = difference(name, name)
    assert (d.maximum, d.at, d.mean, d.rms, d.places) == (0.0, None, 0.0, 0.0, ())


@pytest.mark.parametrize(
    ("name", "against", "maximum", "at", "towards"),
    [("elu", "relu", 1.0, None, -math.inf), ("softplus", "relu", math.log(2), 0.0, None),
     ("softplus", "silu", math.log(2), 0.0, None), ("hardswish", "relu", 0.375, 1.5, None),
     ("gelu_10", "relu6", 4.0, 10.0, None), ("relu2", "gelu", None, None, None)],
)  # fmt: skip
def test_worked_differences(name, against, maximum, at, towards):
    for d in (difference(name, against), difference(against, name)):
        assert d.maximum == pytest.approx(maximum) if maximum else d.maximum is None
        assert d.at == (pytest.approx(at, abs=1e-6) if at else at)  # 0 itself, not what rounding makes of it
        assert d.towards == towards


def test_for_a_wide_normal_input():
    """Beyond 10 standard deviations of 1, where x²- and x-like functions cross."""
    assert difference("relu6", "sqrtsoftplus", 30.0).mean == pytest.approx(
        float(mpmath.quad(
            lambda x: abs(EXACT["relu6"](x) - EXACT["sqrtsoftplus"](x)) * mpmath.npdf(x, 0, 30),
            [-300, -60, -30, -10, -3, 0, 1, 3, 6, 10, 20, 36, 60, 150, 300],
        )), rel=1e-6,
    )  # fmt: skip
