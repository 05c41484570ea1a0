"""Blocks of every kind, with weights and inputs in float64 and the two computations of them that the house has."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ffncli.block.activations import TABLE, UNITS_WITH_LIMITS, Limits, hard_limits
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.steps import id_inputs, input_shapes
from ffncli.models.model import block_model
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from ffncli.run.export.problem import ExportProblem, Part, problem_of
from ffncli.run.verify.module import block_module

_MIX = FFNSpec(8, 12, "swiglu", norm="rmsnorm", residual=True)
DENSE = {
    **{f"{name}, plain": FFNSpec(8, 12, name) for name in TABLE},
    "gated": FFNSpec(8, 12, "swiglu", norm="rmsnorm", residual=True),
    "bias, after": FFNSpec(8, 12, "geglu", bias=True, norm="layernorm", norm_position="post", residual=True),
    "dropout": FFNSpec(8, 12, "gelu", dropout=0.2, norm="layernorm", residual=True, residual_scale=0.22),
    "parallel": FFNSpec(8, 12, "gelu_tanh", norm="layernorm", parallel=True),
    "gemma": FFNSpec(8, 12, "geglu_tanh", norm="rmsnorm", norm_position="pre+branch", norm_weight="one_plus"),
    "bare norms": FFNSpec(8, 12, "reglu", norm="layernorm", norm_weight="none", norm_bias=False, sub_norm=True),
    "gated norm": FFNSpec(8, 12, "swiglu", norm="rmsnorm", norm_gate=3, learned_scale=True, gate_scale=1.5),
    "weights on inputs": FFNSpec(
        8, 12, "glu", norm="rmsnorm", norm_position="branch", norm_bias=True, post_norm_weigh="input"
    ),
    **{name: FFNSpec(8, 12, name) for name in UNITS_WITH_LIMITS},
    "act limited": FFNSpec(8, 12, "gelu", limits=Limits(act_high=0.1)),
}  # fmt: skip
MIXTURES = {
    "mixtral": replace(_MIX, moe=MoE(4, 2)),
    "gpt-oss": replace(
        _MIX, activation="quick_gelu", gated=True, bias=True, limits=hard_limits(0.3, 1.0),
        moe=MoE(4, 2, order="choose_first", renormalise=False, router_bias=True, correction=True),
    ),
    "deepseek": replace(
        _MIX,
        moe=MoE(
            8, 2, 1, shared_d_ff=20, score="sigmoid", groups=4, top_groups=2, group_best=2, correction=True, scale=2.5
        ),
    ),
    "zero outside": replace(_MIX, moe=MoE(8, 3, groups=4, top_groups=2, zero_outside=True, eps=1e-2)),
    "shared gate": replace(_MIX, moe=MoE(4, 2, 1, shared_gate=True, shared_scale=0.5, router_scale=3.0)),
    "identities": replace(_MIX, moe=MoE(4, 3, identity_experts=3, score_dtype="input", renormalise=False)),
    "weighed inputs": replace(_MIX, moe=MoE(4, 2, 1, weigh="input", score="sqrtsoftplus", score_dtype="input")),
    "latent": replace(
        _MIX, norm_weight="one_plus", post_norm_weigh="input", activation="xielu",
        moe=MoE(4, 2, latent=6, latent_norm=True, expert_norm=True, mixed_norm=True, mixed_bias=True),
    ),
    "one by one": replace(_MIX, moe=MoE(4, 2, order="one_by_one", threshold=0.02)),
    "shared routed": replace(_MIX, learned_scale=True, moe=MoE(4, 2, 2, shared_routed=True)),
    "by ids": replace(_MIX, moe=MoE(4, 2, lookup=11)),
    "router mlp": replace(_MIX, moe=MoE(4, 2, router_width=5, router_carries=True, skip_experts=1)),
}  # fmt: skip
_NO_MODULE = {"router mlp", "dropout"}  # of the second computation: it has none, or not in this mode


def problem(
    spec: FFNSpec, part: Part = "block", dtype: str = "fp64", tokens: tuple[int, ...] = (2, 5)
) -> ExportProblem:
    return problem_of(block_model(spec, "a block"), part, dtype_name=dtype, tokens=tokens)


def drawn(block: ExportProblem) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(weights in which no norm, bias or correction is trivial, inputs), both in float64."""
    generator = torch.Generator().manual_seed(3)
    weights = {
        name: tensor + 0.2 * torch.rand(tensor.shape, generator=generator) if tensor.is_floating_point() else tensor
        for name, tensor in random_weights(block.steps, generator, torch.float64).items()
    }
    ids, inputs = id_inputs(block.steps), {}
    for name, shape in input_shapes(block.steps, (5,)).items():
        random = torch.randn(shape, generator=generator, dtype=torch.float64)
        inputs[name] = torch.arange(5).reshape(5, 1) if name in ids else 3 * random
    return weights, inputs


def expected(name: str, block: ExportProblem, weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor]) -> Tensor:
    """The output step by step; it agrees with the module that is made from the spec and not from the steps."""
    out = run(block.steps, weights, inputs)
    if block.part == "block" and name not in _NO_MODULE:
        given = (inputs.get(one) for one in ("x", "attention", "token_ids"))
        close(block_module(block.spec, weights)(*given), out)
    return out


def close(got: Tensor, want: Tensor, most: float = 1e-12) -> None:
    """max|a - b| / max|b| is at most that."""
    assert got.shape == want.shape
    assert float((got.double() - want).abs().max() / want.abs().max()) <= most
