"""Gated units against torch's autograd, transformers' own code for gpt-oss, and the steps of a block."""

import math
from types import SimpleNamespace

import mpmath
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
from ffncli.block.analysis.gated import UNITS, factor, split
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation
from ffncli.errors import FFNError
from ffncli.models import catalog
from tests.oracles import exact


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
