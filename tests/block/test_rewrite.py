"""Other versions of a block: what is changed, and that nothing else is."""

from __future__ import annotations

from dataclasses import replace

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.rewrite import with_biases, without_nonlinearity
from ffncli.block.steps import Activation, Experts, Linear, walk

GATED = FFNSpec(8, 16, "silu", gated=True, clamp=7.0)


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
