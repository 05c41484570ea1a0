"""Expectations under a normal density, against mpmath and against a million points."""

from __future__ import annotations

import math
from functools import cache

import mpmath
import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.analysis.curve import curve, expectation, nodes, normal_share
from tests.oracles.activations import oracle

POINTS = 1_000_000


def reference(name: str, std: float, power: int) -> float:
    """E[f(X)^power] by the midpoint rule on a million points, out to 12 standard deviations; f is torch's."""
    z, density, step = points()
    return float((oracle(name)(z * std).detach() ** power * density).sum() * step)


@cache
def points() -> tuple[torch.Tensor, torch.Tensor, float]:
    """(the points, the normal density there, their distance)."""
    step = 24.0 / POINTS
    z = (torch.arange(POINTS, dtype=torch.float64) + 0.5) * step - 12.0
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
