"""The referee's references of gradients, against torch's numerical derivatives."""

from dataclasses import replace

import pytest
import torch

from ffncli.block.recipe import steps
from ffncli.block.steps import block_inputs
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.reference import gradients_in_float64, in_float64
from tests.run.export.blocks import DENSE, MIXTURES

NAMES = (
    "gelu, plain", "silu, plain", "softplus, plain", "mish, plain", "quick_gelu, plain", "bias, after", "gated",
    "weights on inputs", "parallel", "swiglu_oai", "swiglustep", "situ",
    "mixtral", "gpt-oss", "deepseek", "zero outside", "shared gate", "identities", "weighed inputs", "shared routed",
)  # fmt: skip
assert len(NAMES) == 20


@pytest.mark.parametrize("name", NAMES)
def test_the_reference_is_the_numerical_derivative(name):
    """gradcheck compares a Function's backward pass with differences of its forward pass; in mixtures, along random
    directions of all weights. Scores in float32, which many routers have, would be too coarse for differences."""
    spec = (DENSE | MIXTURES)[name]
    spec = replace(spec, moe=spec.moe and replace(spec.moe, score_dtype="input"))
    ffn = kernel_steps(steps(replace(spec, norm="none", residual=False, norm_position="pre", parallel=False)))
    entry = block_inputs(ffn)[0]
    generator = torch.Generator().manual_seed(7)
    named = {weight: axes for step in ffn for weight, axes in step.parameters().items()}
    tensors = [
        torch.randn([axis.size for axis in axes], generator=generator, dtype=torch.float64).requires_grad_()
        for axes in named.values()
    ]
    x = torch.randn(3, spec.d_model, generator=generator, dtype=torch.float64).requires_grad_()

    class Reference(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, *tensors):
            ctx.save_for_backward(x, *tensors)
            return in_float64(ffn, dict(zip(named, tensors, strict=True)), {entry: x})[0]

        @staticmethod
        def backward(ctx, dy):
            x, *tensors = ctx.saved_tensors
            weights = dict(zip(named, tensors, strict=True))
            by_name = gradients_in_float64(ffn, weights, {entry: x}, dy)[1]
            return by_name[entry], *(by_name[weight] for weight in named)

    assert torch.autograd.gradcheck(Reference.apply, (x, *tensors), fast_mode=spec.moe is not None)
