"""Other versions of a block: what is changed and that nothing else is; a final layer, a merge-add, and the picture."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.block.activations import hard_limits
from ffncli.block.analysis.flow import flow
from ffncli.block.cost import cost
from ffncli.block.recipe import FFNSpec, MoE, final_layer, merged_first, steps, with_biases, without_nonlinearity
from ffncli.block.shard import shard
from ffncli.block.steps import (
    OPS,
    Activation,
    Experts,
    Linear,
    block_inputs,
    ffn_span,
    input_shapes,
    parameters,
    right_hand_side,
    shapes,
    walk,
)
from ffncli.errors import FFNError

GATED = FFNSpec(8, 16, "silu", gated=True, limits=hard_limits(7.0))


def test_without_a_nonlinearity_limits_go_too() -> None:
    block = steps(GATED)
    linear = without_nonlinearity(block)
    assert [s.op for s in linear if isinstance(s.op, Activation)] == [Activation("identity")] * 2
    assert [s.output for s in linear] == [s.output for s in block]
    assert [s for s in linear if not isinstance(s.op, Activation)] == [
        s for s in block if not isinstance(s.op, Activation)
    ]


def test_biases_everywhere_or_nowhere_inside_experts_too() -> None:
    for spec in (GATED, replace(GATED, moe=MoE(4, 2))):
        for bias in (True, False):
            changed = with_biases(steps(spec), bias)
            found = {name: s.op.bias for name, s in walk(changed) if isinstance(s.op, Linear)}
            assert set(found.values()) == {bias}
            assert any("[e]" in name for name in found) == any(isinstance(s.op, Experts) for s in changed)
            assert with_biases(with_biases(changed, not bias), bias) == changed


def test_a_final_layer_is_a_linear_and_a_softmax():
    layer = final_layer("x", 512, 32_000, True)
    assert [right_hand_side(step, layer) for step in layer] == ["x · W + b", "softmax(logits)"]
    assert right_hand_side(final_layer("x", 8, 9, False)[0], layer) == "x · W"
    sizes = {name: tuple(axis.size for axis in axes) for name, axes in parameters(layer).items()}
    assert sizes == {"logits.weight": (32_000, 512), "logits.bias": (32_000,)}
    assert shapes(layer, input_shapes(layer, (2, 3)))["probs"] == (2, 3, 32_000)
    assert ffn_span(layer) == ("x", "logits")
    # 2·512 per logit, 1 for the bias and 1 for the softmax's score.
    assert cost(layer, 3).flops == 3 * 32_000 * (2 * 512 + 2)


@pytest.mark.parametrize("size", [0, -1, 2**31, True])
def test_a_vocabulary_is_a_size(size):
    with pytest.raises(FFNError, match="vocab must be"):
        final_layer("x", 8, size, True)


def test_a_block_with_a_final_layer_keeps_its_span():
    block = steps(FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True))
    whole = (*block, *final_layer(block[-1].output, 8, 30, False))
    assert ffn_span(whole) == ffn_span(block) == ("norm", "down")
    assert right_hand_side(whole[-2], whole) == "out · W"
    assert [s.output for s in shard(whole, 0, 2)].count("down.sum") == 1
    assert parameters(shard(whole, 0, 2))["logits.weight"][0].size == 30


def test_choosing_some_still_prints_what_is_chosen():
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 4)))
    assert right_hand_side(block[1], block) == "normalise(top4(softmax(router)))"
    block = steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 2, renormalise=False)))
    assert right_hand_side(block[1], block) == "top2(softmax(router))"


def test_the_merge_add_has_two_inputs():
    block = merged_first(steps(FFNSpec(8, 16, "swiglu", norm="rmsnorm")))
    assert block_inputs(block) == ("x", "attention")
    assert right_hand_side(block[0], block) == "x + attention"
    assert right_hand_side(block[1], block) == "rmsnorm(merged)"
    assert ffn_span(block) == ("norm", "down")


def test_a_plain_block_flows_in_one_line():
    assert flow(steps(FFNSpec(512, 2048, "gelu"))) == (
        "x 512 ──W1──▶ up 2048 ──gelu──▶ act 2048 ──W2──▶ down 512",
    )  # fmt: skip


def test_branches_begin_lines():
    block = merged_first(steps(FFNSpec(4096, 11008, "swiglu", norm="rmsnorm")))
    assert flow(block, {"gate": "D", "up": "L", "hidden": "H", "down": "Y"}) == (
        "x 4096, attention 4096 ──+──▶ merged 4096 ──rmsnorm──▶ norm 4096",
        "norm ──W1──▶ gate (D) 11008 ──silu──▶ act 11008",
        "norm ──W3──▶ up (L) 11008",
        "act, up ──⊙──▶ hidden (H) 11008 ──W2──▶ down (Y) 4096",
    )
    residual = steps(FFNSpec(8, 16, "relu", norm="layernorm", norm_position="post", residual=True, dropout=0.1))
    assert flow((*residual, *final_layer("post_norm", 8, 30, True))) == (
        "x 8 ──W1──▶ up 16 ──relu──▶ act 16 ──dropout 0.1──▶ dropout 16 ──W2──▶ down 8",
        "x, down ──+──▶ out 8 ──layernorm──▶ post_norm 8 ──W──▶ logits 30 ──softmax──▶ probs 30",
    )


@pytest.mark.parametrize(
    ("unit", "gate", "up"),
    [
        ("swiglu_oai", "min 7, quick_gelu", "clip -7 to 7, + 1"),
        ("deepseek_v4", "min 10, silu", "clip -10 to 10"),
        ("swiglustep", "silu, min 7", "clip -7 to 7"),
        ("situ", "silu, soft cap 4", "soft cap 25"),
    ],
)
def test_limits_are_on_the_arrows_in_their_order(unit, gate, up):
    assert flow(steps(FFNSpec(8, 16, unit))) == (
        f"x 8 ──W1──▶ gate 16 ──{gate}──▶ act 16",
        f"x ──W3──▶ up 16 ──{up}──▶ lift 16",
        "act, lift ──⊙──▶ hidden 16 ──W2──▶ down 8",
    )


def test_every_op_flows():
    moe = FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True, residual_scale=0.5, gate_scale=2.0, dropout=0.1,
                  moe=MoE(4, 2, shared_experts=1, shared_gate=True))  # fmt: skip
    block = shard(steps(moe), 0, 2)
    assert {type(step.op) for _, step in walk(block)} == set(OPS)
    text = "\n".join(flow(block))
    for step in block:
        assert step.output in text
    for label in ("softmax, top 2", "4 experts", "all_reduce 2", "+ 0.5·", "sigmoid"):
        assert f"──{label}──▶" in text, text
