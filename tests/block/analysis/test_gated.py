"""Gated units against torch's autograd, transformers' own code for gpt-oss, and the steps of a block."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts

from ffncli.block.activations import CANONICAL, GATED, LIMITED, TABLE, resolve
from ffncli.block.analysis.gated import UNITS, factor, split
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation
from ffncli.errors import FFNError
from ffncli.models import catalog


def gpt_oss(gate, up):
    stacked = torch.stack((gate, up), -1).flatten(-2)  # interleaved, as its weights are
    return GptOssExperts._apply_gate(SimpleNamespace(limit=7.0, alpha=1.702), stacked)


ORACLES = {
    "swiglu": lambda gate, up: functional.silu(gate) * up,
    "geglu": lambda gate, up: functional.gelu(gate) * up,
    "geglu_tanh": lambda gate, up: functional.gelu(gate, approximate="tanh") * up,
    "reglu": lambda gate, up: functional.relu(gate) * up,
    "glu": lambda gate, up: functional.glu(torch.stack((up, gate), -1)).squeeze(-1),
    "bilinear": lambda gate, up: gate * up,
    "swiglu_oai": gpt_oss,
}
EDGES = [-7.5, -7.0, math.nextafter(-7.0, 0), -1.0, -1e-3, 0.0, 0.5, 3.0, math.nextafter(7.0, 0), 7.0, 7.1, 40.0]
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


def test_gpt_oss_of_the_catalog_has_the_clamped_unit():
    spec = catalog.find("gpt-oss-20b").main.spec
    unit = UNITS["swiglu_oai"].spec(spec.d_model, spec.d_ff)
    assert (spec.activation, spec.clamp, spec.up_plus) == (unit.activation, unit.clamp, unit.up_plus)


def test_formulas():
    assert UNITS["swiglu"].formula == "silu(gate) ⊙ up"
    assert UNITS["bilinear"].formula == "gate ⊙ up"
    assert UNITS["swiglu_oai"].formula == "quick_gelu(min(gate, 7)) ⊙ (clip(up, -7, 7) + 1)"


@pytest.mark.parametrize(
    ("name", "text"),
    [("swiglu", "2 mul, 1 sigmoid"), ("geglu", "4 mul, 1 add, 1 erf"), ("reglu", "1 mul, 1 compare, 1 select"),
     ("bilinear", "1 mul"), ("glu", "1 mul, 1 sigmoid"), ("geglu_tanh", "7 mul, 2 add, 1 tanh"),
     ("swiglu_oai", "3 mul, 1 add, 3 compare, 3 select, 1 sigmoid")],
)  # fmt: skip
def test_operations_by_hand(name, text):
    assert UNITS[name].operations().text == text


def test_factors_know_their_kinks():
    unit = UNITS["swiglu_oai"]
    assert factor(unit.gate).row.kinks == ((7.0, 1),)
    assert factor(unit.up).row.kinks == ((-7.0, 1), (7.0, 1))
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
def test_no_other_command_takes_a_limited_unit_for_an_activation(name):
    """It would leave out the limits."""
    for ask in (resolve, lambda text: FFNSpec(4, 8, text)):
        with pytest.raises(FFNError) as error:
            ask(name.upper())
        assert "limits gate and up" in error.value.message
        assert "ffn activations swiglu_oai" in error.value.hint
