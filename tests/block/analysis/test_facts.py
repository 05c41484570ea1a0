"""The record of one activation, and what texts state of its values."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import init

from ffncli.block.activations import TABLE
from ffncli.block.analysis.facts import NARROWEST, WIDEST, check, claim, facts
from ffncli.errors import FFNError
from tests.oracles.activations import autograd_slope, oracle

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
    import ffncli

    assert ffncli.activation("GELU-new", at=(1.0,)) == facts("gelu_tanh", (1.0,))
    for name, said in (("gelo", "unknown activation 'gelo'"), ("swiglu", "is a gated unit")):
        with pytest.raises(FFNError, match=said):
            ffncli.activation(name)


@pytest.mark.parametrize("std", [0.0, NARROWEST / 2, WIDEST * 2, math.nan, math.inf])
def test_a_width_that_says_nothing_is_refused(std):
    with pytest.raises(FFNError, match="--std must be from 1e-06 to 1e"):
        facts("gelu", std=std)


# --- stated values ----------------------------------------------------------------------------------------------------

STATED = "0.12=0.066 -0.08=-0.037 0.25=0.150 0.18=0.103 0.19=0.109 0.21=0.115 -0.15=-0.058 0.28=0.168".split()


def test_worked_values_of_gelu_are_right_and_wrong():
    found = check("gelu", [claim(text, "--expect") for text in STATED])
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
    (found,) = check("relu", [claim(text, "--expect")])
    assert found.right is right


@pytest.mark.parametrize("text", ["", "=", "1", "1=", "=1", "a=b", "1=nan", "inf=1", "1=2=3", "1=1e999999", "1e99=1"])
def test_what_is_no_claim_is_refused(text):
    with pytest.raises(FFNError, match=r"^--expect: .* is not X=Y, two numbers"):
        claim(text, "--expect")
