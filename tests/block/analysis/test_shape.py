"""The shape of every activation: against a dense look at torch's own functions, closed forms, and autograd."""

from __future__ import annotations

import math

import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import curve, exact_zero_share, near_zero_share, shape
from tests.oracles.activations import autograd_slope, oracle

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
