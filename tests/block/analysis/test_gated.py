"""Gated units against torch's autograd, transformers' own code for gpt-oss, and the steps of a block."""

import math
from functools import cache
from types import SimpleNamespace

import mpmath
import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Experts
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.inkling2.modeling_inkling2 import Inkling2SoftcappedSwiGLU
from transformers.models.step3p7.modeling_step3p7 import Step3p7Experts

from ffncli.block.activations import CANONICAL, GATED, LIMITED, TABLE, resolve
from ffncli.block.analysis.curve import curve
from ffncli.block.analysis.gated import UNITS, factor, gated_difference, gated_facts, linear_share, split
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation
from ffncli.errors import FFNError
from ffncli.models import catalog
from tests.oracles import exact
from tests.oracles.activations import initial, oracle


def gpt_oss(gate, up):
    stacked = torch.stack((gate, up), -1).flatten(-2)  # interleaved, as its weights are
    return GptOssExperts._apply_gate(SimpleNamespace(limit=7.0, alpha=1.702), stacked)


def deepseek_v4(gate, up):
    stacked = torch.cat((gate, up), -1)
    return DeepseekV4Experts._apply_gate(SimpleNamespace(limit=10.0, act_fn=functional.silu), stacked)


def step(gate, up):
    stacked = torch.cat((gate, up), -1)
    return Step3p7Experts._apply_gate(SimpleNamespace(limit=7.0, act_fn=functional.silu), stacked)


def situ(gate, up):
    """As transformers' Inkling2SoftcappedSwiGLU, which computes in float32."""
    return 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)


ORACLES = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: functional.relu(gate) * up,
    "glu": lambda gate, up: functional.glu(torch.stack((up, gate), -1)).squeeze(-1),
    "bilinear": lambda gate, up: gate * up,
    "swiglu_oai": gpt_oss,
    "deepseek_v4": deepseek_v4,
    "swiglustep": step,
    "situ": situ,
}
EDGES = [
    -7.5,
    -7.0,
    math.nextafter(-7.0, 0),
    -1.0,
    -1e-3,
    0.0,
    0.5,
    3.0,
    math.nextafter(7.0, 0),
    7.0,
    7.1,
    10.0,
    12.0,
    40.0,
]
every_unit = pytest.mark.parametrize("name", UNITS)


def expected(name, gate, up):
    """(value, by gate, by up) from torch."""
    g = torch.tensor([gate], dtype=torch.float64, requires_grad=True)
    u = torch.tensor([up], dtype=torch.float64, requires_grad=True)
    y = ORACLES[name](g, u)
    y.backward()
    return y.item(), g.grad.item(), u.grad.item()


def check(name, gate, up):
    unit = UNITS[name]
    assert (unit.value(gate, up), *unit.slopes(gate, up)) == pytest.approx(
        expected(name, gate, up), rel=1e-12, abs=1e-12
    )


@every_unit
def test_values_and_slopes_at_kinks_and_limits(name):
    for gate in EDGES:
        for up in EDGES:
            check(name, gate, up)


@every_unit
@settings(max_examples=50)
@given(st.floats(-30, 30), st.floats(-30, 30))
def test_values_and_slopes_anywhere(name, gate, up):
    check(name, gate, up)


@pytest.mark.parametrize("name", exact.UNITS)
def test_units_with_limits_in_mpmath(name):
    """Values, and slopes between the limits, where the derivative of the exact formula exists."""
    unit, formula = UNITS[name], exact.UNITS[name]
    with mpmath.workdps(40):
        for gate in (-30.5, -3.0, -1e-9, 0.25, 6.9, 7.05, 9.0, 11.0, 300.0):
            for up in (-40.0, -8.5, -1.0, 0.3, 6.5, 9.5, 200.0):
                g, u = mpmath.mpf(gate), mpmath.mpf(up)
                slopes = [mpmath.diff(formula, (g, u), order) for order in ((1, 0), (0, 1))]
                assert unit.value(gate, up) == pytest.approx(float(formula(g, u)), rel=1e-13, abs=1e-300)
                assert unit.slopes(gate, up) == pytest.approx([float(s) for s in slopes], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", exact.UNITS)
def test_extremes_of_units_with_limits(name):
    """Each limit holds at infinity, and NaN goes through; in the scalar namespace and in torch's."""
    unit, inf, nan = UNITS[name], math.inf, math.nan
    most = {"swiglu_oai": 7 / (1 + math.exp(-7 * 1.702)), "deepseek_v4": 10 / (1 + math.exp(-10.0)),
            "swiglustep": 7.0, "situ": 4.0}[name]  # fmt: skip
    up = {"swiglu_oai": (-6.0, 8.0), "deepseek_v4": (-10.0, 10.0), "swiglustep": (-7.0, 7.0), "situ": (-25.0, 25.0)}
    for value in (unit.value, lambda *at: unit.f(*map(torch.tensor, at), torch).item()):
        assert value(inf, -inf) == pytest.approx(most * up[name][0], rel=1e-6)
        assert value(inf, inf) == pytest.approx(most * up[name][1], rel=1e-6)
        assert math.isnan(value(nan, 1.0))
        assert math.isnan(value(1.0, nan))


@every_unit
def test_values_over_torch(name):
    gate, up = torch.randn(2, 1000, dtype=torch.float64) * 6
    found = UNITS[name].f(gate, up, torch)
    assert torch.allclose(found, ORACLES[name](gate, up), rtol=1e-12, atol=1e-12)


@every_unit
def test_a_block_has_the_same_steps(name):
    unit = UNITS[name]
    ops = {step.output: step.op for step in steps(unit.spec(4, 8))}
    assert ops["act"] == unit.gate
    assert ops.get("lift", Activation("identity")) == unit.up
    assert ops["hidden"].formula(("act", "up"), str) == "act ⊙ up"


def test_gpt_oss_of_the_catalog_has_its_unit():
    spec = catalog.find("gpt-oss-20b").model.main.spec
    unit = UNITS["swiglu_oai"].spec(spec.d_model, spec.d_ff)
    assert (spec.activation, spec.limits) == (unit.activation, unit.limits)


def test_the_soft_caps_are_transformers_own():
    config = SimpleNamespace(mlp_gate_softcap=4.0, mlp_up_softcap=25.0)
    gate, up = torch.randn(2, 1000, dtype=torch.float64) * 30
    found = UNITS["situ"].f(gate, up, torch)
    assert torch.allclose(found, Inkling2SoftcappedSwiGLU(config)(gate, up), rtol=1e-5, atol=1e-5)
    assert (found.abs() > 60).any()


def test_formulas():
    assert UNITS["swiglu"].formula == "silu(gate) ⊙ up"
    assert UNITS["bilinear"].formula == "gate ⊙ up"
    assert UNITS["swiglu_oai"].formula == "quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)"
    assert UNITS["deepseek_v4"].formula == "silu(min(gate, 10)) ⊙ clip(up, -10, 10)"
    assert UNITS["swiglustep"].formula == "min(silu(gate), 7) ⊙ clip(up, -7, 7)"
    assert UNITS["situ"].formula == "4 · tanh(gate / 4) · sigmoid(gate) ⊙ (25 · tanh(up / 25))"


@pytest.mark.parametrize(
    ("name", "text"),
    [("swiglu", "2 mul, 1 sigmoid"), ("geglu", "4 mul, 1 add, 1 erf"), ("reglu", "1 mul, 1 compare, 1 select"),
     ("bilinear", "1 mul"), ("glu", "1 mul, 1 sigmoid"), ("geglu_tanh", "7 mul, 2 add, 1 tanh"),
     ("swiglu_oai", "3 mul, 1 add, 3 compare, 3 select, 1 sigmoid"),
     ("deepseek_v4", "2 mul, 3 compare, 3 select, 1 sigmoid"), ("swiglustep", "2 mul, 3 compare, 3 select, 1 sigmoid"),
     ("situ", "4 mul, 2 div, 2 tanh, 1 sigmoid")],
)  # fmt: skip
def test_operations_by_hand(name, text):
    assert UNITS[name].operations().text == text


def test_factors_know_their_kinks():
    unit = UNITS["swiglu_oai"]
    assert factor(unit.gate).row.kinks == ((7.0, 1),)
    assert factor(unit.up).row.kinks == ((-7.0, 1), (7.0, 1))
    unit = UNITS["swiglustep"]
    ((place, order),) = factor(unit.gate).row.kinks
    assert (order, place / (1 + math.exp(-place))) == (1, pytest.approx(7.0, rel=1e-15))
    assert factor(Activation("sigmoid", most=2.0)).kinks == ()
    assert factor(UNITS["situ"].gate).kinks == ()
    assert factor(Activation("relu6", low=-1.0, high=3.0)).kinks == (-1.0, 0.0, 3.0)
    assert factor(Activation("relu6")).kinks == (0.0, 6.0)


# --- names ------------------------------------------------------------------------------------------------------------


def test_every_gated_name_is_a_unit_and_nothing_else():
    assert set(UNITS) == {*GATED, *LIMITED.values()}
    assert not set(UNITS) & set(CANONICAL)
    assert not set(LIMITED) & {*GATED, *TABLE, *CANONICAL}
    assert all(UNITS[name].gate == Activation(function) for name, function in GATED.items())


@pytest.mark.parametrize(
    ("typed", "plain", "gated"),
    [
        (["gelu-new", "GELU", "gelu_erf"], ("gelu_tanh", "gelu"), ()),
        (["silu", "SwiGLU", "swish", " swiglu"], ("silu",), ("swiglu",)),
        (["relu,GEGLU", "swish"], ("relu", "silu"), ("geglu",)),
        (["SwiGLU-OAI", "swigluoai", "clamped_swiglu"], (), ("swiglu_oai",)),
    ],
)
def test_split(typed, plain, gated):
    assert split(typed) == (plain, gated)


@pytest.mark.parametrize(
    ("typed", "near"), [("swiglu_oia", "swiglu_oai"), ("gelo", "gelu"), ("regul", "reglu"), ("", "known: identity")]
)
def test_split_suggests(typed, near):
    with pytest.raises(FFNError) as error:
        split(["silu", typed])
    assert error.value.message == f"NAME: unknown activation '{typed}'"
    assert near in error.value.hint


@pytest.mark.parametrize("name", LIMITED)
def test_a_block_by_the_name_of_a_limited_unit_has_its_limits(name):
    unit = UNITS[LIMITED[name]]
    assert resolve(name.upper()) == (unit.gate.function, True)
    ops = {step.output: step.op for step in steps(FFNSpec(4, 8, name.upper()))}
    assert (ops["act"], ops["lift"]) == (unit.gate, unit.up)
    with pytest.raises(FFNError, match="cannot be plain"):
        FFNSpec(4, 8, name, gated=False)


# --- facts and differences --------------------------------------------------------------------------------------------


HARD = {"swiglu_oai": (7.0, 1.0), "deepseek_v4": (10.0, 0.0), "swiglustep": (7.0, 0.0)}  # ± limit of up, plus
LIFTS = {
    **{name: lambda u, c=c: u.clamp(-c[0], c[0]) + c[1] for name, c in HARD.items()},
    "situ": lambda u: 25 * torch.tanh(u / 25),
}
STDS = (0.02, 0.5, 1.0, 3.0, 30.0)


@cache
def plane(std, points=701, reach=9.0):
    """(gate, up, weights) on a grid of points × points over ± reach · std; weights sum to 1."""
    line = torch.linspace(-reach, reach, points, dtype=torch.float64)
    weight = torch.exp(-0.5 * line**2)
    weight /= weight.sum()
    gate, up = torch.meshgrid(line * std, line * std, indexing="ij")
    return gate, up, weight[:, None] * weight[None, :]


@cache
def regression(std):
    """(√weights, the weighted columns 1, gate, up, gate · up, their products): the same for every unit."""
    gate, up, weight = plane(std)
    root = weight.flatten().sqrt()
    columns = (torch.ones_like(gate), gate, up, gate * up)
    design = torch.stack([column.flatten() for column in columns], 1) * root[:, None]
    return root, design, design.T @ design


@pytest.mark.parametrize("std", [0.5, 1.0, 3.0])
@every_unit
def test_moments_and_shares_by_a_double_integral_and_a_regression(name, std):
    gate, up, weight = plane(std)
    y = ORACLES[name](gate, up)
    mean = (weight * y).sum()
    variance = (weight * (y - mean) ** 2).sum()
    root, design, gram = regression(std)
    target = y.flatten() * root

    def explained(columns):
        """R² of the least-squares fit of y by the first columns, intercept included."""
        fit = torch.linalg.solve(gram[:columns, :columns], design[:, :columns].T @ target)
        return 1 - ((target - design[:, :columns] @ fit) ** 2).sum() / variance

    found = gated_facts(UNITS[name], std)
    # 1e-4: the grid's own error where the slope jumps.
    assert found.mean == pytest.approx(mean.item(), rel=1e-4, abs=1e-12)
    assert found.variance == pytest.approx(variance.item(), rel=1e-4)
    assert found.gain == pytest.approx(std / (variance + mean**2).sqrt().item(), rel=1e-4)
    linear = explained(3)
    assert found.linear_share == pytest.approx(linear.item(), abs=1e-4)
    assert found.product_share == pytest.approx((explained(4) - linear).item(), abs=1e-4)


@cache
def line(std, points=1_000_001, reach=10.0):
    """(x, weights) on a grid of one input."""
    x = torch.linspace(-reach, reach, points, dtype=torch.float64)
    weight = torch.exp(-0.5 * x**2)
    return x * std, weight / weight.sum()


@pytest.mark.parametrize("std", STDS)
@every_unit
def test_moments_on_a_million_points(name, std):
    x, weight = line(std)
    one, far = torch.ones_like(x), torch.full_like(x, 3.0)
    # y is a(gate) · b(up): with the other input at rest each is seen alone, up to a constant factor.
    a, b = ORACLES[name](x, one), ORACLES[name](far, x)
    scale = ORACLES[name](far[:1], one[:1]).item()
    mean = (weight * a).sum() * (weight * b).sum() / scale
    second = (weight * a**2).sum() * (weight * b**2).sum() / scale**2
    found = gated_facts(UNITS[name], std)
    assert found.mean == pytest.approx(mean.item(), abs=1e-6 * std)
    assert found.variance == pytest.approx((second - mean**2).item(), rel=1e-6, abs=1e-9 * std**2)
    assert found.gain == pytest.approx((std / second.sqrt()).item(), rel=1e-6)


@cache
def graded(std, points=400_001):
    """The same, finer towards 0, where the share changes within 1e-3 / std."""
    t = torch.linspace(-1, 1, points, dtype=torch.float64) * math.asinh(1e7 * std)
    x = 1e-6 * torch.sinh(t)
    weight = torch.cosh(t) * torch.exp(-0.5 * (x / std) ** 2)
    return x, weight / weight.sum()


@pytest.mark.parametrize("std", STDS)
@every_unit
def test_the_share_near_zero_by_an_integral_over_the_gate(name, std):
    """P(|y| ≤ 1e-3 | gate) from where the straight part of up crosses ± 1e-3, and whether a clipped up is inside."""
    x, weight = graded(std)
    unlifted = 1.0 if name not in LIFTS else LIFTS[name](torch.ones(1, dtype=torch.float64)).item()
    most = 1e-3 * unlifted / ORACLES[name](x, torch.ones_like(x)).abs()  # of |b(up)|
    normal = torch.distributions.Normal(torch.zeros((), dtype=torch.float64), torch.tensor(std, dtype=torch.float64))
    if name in HARD:
        limit, plus = HARD[name]
        low, high = (-most - plus).clamp(-limit, limit), (most - plus).clamp(-limit, limit)
        tail = normal.cdf(torch.tensor(-limit, dtype=torch.float64))
        inner = normal.cdf(high) - normal.cdf(low) + tail * (most >= limit + plus) + tail * (most >= limit - plus)
    else:
        most = 25 * torch.atanh((most / 25).clamp(max=1.0)) if name == "situ" else most
        inner = torch.erf(most / (std * math.sqrt(2.0)))
    # Without a plus the share jumps to 1 where even the largest up is small: the grid misses half a step there.
    error = 1e-5 if name in ("deepseek_v4", "swiglustep") else 1e-6
    assert gated_facts(UNITS[name], std).zero_share == pytest.approx((weight * inner).sum().item(), abs=error)


@every_unit
def test_the_share_near_zero_by_counting(name):
    """Every pair of 1500 × 1500 quantiles."""
    at = torch.special.ndtri((torch.arange(1500, dtype=torch.float64) + 0.5) / 1500)
    for std in (1.0, 8.0):
        y = ORACLES[name](*torch.meshgrid(at * std, at * std, indexing="ij"))
        share = (y.abs() <= 1e-3).double().mean().item()
        assert gated_facts(UNITS[name], std).zero_share == pytest.approx(share, abs=1e-3)


# --- closed forms -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", STDS)
def test_bilinear_is_the_product_itself(std):
    found = gated_facts(UNITS["bilinear"], std)
    assert (found.mean, found.linear_share) == (0.0, 0.0)
    assert found.product_share == pytest.approx(1.0, abs=1e-12)
    assert found.variance == pytest.approx(std**4, rel=1e-12)
    # The product of two standard normals has density K0(|z|) / π.
    share = 2 / mpmath.pi * mpmath.quad(lambda z: mpmath.besselk(0, z), [0, 1e-3 / std**2 / 100, 1e-3 / std**2])
    assert found.zero_share == pytest.approx(float(share), abs=1e-7)


@pytest.mark.parametrize("std", STDS)
def test_reglu_in_closed_form(std):
    found = gated_facts(UNITS["reglu"], std)
    assert found.variance == pytest.approx(std**4 / 2, rel=1e-12)
    assert found.gain == pytest.approx(math.sqrt(2.0) / std, rel=1e-12)
    assert found.exact_zero_share == 0.5
    assert found.linear_share == pytest.approx(1 / math.pi, rel=1e-12)  # E[relu]² / E[relu²]
    assert found.product_share == pytest.approx(0.5, rel=1e-12)


def test_swiglu_and_geglu_in_mpmath():
    silu = lambda x: x / (1 + mpmath.exp(-x))  # noqa: E731
    gelu = lambda x: x * mpmath.ncdf(x)  # noqa: E731
    for name, f in (("swiglu", silu), ("geglu", gelu)):
        mean, square = (
            mpmath.quad(lambda x, n=n, f=f: f(x) ** n * mpmath.npdf(x), [-30, -5, 0, 5, 30]) for n in (1, 2)
        )
        found = gated_facts(UNITS[name])
        assert found.mean == 0.0
        assert found.variance == pytest.approx(float(square), rel=1e-12)
        assert found.linear_share == pytest.approx(float(mean**2 / square), rel=1e-12)
        assert found.product_share == pytest.approx(float(0.25 / square), rel=1e-12)  # E[f(x) x] = 1/2 for both


@pytest.mark.parametrize("std", [1.0, 5.0, 50.0])
def test_the_clipped_lift_in_closed_form(std):
    """E[clip(u, ±c)] = 0 and E[clip²] = c² - 2 ∫₀^c x P(|U| < x) dx; mean of the unit: E of its gate alone."""
    c = mpmath.mpf(7) / std
    inside = mpmath.erf(c / mpmath.sqrt(2))
    square = std**2 * (inside - 2 * c * mpmath.npdf(c) + c**2 * (1 - inside))
    f = lambda x: min(x, 7) / (1 + mpmath.exp(-1.702 * min(x, 7)))  # noqa: E731
    cuts = sorted({-30 * std, -40, -8, 0, 7, 30 * std})
    density = lambda x: mpmath.npdf(x, 0, std)  # noqa: E731
    mean, gate_square = (mpmath.quad(lambda x, n=n: f(x) ** n * density(x), cuts) for n in (1, 2))
    found = gated_facts(UNITS["swiglu_oai"], std)
    assert found.mean == pytest.approx(float(mean), rel=1e-9)
    assert found.variance == pytest.approx(float(gate_square * (square + 1) - mean**2), rel=1e-9)


def test_straight_lines_are_linear_and_even_functions_are_not():
    assert linear_share(curve("identity")) == pytest.approx(1.0, abs=1e-12)
    relu = 0.25 / (0.5 - 0.5 / math.pi)
    assert linear_share(curve("relu")) == pytest.approx(relu, rel=1e-12)


@pytest.mark.parametrize("std", [0.3, 4.0])
@pytest.mark.parametrize("name", TABLE)
def test_linear_shares_by_regression(name, std):
    x, weight = line(std)
    y = oracle(name, initial(name))(x).detach()
    y = y - (weight * y).sum()
    share = (weight * x * y).sum() ** 2 / ((weight * x**2).sum() * (weight * y**2).sum())
    assert linear_share(curve(name), std) == pytest.approx(share.item(), abs=1e-6)


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HARD)
def test_the_range_of_units_with_hard_limits(name):
    found = gated_facts(UNITS[name])
    line = torch.linspace(-60, 60, 1201, dtype=torch.float64)
    y = ORACLES[name](*torch.meshgrid(line, line, indexing="ij"))
    assert found.minimum == pytest.approx(y.min().item(), rel=1e-12)
    assert found.maximum == pytest.approx(y.max().item(), rel=1e-12)
    limit = HARD[name][0]
    gate = 7.006342814601792 if name == "swiglustep" else limit  # silu is 7 there
    assert (found.minimum_at, found.maximum_at) == ((gate, -limit), (gate, limit))


def test_the_range_of_soft_caps_is_only_approached():
    found = gated_facts(UNITS["situ"])
    assert (found.minimum, found.minimum_at, found.maximum, found.maximum_at) == (-100.0, None, 100.0, None)


@pytest.mark.parametrize("name", LIFTS)
def test_the_lipschitz_constant_of_units_with_limits(name):
    """The steepest place of fine grids about the corners and of a coarse one everywhere, by autograd."""
    steepest = 0.0
    for ends, points in (
        ((-20.0, 20.0), 801),
        ((6.9, 7.1), 401),
        ((0.0, 7.0), 701),
        ((9.5, 10.0), 501),
        ((7.006, 7.00634), 35),
    ):
        at = torch.linspace(*ends, points, dtype=torch.float64)
        places = torch.cat((at, torch.tensor([7.0, 10.0, 1e6])))  # where tanh is 1
        gate, up = (x.clone().requires_grad_() for x in torch.meshgrid(at, places, indexing="ij"))
        ORACLES[name](gate, up).sum().backward()
        steepest = max(steepest, torch.hypot(gate.grad, up.grad).max().item())
    assert gated_facts(UNITS[name]).lipschitz == pytest.approx(steepest, rel=1e-6)


@every_unit
def test_only_limits_bound_a_product(name):
    found = gated_facts(UNITS[name])
    bounds = (found.minimum, found.maximum, found.lipschitz)
    assert bounds.count(None) == (0 if name in LIFTS else 3)
    assert found.growth == {"glu": 1.0, **dict.fromkeys(LIFTS, 0.0)}.get(name, 2.0)


@every_unit
def test_the_widths_that_are_allowed_give_finite_facts(name):
    for std in (1e-6, 1e6):
        found = gated_facts(UNITS[name], std)
        assert all(numpy.isfinite(v) for v in vars(found).values() if isinstance(v, float))
        assert 0 <= found.exact_zero_share <= found.zero_share <= 1 + 1e-12
        assert 0 <= found.linear_share + found.product_share <= 1 + 1e-9
    for std in (1e-7, 1e7):
        with pytest.raises(FFNError, match="std must be from"):
            gated_facts(UNITS[name], std)


# --- differences of two units -----------------------------------------------------------------------------------------


STEP = 7.006342814601792  # silu of it is 7
PAIRS = [
    ("swiglustep", "swiglu"), ("situ", "swiglu"), ("deepseek_v4", "swiglustep"), ("swiglu_oai", "deepseek_v4"),
    ("geglu", "geglu_tanh"), ("reglu", "bilinear"),
]  # fmt: skip


@pytest.mark.parametrize("std", [1.0, 5.0])
@pytest.mark.parametrize(("name", "against"), PAIRS)
def test_the_rms_is_a_double_integral(name, against, std):
    gate, up, weight = plane(std)
    y, z = ORACLES[name](gate, up), ORACLES[against](gate, up)
    found = gated_difference(name, against, std)
    assert found.rms == pytest.approx((weight * (y - z) ** 2).sum().sqrt().item(), rel=1e-2, abs=1e-12)
    assert found.relative_rms == pytest.approx(found.rms / (weight * z**2).sum().sqrt().item(), rel=1e-4)


def test_a_tail_that_no_sum_of_moments_would_show():
    """DeepSeek-V4 and plain SwiGLU part beyond 10: by hand, E[silu²] · 2 ∫ (u - 10)² over the tail, and the gate's."""
    x = torch.linspace(10, 25, 2_000_001, dtype=torch.float64)
    tail = (torch.exp(-0.5 * x**2) / math.sqrt(2 * math.pi) * (x - 10) ** 2).sum().item() * (15 / 2e6)
    line = torch.linspace(-12, 12, 400_001, dtype=torch.float64)
    weight = torch.exp(-0.5 * line**2)
    square = ((weight / weight.sum()) * torch.nn.functional.silu(line) ** 2).sum().item()
    expected = math.sqrt(square * 2 * tail + tail)  # silu(g) - silu(10) is g - 10 to 5e-5 there
    assert gated_difference("deepseek_v4", "swiglu").rms == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize(
    ("name", "against", "gate", "up"),
    [
        ("deepseek_v4", "swiglu", (-math.inf, 10.0), (-10.0, 10.0)),
        ("swiglustep", "swiglu", (-math.inf, STEP), (-7.0, 7.0)),
        ("swiglustep", "deepseek_v4", (-math.inf, STEP), (-7.0, 7.0)),
        ("reglu", "bilinear", (0.0, math.inf), (-math.inf, math.inf)),
        ("swiglu", "swiglu", (-math.inf, math.inf), (-math.inf, math.inf)),
    ],
)
def test_where_two_units_are_the_same(name, against, gate, up):
    for one, other in ((name, against), (against, name)):
        found = gated_difference(one, other)
        assert found.same_gate == pytest.approx(gate, rel=1e-9, abs=1e-12)
        assert found.same_up == pytest.approx(up, rel=1e-9)


@pytest.mark.parametrize("name", ["situ", "swiglu_oai", "geglu"])
def test_units_that_part_at_once_are_nowhere_the_same(name):
    found = gated_difference(name, "swiglu")
    assert (found.same_gate, found.same_up) == (None, None)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_is_itself(name):
    found = gated_difference(name, name)
    assert (found.rms, found.relative_rms) == (0.0, 0.0)
