"""Counts against torch's own: numel of modules, FlopCounterMode on meta tensors, closed forms."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from ffncli.block.activations import hard_limits
from ffncli.block.cost import Cost, cost, step_costs
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import shard
from ffncli.models import catalog
from tests.oracles import modules
from tests.oracles.counts import DENSE

sizes = st.integers(1, 300)


def counted_flops(module: torch.nn.Module, d_model: int, tokens: int) -> int:
    with FlopCounterMode(display=False) as counter:
        module(torch.empty(tokens, d_model, device="meta"))
    return counter.get_total_flops()


@given(d_model=sizes, d_ff=sizes, gated=st.booleans(), bias=st.booleans(), tokens=st.integers(1, 9))
def test_params_and_matmul_flops_are_torchs(d_model, d_ff, gated, bias, tokens):
    found = cost(steps(FFNSpec(d_model, d_ff, gated=gated, bias=bias)), tokens)
    with torch.device("meta"):
        module = (modules.Gated if gated else modules.Plain)(d_model, d_ff, bias)
    assert found.params == found.params_active == sum(p.numel() for p in module.parameters())
    assert found.matmul_flops == counted_flops(module, d_model, tokens)


@pytest.mark.parametrize("name", DENSE)
def test_matmul_flops_of_known_models_are_torchs(name):
    spec = catalog.find(name).model.main.spec
    with torch.device("meta"):
        module = (modules.Gated if spec.gated else modules.Plain)(spec.d_model, spec.d_ff, spec.bias)
    assert cost(steps(spec), 7).matmul_flops == counted_flops(module, spec.d_model, 7)


@given(d_model=sizes, d_ff=sizes, experts=st.integers(1, 20), shared=st.integers(0, 3), data=st.data())
def test_moe_closed_form(d_model, d_ff, experts, shared, data):
    top_k = data.draw(st.integers(1, experts))
    found = cost(steps(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(experts, top_k, shared))))
    expert, router = 3 * d_model * d_ff, d_model * experts
    assert found.params == experts * expert + router + shared * expert
    assert found.params_active == top_k * expert + router + shared * expert
    assert found.matmul_flops == 2 * found.params_active  # every active weight is one multiply-add per token


@given(d_model=sizes, d_ff=sizes, experts=st.integers(1, 6), shared=st.integers(0, 2))
def test_moe_params_are_torchs(d_model, d_ff, experts, shared):
    with torch.device("meta"):
        module = modules.MoE(d_model, d_ff, experts, 1, shared)
    found = cost(steps(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(experts, 1, shared))))
    assert found.params == sum(p.numel() for p in module.parameters())


def test_elementwise_by_hand():
    # 3 tokens, d_model 4, d_ff 8. Norm 7·4, biases 8 + 4, activation 8, residual add 4, per token.
    spec = FFNSpec(4, 8, "gelu", norm="layernorm", residual=True, dropout=0.1)
    assert cost(steps(spec), 3).elementwise_flops == 3 * (7 * 4 + 8 + 4 + 8 + 4)
    # RMSNorm 4·4, activation 8, multiply 8, scaled add 2·4.
    spec = FFNSpec(4, 8, "swiglu", norm="rmsnorm", residual=True, residual_scale=0.5)
    assert cost(steps(spec)).elementwise_flops == 4 * 4 + 8 + 8 + 2 * 4
    # clamped: act 8, lift 8, multiply 8, three biases.
    spec = FFNSpec(4, 8, "quick_gelu", gated=True, bias=True, limits=hard_limits(7.0, 1.0))
    assert cost(steps(spec)).elementwise_flops == 8 + 8 + 8 + 8 + 8 + 4
    # 5 experts, top 2: score 5, renormalise 2; per expert act 8 + multiply 8; mixing 2·4 multiplies and 1·4 adds.
    spec = FFNSpec(4, 8, "swiglu", moe=MoE(5, 2))
    assert cost(steps(spec)).elementwise_flops == 5 + 2 + 2 * (8 + 8) + 2 * 4 + 4
    experts = 2 * (8 + 8) + 2 * 4 + 4
    for moe, routing in (
        (MoE(5, 2, correction=True), 5 + 5 + 2),
        (MoE(5, 2, scale=2.5), 5 + 2 + 2),
        (MoE(5, 2, order="choose_first"), 5),
        (MoE(5, 2, renormalise=False), 5),
    ):
        assert cost(steps(FFNSpec(4, 8, "swiglu", moe=moe))).elementwise_flops == routing + experts
    # a parallel block adds x, the attention and its own output: two adds.
    spec = FFNSpec(4, 8, "relu", bias=False, parallel=True)
    assert cost(steps(spec)).elementwise_flops == 8 + 2 * 4


def test_norms_are_counted_apart_and_shared_ones_not_at_all():
    own = cost(steps(FFNSpec(16, 32, norm="layernorm", residual=True, parallel=True)))
    shared = cost(steps(FFNSpec(16, 32, norm="layernorm", residual=True, parallel=True, shared_norm=True)))
    assert (own.norm_params, shared.norm_params) == (32, 0)
    assert own.params == shared.params == 16 * 32 * 2 + 32 + 16
    both = cost(steps(FFNSpec(16, 32, "geglu", norm="rmsnorm", norm_position="pre+branch", norm_weight="one_plus")))
    assert both.norm_params == 32


def test_learned_activation_parameters_count():
    assert cost(steps(FFNSpec(4, 8, "xielu", bias=False))).params == 2 * 4 * 8 + 2


def test_costs_add_up():
    block = steps(FFNSpec(8, 24, "swiglu", norm="rmsnorm", residual=True, moe=MoE(4, 2, 1, shared_gate=True)))
    parts = step_costs(block, {"x": (5, 8)})
    assert sum(parts.values(), Cost()) == cost(block, 5)
    assert cost(block, 5).matmul_flops == 5 * cost(block, 1).matmul_flops
    assert cost(block).times(3) == cost(block) + cost(block) + cost(block)


def test_bytes():
    found = cost(steps(FFNSpec(4, 8)), 3)
    assert found.weight_bytes(2) == 2 * (4 * 8 * 2 + 8 + 4)
    assert found.activation_bytes(4) == 4 * 3 * (8 + 8 + 4)  # up, act, down
    assert found.weight_bytes(0.5) == (4 * 8 * 2 + 8 + 4) // 2
    # norm 4, router 5, route 5, two experts of gate, up, act, hidden (8 each) and down (4), the mix 4
    moe = cost(steps(FFNSpec(4, 8, "swiglu", norm="rmsnorm", moe=MoE(5, 2))))
    assert moe.activation_bytes(2) == 2 * (4 + 5 + 5 + 2 * (4 * 8 + 4) + 4)


def test_norms_inside_experts_count_for_each():
    assert cost(steps(FFNSpec(4, 8, gated=True, sub_norm=True, moe=MoE(5, 2)))).norm_params == 5 * 8


def test_a_collective_has_no_flops():
    block = steps(FFNSpec(4, 8, bias=False))
    assert 2 * cost(shard(block, 0, 2)).flops == cost(block).flops
