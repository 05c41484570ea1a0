"""The module made from a spec and the steps made from it are the same block, in every variant."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.activations import TABLE, Limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.run.engine.execute import run
from ffncli.run.verify.module import block_module
from tests.kernels.test_kernels import BLOCKS, drawn
from tests.oracles.modules import relative_error

MORE = {
    "post": FFNSpec(6, 24, "gelu", norm="layernorm", norm_position="post", residual=True),
    "branch": FFNSpec(6, 24, "swiglu", norm="rmsnorm", norm_position="branch", residual=True, residual_scale=0.3),
    "gemma": FFNSpec(6, 24, "geglu", norm="rmsnorm", norm_position="pre+branch", norm_weight="one_plus", residual=True),
    "no weight": FFNSpec(6, 24, "swiglu", norm="layernorm", norm_weight="none", norm_bias=False, residual=True),
    "bias alone": FFNSpec(6, 24, "swiglu", norm="rmsnorm", norm_bias=True),
    "parallel": FFNSpec(6, 24, "gelu", norm="layernorm", parallel=True),
    "identity experts": FFNSpec(6, 24, "swiglu", moe=MoE(4, 4, identity_experts=3, score_dtype="input")),
    "learned scale": FFNSpec(6, 24, "swiglu", norm="rmsnorm", learned_scale=True, residual=True),
    "latent": FFNSpec(6, 24, "relu2", bias=False, moe=MoE(4, 2, 1, latent=3)),
    "gated norm": FFNSpec(6, 24, "swiglu", norm="rmsnorm", norm_gate=2, residual=True),
    "norm behind": FFNSpec(
        6,
        24,
        "swiglu",
        norm="rmsnorm",
        norm_position="pre+branch",
        norm_weight="one_plus",
        post_norm_eps=1e-2,
        post_norm_weigh="input",
        residual=True,
    ),
    "shared limits": FFNSpec(
        6,
        24,
        "silu",
        gated=True,
        limits=Limits(act_high=0.2, up_limit=0.3),
        shared_limits=Limits(gate_cap=0.3, up_cap=0.2),
        moe=MoE(4, 2, 1),
    ),
    **{f"activation {name}": FFNSpec(6, 24, name) for name in TABLE},
}


@pytest.mark.parametrize("label", [*BLOCKS, *MORE])
def test_module_is_the_steps(label):
    spec = (BLOCKS | MORE)[label]
    block, generator = steps(spec), torch.Generator().manual_seed(0)
    weights = drawn(block, generator)
    inputs = {name: torch.randn(7, 6, generator=generator).double() for name in block_inputs(block)}
    module = block_module(spec, weights)
    expected = run(block, weights, inputs)
    assert relative_error(module(*inputs.values()), expected) < 1e-12
    shared = {p.data_ptr() for p in module.parameters()}
    assert all(t.data_ptr() in shared for t in weights.values())  # nothing was copied


def test_a_weight_that_is_not_the_blocks_is_an_error():
    spec = FFNSpec(6, 24, "gelu")
    weights = drawn(steps(spec), torch.Generator().manual_seed(0))
    with pytest.raises(RuntimeError, match=r"up\.bias"):
        block_module(spec, {name: t for name, t in weights.items() if name != "up.bias"})
