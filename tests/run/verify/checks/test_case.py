"""The pieces that checks share: the reference in float64, tolerances, tokens that went elsewhere."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.kernels.kernel import kernel_steps
from ffncli.models.model import Layer, block_model
from ffncli.run.engine.execute import run
from ffncli.run.engine.reference import in_float64, output_and_experts, same_experts
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import tolerance_for
from ffncli.run.verify.checks.case import CheckedBlock
from tests.bench.fake_memory import FakeMemory

SPECS = [
    FFNSpec(8, 12, "gelu"),
    FFNSpec(8, 12, "swiglu", moe=MoE(16, 2, 1)),
    FFNSpec(8, 12, "swiglu", moe=MoE(4, 4, identity_experts=3)),
]


@pytest.mark.parametrize("spec", SPECS, ids=["dense", "experts", "identity experts"])
def test_in_float64_is_the_reference_in_float64(spec):
    block = kernel_steps(steps(spec))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator)
    x = torch.randn(5, 8, generator=generator)
    found, went = in_float64(block, weights, {"x": x})
    doubled = {name: tensor.double() for name, tensor in weights.items()}
    assert torch.equal(found, run(block, doubled, {"x": x.double()}))
    theirs = output_and_experts(block, doubled, {"x": x.double()})[1]
    assert (went is None) == (theirs is None)
    assert went is None or torch.equal(went, theirs)


def test_in_float64_widens_one_expert_at_a_time():
    """All used experts of DeepSeek-V3's layer in float64 would be 90 GB, of Mixtral's 11 GB."""
    d_model, d_ff, tokens = 64, 256, 4
    block = kernel_steps(steps(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(16, 4))))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(tokens, d_model, generator=torch.Generator().manual_seed(1))
    with FakeMemory() as memory:
        in_float64(block, weights, {"x": x})
    expert = 8 * 3 * d_model * d_ff
    assert expert < memory.peak < 1.3 * expert
    assert memory.largest == 8 * d_model * d_ff


def case(spec: FFNSpec, dtype: torch.dtype) -> CheckedBlock:
    layer = Layer("block", 0, spec)
    return CheckedBlock(block_model(spec, "t"), layer, steps(spec), {}, {}, dtype)


def test_a_router_in_float32_limits_what_float64_can_agree_to():
    mixed = case(SPECS[1], torch.float64)
    assert mixed.judge("kernels").tolerance == tolerance_for(torch.float64, 12, torch.float32)
    assert mixed.judge("collapse", torch.float64).tolerance == tolerance_for(torch.float64, 12)  # one expert alone
    assert case(SPECS[0], torch.float64).judge("kernels").tolerance == tolerance_for(torch.float64, 12)
    own = case(FFNSpec(8, 12, "swiglu", moe=MoE(4, 2, score_dtype="input")), torch.float64)
    assert own.judge("kernels").tolerance == tolerance_for(torch.float64, 12)


def test_tokens_that_went_to_the_same_experts():
    a = torch.tensor([[True, False], [True, False], [False, True]])
    b = torch.tensor([[True, False], [False, True], [False, True]])
    same, note = same_experts(a, b, 3)
    assert same.tolist() == [True, False, True]
    assert note == "1 of 3 tokens left out: rounding sent them to other experts"
    assert same_experts(None, b, 2)[0].tolist() == [True, True]
    assert same_experts(a, a, 3)[1] == ""
