"""Differences of gated units against double integrals and the places where their limits begin."""

import math

import pytest
import torch

from ffncli.block.analysis.gated import UNITS, gated_difference
from tests.block.analysis.test_gated import ORACLES
from tests.block.analysis.test_gated_facts import plane

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
