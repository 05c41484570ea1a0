"""Gradients in float64, expert by expert, against autograd over the whole block in float64."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from ffncli.run.engine.reference import gradients_in_float64
from ffncli.run.engine.weights import random_weights
from tests.bench.fake_memory import FakeMemory

SPECS = {
    "dense": FFNSpec(8, 12, "gelu", bias=True),
    "experts": FFNSpec(8, 12, "swiglu", moe=MoE(16, 2, shared_experts=1)),
    "shares of inputs": FFNSpec(8, 12, "swiglu", moe=MoE(4, 2, weigh="input")),
    "identity experts": FFNSpec(8, 12, "swiglu", moe=MoE(4, 4, identity_experts=3)),
    "biases": FFNSpec(8, 12, "gelu", bias=True, moe=MoE(4, 2)),
}


def drawn(spec, tokens=5, dtype=torch.float32):
    """(its steps, weights, x and the gradient of the output)"""
    block, generator = kernel_steps(steps(spec)), torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, dtype)
    x, g = (torch.randn(tokens, spec.d_model, generator=generator).to(dtype) for _ in range(2))
    return block, weights, x, g


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_they_are_those_of_the_whole_block(spec, dtype):
    block, weights, x, g = drawn(spec, dtype=dtype)
    leaves = {name: tensor.double().requires_grad_() for name, tensor in {"x": x, **weights}.items()}
    out = run(block, leaves, {"x": leaves["x"]})
    expected = torch.autograd.grad(out, list(leaves.values()), g.double(), allow_unused=True)
    found, gradients = gradients_in_float64(block, weights, {"x": x}, g)
    torch.testing.assert_close(found, out.detach(), rtol=0, atol=0)
    assert set(gradients) == set(leaves)
    for name, gradient in zip(leaves, expected, strict=True):
        wanted = torch.zeros_like(leaves[name]) if gradient is None else gradient
        torch.testing.assert_close(gradients[name], wanted, rtol=1e-13, atol=1e-14, msg=name)
    _, alone = gradients_in_float64(block, weights, {"x": x}, g, of_weights=False)
    assert list(alone) == ["x"]
    assert torch.equal(alone["x"], gradients["x"])


def test_one_expert_is_widened_at_a_time():
    """In bf16 DeepSeek-V3's layer is 23 GB: in float64 90 GB, of which only the gradients stay."""
    d_model, d_ff, experts = 64, 256, 32
    block, weights, x, g = drawn(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(experts, 4)), tokens=4)
    expert = 8 * 3 * d_model * d_ff
    peaks = {}
    for of_weights in (True, False):
        with FakeMemory() as memory:
            gradients_in_float64(block, weights, {"x": x}, g, of_weights)
        peaks[of_weights] = memory.peak
    assert expert < peaks[False] < 3 * expert
    assert experts * expert < peaks[True] < (experts + 4) * expert
