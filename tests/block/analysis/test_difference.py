"""The record of one activation and what texts state of it; how far two are apart, against mpmath and brute force."""

import math
from functools import cache
from itertools import pairwise, permutations
from random import Random

import mpmath
import pytest
import torch
from torch.nn import init

import ffncli
from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import curve
from ffncli.block.analysis.difference import SHOWN, difference, minus
from ffncli.block.analysis.facts import NARROWEST, WIDEST, check, claim, facts
from ffncli.block.formulas import with_learned
from ffncli.errors import FFNError
from ffncli.run.engine.execute import NAMESPACE
from tests.oracles.activations import autograd_slope, oracle
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
KINDS = {  # whether a difference is (unbounded, reached, the same at -at)
    (False, False, False): ("elu", "gelu"), (True, True, False): ("elu", "gelu_10"),
    (True, True, True): ("gelu_10", "gelu"), (False, True, False): ("gelu_10", "relu6"),
    (False, True, True): ("gelu_tanh", "relu"),
}  # fmt: skip
PAIRS = sorted({*NEIGHBOURS, *KINDS.values(), *Random(0).sample(FAR, 60), *((name, name) for name in [*TABLE][:1])})


def test_the_pairs_have_every_activation_on_either_side_and_differences_of_every_kind():
    assert {name for name, _ in PAIRS} == {against for _, against in PAIRS} == {*TABLE}
    for kind, pair in KINDS.items():
        d = difference(*pair)
        assert (d.maximum is None, d.towards is None, d.symmetric) == kind


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


every_row = pytest.mark.parametrize("name", TABLE)
POINTS = (-3.0, -0.5, 0.0, 0.12, 2.0)


@every_row
def test_values_and_slopes_are_torchs(name):
    x = torch.tensor(POINTS, dtype=torch.float64)
    found = facts(name, POINTS).values
    assert [v.x for v in found] == list(POINTS)
    assert [v.value for v in found] == pytest.approx(oracle(name)(x).detach().tolist(), abs=1e-12)
    assert [v.slope for v in found] == pytest.approx(autograd_slope(oracle(name), x).tolist(), abs=1e-12)
    assert [v.ratio for v in found] == [None if v.x == 0 else v.value / v.x for v in found]


@pytest.mark.parametrize("std", [0.5, 1.0, 2.0])
@every_row
def test_gains_keep_the_second_moment(name, std):
    """A million inputs, spread as a normal distribution's quantiles, go through the activation and a layer's gain."""
    z = torch.special.ndtri((torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000) * std
    found = facts(name, std=std)
    y = oracle(name)(z).detach() * found.gain
    assert y.square().mean().sqrt().item() == pytest.approx(std, rel=2e-4)  # the quantiles end at 4.9 std
    slopes = autograd_slope(oracle(name), z) * found.gradient_gain
    assert slopes.square().mean().item() == pytest.approx(1.0, rel=2e-4)
    assert (found.mean, found.std) == (pytest.approx(oracle(name)(z).mean().item(), abs=2e-4 * std * std + 1e-5), std)


def test_gains_where_torch_has_them():
    assert facts("relu").gain == pytest.approx(init.calculate_gain("relu"), abs=1e-14)
    assert facts("leaky_relu").gain == pytest.approx(init.calculate_gain("leaky_relu", 0.01), abs=1e-14)
    assert facts("selu").gain == pytest.approx(1.0, abs=1e-14)  # torch's 3/4 is a choice of its own, not this figure
    assert facts("relu").gradient_gain == pytest.approx(math.sqrt(2), abs=1e-14)


def test_smoothness_at_zero():
    found = {name: facts(name).smoothness_at_0 for name in TABLE}
    kinks = {"relu": 0, "relu6": 0, "leaky_relu": 0, "prelu": 0, "selu": 0, "relu2": 1, "elu": 1, "xielu": -1}
    assert found == {**dict.fromkeys(TABLE), **kinks}


def test_the_librarys_call_takes_any_name():
    assert ffncli.activation("GELU-new", at=(1.0,)) == facts("gelu_tanh", (1.0,))
    for name, said in (("gelo", "unknown activation 'gelo'"), ("swiglu", "is a gated unit")):
        with pytest.raises(FFNError, match=said):
            ffncli.activation(name)


@pytest.mark.parametrize("std", [0.0, NARROWEST / 2, WIDEST * 2, math.nan, math.inf])
def test_a_width_that_says_nothing_is_refused(std):
    with pytest.raises(FFNError, match="std must be from 1e-06 to 1e"):
        facts("gelu", std=std)


# --- stated values ----------------------------------------------------------------------------------------------------

STATED = "0.12=0.066 -0.08=-0.037 0.25=0.150 0.18=0.103 0.19=0.109 0.21=0.115 -0.15=-0.058 0.28=0.168".split()


def test_worked_values_of_gelu_are_right_and_wrong():
    found = check("gelu", [claim(text) for text in STATED])
    assert [one.right for one in found] == [True] * 5 + [False] * 3
    assert [round(one.value, 4) for one in found[5:]] == [0.1225, -0.0661, 0.1709]
    assert round(found[3].ratio, 3) == 0.571  # Φ(0.18), which the text calls 0.572
    x = torch.tensor([one.x for one in found], dtype=torch.float64)
    assert [one.value for one in found] == pytest.approx(torch.nn.functional.gelu(x).tolist(), abs=1e-15)


@pytest.mark.parametrize(
    ("text", "right"),
    [("2=2", True), ("2=2.0000", True), ("2=2.4", False), ("2=2.04", False), ("1.26=1.3", True), ("1.26=1.2", False),
     ("1.25=1.2", True), ("1.25=1.3", True), ("1.2501=1.3", True), ("1.2499=1.3", False), ("1234=1.2e3", True),
     ("1251=1.2e3", False), ("-1=0", True), ("0=0", True)],
)  # fmt: skip
def test_a_claim_holds_to_its_own_digits(text, right):
    (found,) = check("relu", [claim(text)])
    assert found.right is right


@pytest.mark.parametrize("text", ["", "=", "1", "1=", "=1", "a=b", "1=nan", "inf=1", "1=2=3", "1=1e999999", "1e99=1"])
def test_what_is_no_claim_is_refused(text):
    with pytest.raises(FFNError, match=r"^.* is not of the form X=Y, with two numbers"):
        claim(text)
