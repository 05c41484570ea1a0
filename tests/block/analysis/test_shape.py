"""Shapes of activations, expectations under a normal density, accurate forms: against torch and mpmath."""

import math
from functools import cache

import mpmath
import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import (
    curve,
    exact_zero_share,
    expectation,
    near_zero_share,
    nodes,
    normal_share,
    shape,
)
from ffncli.block.formulas import with_learned
from ffncli.run.engine.execute import NAMESPACE
from tests.oracles.activations import autograd_slope, oracle
from tests.oracles.exact import EXACT

every_row = pytest.mark.parametrize("name", TABLE)
DENSE = torch.linspace(-30, 30, 600_001, dtype=torch.float64)
UNBOUNDED_BELOW = {"identity", "leaky_relu", "prelu"}
BOUNDED_ABOVE = {"relu6": 6.0, "gelu_10": 10.0, "sigmoid": 1.0, "tanh": 1.0, "laplace": 1.0}
APPROACHED = {"sigmoid": 0.0, "tanh": -1.0, "softplus": 0.0, "sqrtsoftplus": 0.0, "elu": -1.0,
              "selu": -1.0507009873554805 * 1.6732632423543772, "laplace": 0.0}  # fmt: skip


def learned_oracle(name):
    return oracle(name, TABLE[name].learned) if TABLE[name].learned else oracle(name)


@every_row
def test_bounds_against_a_dense_look(name):
    found, values = shape(curve(name)), learned_oracle(name)(DENSE).detach()
    if name in UNBOUNDED_BELOW:
        assert (found.minimum, found.minimum_at) == (-math.inf, None)
    elif name in APPROACHED:
        assert found.minimum == pytest.approx(APPROACHED[name], abs=1e-15)
        assert found.minimum_at is None
    else:
        assert found.minimum == pytest.approx(values.min().item(), abs=1e-8)
        assert found.minimum <= values.min().item()
        assert curve(name).f(found.minimum_at) == found.minimum
        places = DENSE[values <= values.min() + 1e-9]
        assert places.min().item() - 1e-3 <= found.minimum_at <= places.max().item() + 1e-3
    expected = BOUNDED_ABOVE.get(name, math.inf)
    assert found.maximum == pytest.approx(expected, abs=1e-15)
    assert (found.maximum_at is not None) == (name in ("relu6", "gelu_10"))


@every_row
def test_the_steepest_slope_against_autograd(name):
    found = shape(curve(name))
    slopes = autograd_slope(learned_oracle(name), DENSE).abs()
    if name in ("relu2", "xielu"):  # the slope grows with x
        assert (found.lipschitz, found.steepest_at) == (math.inf, None)
        return
    assert found.lipschitz == pytest.approx(slopes.max().item(), abs=1e-4 if TABLE[name].kinks else 1e-8)
    assert found.lipschitz >= slopes.max().item() - 1e-15
    if found.steepest_at is not None:
        near = (DENSE - found.steepest_at).abs() < 2e-4
        assert slopes[near].max().item() == pytest.approx(found.lipschitz, abs=1e-3)


def test_closed_forms_of_gelu():
    found = shape(curve("gelu"))
    top = 0.5 * (1 + math.erf(1.0)) + math.exp(-1.0) / math.sqrt(math.pi)  # Φ(√2) + √2 φ(√2), where f″ = φ (2 - x²) = 0
    assert found.lipschitz == pytest.approx(top, abs=1e-15)
    assert found.steepest_at == pytest.approx(math.sqrt(2), abs=1e-7)
    x = found.minimum_at
    assert 0.5 * math.erfc(-x / math.sqrt(2)) == pytest.approx(
        -x * math.exp(-x * x / 2) / math.sqrt(2 * math.pi), abs=1e-15
    )


def test_closed_forms_of_others():
    assert (shape(curve("silu")).minimum, shape(curve("silu")).minimum_at) == pytest.approx(
        (-0.27846454276107, -1.27846454276107),
        abs=1e-13,  # -W(1/e) and -1 - W(1/e), Lambert's W
    )
    assert (shape(curve("hardswish")).minimum, shape(curve("hardswish")).minimum_at) == (-0.375, -1.5)
    assert (shape(curve("hardswish")).lipschitz, shape(curve("hardswish")).steepest_at) == (1.5, 3.0)
    assert (shape(curve("sigmoid")).lipschitz, shape(curve("sigmoid")).steepest_at) == (0.25, 0.0)
    assert (shape(curve("tanh")).lipschitz, shape(curve("tanh")).steepest_at) == (1.0, 0.0)
    assert (shape(curve("relu")).lipschitz, shape(curve("relu")).steepest_at) == (1.0, None)
    assert shape(curve("relu6")).steepest_at is None
    assert shape(curve("selu")).steepest_at == 0.0
    assert shape(curve("quick_gelu")).lipschitz == pytest.approx(shape(curve("silu")).lipschitz, abs=1e-12)


@every_row
def test_monotone_against_a_dense_look(name):
    steps = learned_oracle(name)(DENSE).detach().diff()
    assert shape(curve(name)).monotone == bool((steps >= -1e-12).all())


# --- kinks ------------------------------------------------------------------------------------------------------------


def derivative(name: str, order: int, x: float) -> float:
    point = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    y = learned_oracle(name)(point.reshape(1)).sum()
    for _ in range(order):
        (y,) = torch.autograd.grad(y, point, create_graph=True) if y.requires_grad else (torch.zeros(()),)
    return float(y.detach())


@every_row
def test_kinks_are_where_a_derivative_jumps(name):
    for at, order in TABLE[name].kinks:
        jumps = [abs(derivative(name, n, at + 1e-10) - derivative(name, n, at - 1e-10)) for n in range(order + 1)]
        assert max(jumps[:order], default=0.0) < 1e-8, (at, jumps)
        assert jumps[order] > (1e-7 if order == 0 else 1e-2), (at, jumps)


@every_row
def test_there_are_no_other_kinks(name):
    """Between neighbours that no listed kink separates, the second derivative moves no faster than the third allows."""
    x = torch.linspace(-12, 12, 24_001, dtype=torch.float64) + 1e-4
    point = x.clone().requires_grad_()
    (first,) = torch.autograd.grad(learned_oracle(name)(point).sum(), point, create_graph=True)
    second = torch.autograd.grad(first.sum(), point)[0] if first.requires_grad else torch.zeros_like(x)
    moved = second.diff().abs()
    apart = torch.ones_like(moved, dtype=torch.bool)
    for at, _ in TABLE[name].kinks:
        apart &= ~((x[:-1] <= at) & (at <= x[1:]))
    assert moved[apart].max().item() < 0.02
    assert first.detach().diff().abs()[apart].max().item() < 0.01


# --- zeros ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("std", [0.01, 1.0, 5.0])
@every_row
def test_near_zeros_against_a_dense_look(name, std):
    z = torch.linspace(-9, 9, 2_000_001, dtype=torch.float64)
    density = torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi) * (z[1] - z[0])
    quiet = learned_oracle(name)(z * std).detach().abs() <= 1e-3
    assert near_zero_share(curve(name), std) == pytest.approx(float(density[quiet].sum()), abs=2e-5)


def test_exact_zeros():
    shares = {name: exact_zero_share(curve(name)) for name in TABLE}
    below = 0.5 * math.erfc(3 / math.sqrt(2))
    expected = {"relu": 0.5, "relu2": 0.5, "relu6": 0.5, "hardswish": below}
    assert {n: s for n, s in shares.items() if s} == {n: pytest.approx(s, abs=1e-16) for n, s in expected.items()}
    assert exact_zero_share(curve("hardswish"), 30.0) == pytest.approx(0.5 * math.erfc(0.1 / math.sqrt(2)), abs=1e-16)


STEPS = 1_000_000


def reference(name: str, std: float, power: int) -> float:
    """E[f(X)^power] by the midpoint rule on a million points, out to 12 standard deviations; f is torch's."""
    z, density, step = points()
    return float((oracle(name)(z * std).detach() ** power * density).sum() * step)


@cache
def points() -> tuple[torch.Tensor, torch.Tensor, float]:
    """(the points, the normal density there, their distance)."""
    step = 24.0 / STEPS
    z = (torch.arange(STEPS, dtype=torch.float64) + 0.5) * step - 12.0
    return z, torch.exp(-0.5 * z * z) / math.sqrt(2 * math.pi), step


@pytest.mark.parametrize("std", [0.3, 1.0, 3.0])
@pytest.mark.parametrize("name", TABLE)
def test_moments_against_a_million_points(name, std):
    c = curve(name)
    for power in (1, 2):
        expected = reference(name, std, power)
        found = expectation(lambda x, p=power: c.f(x) ** p, std, c.kinks)
        assert found == pytest.approx(expected, rel=1e-8, abs=1e-9), power


@pytest.mark.parametrize(
    ("name", "power", "value"),
    [
        ("relu", 1, 1 / math.sqrt(2 * math.pi)), ("relu", 2, 0.5), ("relu2", 1, 0.5), ("relu2", 2, 1.5),
        ("identity", 2, 1.0), ("sigmoid", 1, 0.5), ("tanh", 1, 0.0), ("gelu", 1, 1 / (2 * math.sqrt(math.pi))),
        # E[x² Φ(x)²]: 1/3 + 1/(2π√3), by parts twice
        ("gelu", 2, 1 / 3 + 1 / (2 * math.pi * math.sqrt(3))),
        ("selu", 1, 0.0), ("selu", 2, 1.0),  # what its constants were made for
    ],
)  # fmt: skip
def test_closed_forms(name, power, value):
    c = curve(name)
    assert expectation(lambda x: c.f(x) ** power, 1.0, c.kinks) == pytest.approx(value, abs=1e-14)


@pytest.mark.parametrize("std", [1e-6, 1e-2, 17.0, 1e6])
@pytest.mark.parametrize(
    ("name", "exact"),
    [("silu", lambda x: x / (1 + mpmath.exp(-x))), ("gelu", lambda x: x * mpmath.ncdf(x)),
     ("sqrtsoftplus", lambda x: mpmath.sqrt(mpmath.log1p(mpmath.exp(x)))),
     ("mish", lambda x: x * mpmath.tanh(mpmath.log1p(mpmath.exp(x))))],
)  # fmt: skip
def test_widths_from_narrow_to_wide(name, exact, std):
    c = curve(name)
    marks = sorted(
        {0.0, *(s * end * scale for s in (-1, 1) for end in (1, 3, 6, 12) for scale in (1, 5, std, std / 30))}
    )
    marks = [-12 * std, *(m for m in marks if abs(m) < 12 * std), 12 * std]

    @cache  # both powers are integrated over the same nodes
    def at(x: mpmath.mpf) -> tuple[mpmath.mpf, mpmath.mpf]:
        return exact(x), mpmath.npdf(x, 0, std)

    for power in (1, 2):
        with mpmath.workdps(25):
            value = float(mpmath.quad(lambda x, p=power: at(x)[0] ** p * at(x)[1], marks))
        found = expectation(lambda x, p=power: c.f(x) ** p, std, c.kinks)
        assert found == pytest.approx(value, rel=1e-8), power


def test_weights_sum_to_one_and_stand_in_order():
    for std, breaks in ((1.0, ()), (0.1, (0.0, 6.0)), (30.0, (-1e-6,)), (1e6, ())):
        xs, weights = zip(*nodes(std, breaks), strict=True)
        assert math.fsum(weights) == pytest.approx(1.0, abs=1e-13)
        assert min(weights) >= 0.0
        assert max(abs(x) for x in xs) < 10 * std


def test_shares_of_a_normal_input():
    assert normal_share(-math.inf, math.inf) == 1.0
    assert normal_share(-1.0, 1.0) == pytest.approx(math.erf(1 / math.sqrt(2)), abs=1e-16)
    assert normal_share(-2.0, 6.0, 2.0) == pytest.approx(float(mpmath.ncdf(3) - mpmath.ncdf(-1)), abs=1e-15)
    for low, high in ((10.0, 11.0), (-11.0, -10.0), (8.0, math.inf), (-math.inf, -30.0)):  # without cancellation
        with mpmath.workdps(60):
            exact = float(mpmath.ncdf(high) - mpmath.ncdf(low))
        assert normal_share(low, high) == pytest.approx(exact, rel=1e-12)


@pytest.mark.parametrize("std", [0.3, 1.0, 50.0])
def test_a_jump_is_no_obstacle_where_it_is_known(std):
    found = expectation(lambda x: float(x > 0.7), std, (0.7,))
    assert found == pytest.approx(normal_share(0.7, math.inf, std), abs=1e-13)


# Powers of 2 and what lies between them, as far out as fp16 and bf16 tell 0 apart from what is nearly 0.
POINTS = [s * v for e in range(-24, 6) for v in (2.0**e, 1.37 * 2.0**e) for s in (1, -1)] + [-11.5, -9.25, -6.0, -13.4]


def errors(name: str, values: list[float]) -> dict[float, float]:
    """x → relative error, above what rounding x itself does."""
    out = {}
    with mpmath.workdps(200):
        for x, value in zip(POINTS, values, strict=True):
            exact = EXACT[name](mpmath.mpf(x))
            size = max(abs(exact), mpmath.mpf(2) ** -200)  # below any number of fp32 and bf16
            out[x] = float(abs(value - exact) / size) / (1 + x * x)  # e^(-x²) has some x² times the error of x
    return {x: error for x, error in out.items() if error > 1e-14}


def test_every_row_has_an_exact_oracle():
    assert set(EXACT) == set(TABLE)


@pytest.mark.parametrize("name", TABLE)
def test_curves_are_accurate_in_the_tails(name):
    assert errors(name, [curve(name).f(x) for x in POINTS]) == {}


@pytest.mark.parametrize("name", TABLE)
def test_tensors_too(name):
    learned = {n: torch.tensor(v, dtype=torch.float64) for n, v in TABLE[name].learned.items()}
    y = TABLE[name].accurate(torch.tensor(POINTS, dtype=torch.float64), with_learned(NAMESPACE, learned))
    assert errors(name, y.tolist()) == {}


@pytest.mark.parametrize("name", TABLE)
def test_both_forms_are_one_function(name):
    m = with_learned(NAMESPACE, {n: torch.tensor(v, dtype=torch.float64) for n, v in TABLE[name].learned.items()})
    x = torch.linspace(-20, 20, 4001, dtype=torch.float64)
    assert torch.allclose(TABLE[name].f(x, m), TABLE[name].accurate(x, m), rtol=0, atol=1e-14)


def test_nothing_raises_far_out():
    for name, row in TABLE.items():
        for x in (1e-300, 1e100, 1.7e308, math.inf):
            assert isinstance(curve(row.name).f(x), float), name
            assert isinstance(curve(row.name).f(-x), float), name
