from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.activations import NO_LIMITS, Limits, hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs, input_shapes, shapes
from ffncli.errors import FFNError


def names(**choices) -> list[str]:
    return [s.output for s in steps(FFNSpec(4, 8, **choices))]


def test_norm_positions():
    norm = {"norm": "rmsnorm", "residual": True}
    assert names(**norm) == ["norm", "up", "act", "down", "out"]
    assert names(**norm, norm_position="post") == ["up", "act", "down", "out", "post_norm"]
    assert names(**norm, norm_position="branch") == ["up", "act", "down", "post_norm", "out"]
    assert names(**norm, norm_position="pre+branch") == ["norm", "up", "act", "down", "post_norm", "out"]


def test_variants():
    assert names(dropout=0.1) == ["up", "act", "dropout", "down"]
    assert names(gated=True, sub_norm=True) == ["gate", "up", "act", "hidden", "sub_norm", "down"]
    assert names(gated=True, limits=hard_limits(7.0, 1.0)) == ["gate", "up", "act", "lift", "hidden", "down"]
    assert names(gated=True, moe=MoE(4, 2, 2, shared_gate=True))[3:] == [
        *(f"shared.{n}" for n in ("gate", "up", "act", "hidden", "down")),
        *("shared_gate", "shared_score", "shared", "moe"),
    ]


def test_defaults_follow_the_gate():
    assert FFNSpec(4, 8).bias is True
    assert FFNSpec(4, 8, "swiglu").bias is False
    assert FFNSpec(4, 8, "swiglu") == FFNSpec(4, 8, "silu", gated=True)
    assert FFNSpec(4, 8, "gelu_new").activation == "gelu_tanh"
    assert FFNSpec(4, 8, norm="layernorm").norm_bias is True
    assert FFNSpec(4, 8, norm="rmsnorm").norm_bias is False


@pytest.mark.parametrize(
    ("choices", "message"),
    [
        ({"d_model": 0}, "d_model must be a whole number from 1 to"),
        ({"d_ff": -8}, "d_ff must be a whole number from 1 to"),
        ({"d_ff": 10**30}, "d_ff must be a whole number from 1 to"),
        ({"d_ff": 2**31}, "d_ff must be a whole number from 1 to"),
        ({"residual_scale": True}, "residual_scale must be a number"),
        ({"moe": MoE(8, 2, groups=2, top_groups=3)}, "cannot be chosen"),
        ({"d_model": 4.0}, "d_model must be a whole number"),
        ({"d_model": True}, "d_model must be a whole number"),
        ({"dropout": 1.0}, "dropout must be"),
        ({"norm_eps": float("nan")}, "norm eps"),
        ({"limits": hard_limits(0.0)}, "the limit of the gate must be positive"),
        ({"limits": Limits(up_cap=-1.0)}, "the soft cap of up must be positive"),
        ({"shared_limits": Limits(act_high=float("nan"))}, "activated gate must be a number"),
        ({"activation": "gelu", "limits": Limits(gate_cap=4.0)}, "which gelu has not"),
        ({"activation": "gelo"}, "unknown activation"),
        ({"activation": "swiglu", "gated": False}, "cannot be plain"),
        ({"moe": MoE(4, 5)}, "top_k"),
        ({"moe": MoE(0, 1)}, "experts must be"),
        ({"moe": MoE(6, 2, groups=4)}, "do not divide"),
        ({"moe": MoE(8, 4, groups=4, top_groups=1)}, "cannot be chosen"),
        ({"moe": MoE(8, 4, shared_experts=-1)}, "shared_experts"),
        ({"moe": MoE(8, 4, shared_scale=float("nan"))}, "shared_scale must be a number"),
        ({"moe": MoE(8, 4, identity_experts=-1)}, "identity_experts must be"),
        ({"moe": MoE(8, 4, identity_experts=2, groups=2, top_groups=2)}, "in groups cannot"),
    ],
)
def test_impossible_specs_are_refused(choices, message):
    with pytest.raises(FFNError, match=message):
        FFNSpec(**{"d_model": 4, "d_ff": 8, **choices})


def test_values_at_the_edge_are_taken():
    assert FFNSpec(4, 2**31 - 1, norm="rmsnorm", norm_eps=0.0).d_ff == 2**31 - 1


def test_shared_experts_have_one_width_together():
    assert FFNSpec(4, 8, moe=MoE(4, 2, 3)).shared_width == 24
    assert FFNSpec(4, 8, moe=MoE(4, 2, 3, shared_d_ff=10)).shared_width == 10


def test_details_of_the_recipe():
    by_name = {
        s.output: s for s in steps(FFNSpec(4, 8, gated=True, sub_norm=True, dropout=0.1, limits=Limits(up_plus=1.0)))
    }
    assert by_name["hidden"].inputs == ("act", "lift")
    assert by_name["sub_norm"].op.kind == "rmsnorm"
    assert (by_name["dropout"].inputs, by_name["down"].inputs) == (("sub_norm",), ("dropout",))
    assert steps(FFNSpec(4, 8, parallel=True))[-1].inputs == ("x", "attention", "down")
    clamped = {s.output: s.op for s in steps(FFNSpec(4, 8, gated=True, limits=hard_limits(7.0)))}
    assert (clamped["act"].low, clamped["act"].high) == (None, 7.0)  # gpt-oss: the gate has no lower limit
    assert (clamped["lift"].low, clamped["lift"].high) == (-7.0, 7.0)


specs = st.builds(
    FFNSpec,
    d_model=st.integers(1, 40),
    d_ff=st.integers(1, 40),
    activation=st.sampled_from(["relu", "gelu", "silu", "xielu", "identity"]),
    gated=st.booleans(),
    bias=st.booleans(),
    dropout=st.sampled_from([0.0, 0.1]),
    norm=st.sampled_from(["none", "layernorm", "rmsnorm"]),
    norm_position=st.sampled_from(["pre", "post", "branch", "pre+branch"]),
    norm_weight=st.sampled_from(["none", "plain", "one_plus"]),
    residual=st.booleans(),
    parallel=st.booleans(),
    sub_norm=st.booleans(),
    limits=st.sampled_from([NO_LIMITS, hard_limits(7.0), Limits(act_high=7.0, up_limit=7.0, up_plus=1.0, up_cap=3.0)]),
    moe=st.sampled_from([None, MoE(4, 2), MoE(6, 3, 2, shared_gate=True, correction=True, groups=3, top_groups=2)]),
)


@given(spec=specs, tokens=st.integers(1, 5))
def test_every_recipe_is_a_well_formed_block(spec, tokens):
    block = steps(spec)
    known = shapes(block, input_shapes(block, (tokens,)))
    assert known[block[-1].output] == (tokens, spec.d_model)
    assert block_inputs(block) == (("x", "attention") if spec.parallel else ("x",))
    assert len({s.output for s in block}) == len(block)
