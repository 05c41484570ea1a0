"""Bytes moved and numbers counted: against tensors that torch's functions take and give, its counters, closed forms."""

from dataclasses import replace
from itertools import combinations
from math import ceil, inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from ffncli.block.activations import hard_limits
from ffncli.block.cost import Cost, cost, step_costs
from ffncli.block.dtypes import activation_dtype, storage
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import shard
from ffncli.block.steps import Axis, Linear, Step
from ffncli.block.traffic import Traffic, experts_touched, launches, time_floor, tokens_at, traffic
from ffncli.errors import FFNError
from ffncli.models import catalog
from tests.oracles import modules
from tests.oracles.counts import DENSE

sizes = st.integers(1, 200)
FP32, BF16 = storage("fp32"), storage("bf16")


class Moved(TorchFunctionMode):
    """Adds up the bytes of every function's tensors: activations in and out, parameters apart."""

    def __init__(self) -> None:
        super().__init__()
        self.activations = self.weights = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and func.__name__ != "__get__":
            tensors = [t for t in (*args, *(kwargs or {}).values()) if isinstance(t, torch.Tensor)]
            self.weights += sum(t.nbytes for t in tensors if isinstance(t, torch.nn.Parameter))
            self.activations += out.nbytes + sum(t.nbytes for t in tensors if not isinstance(t, torch.nn.Parameter))
        return out


@given(d_model=sizes, d_ff=sizes, tokens=st.integers(1, 9), gated=st.booleans(), bias=st.booleans())
def test_unfused_bytes_are_those_of_torchs_functions(d_model, d_ff, tokens, gated, bias):
    with torch.device("meta"):
        module = (modules.Gated if gated else modules.Plain)(d_model, d_ff, bias).to(torch.bfloat16)
        x = torch.empty(tokens, d_model, dtype=torch.bfloat16)
    with Moved() as moved:
        module(x)
    found = traffic(steps(FFNSpec(d_model, d_ff, gated=gated, bias=bias)), BF16, BF16, tokens)
    assert found.activation_bytes == moved.activations
    assert found.weight_bytes_read == moved.weights
    assert found.activation_bytes_fused == 2 * x.nbytes


@given(d_model=sizes, d_ff=sizes, tokens=st.integers(1, 9), kind=st.sampled_from(["rmsnorm", "layernorm"]))
def test_norm_and_residual_count_in_bytes_as_they_do_in_flops(d_model, d_ff, tokens, kind):
    """torch's own norm and add move, beside the block without them, what the block with them moves more."""
    x = torch.empty(tokens, d_model, dtype=torch.bfloat16, device="meta")
    with Moved() as moved:
        if kind == "rmsnorm":
            normed = torch.nn.functional.rms_norm(x, (d_model,))
        else:
            normed = torch.nn.functional.layer_norm(x, (d_model,))
        torch.add(x, normed)
    bare = FFNSpec(d_model, d_ff, "swiglu")
    around = replace(bare, norm=kind, residual=True)
    one, other = (traffic(steps(spec), BF16, BF16, tokens) for spec in (around, bare))
    assert one.activation_bytes - other.activation_bytes == moved.activations
    assert one == replace(other, activation_bytes=one.activation_bytes)  # a norm's weights are apart, as everywhere
    more = cost(steps(around), tokens).elementwise_flops - cost(steps(bare), tokens).elementwise_flops
    assert more == tokens * d_model * ((4 if kind == "rmsnorm" else 7) + 1)


def test_a_parallel_block_reads_the_attentions_output_too():
    alone, beside = (traffic(steps(FFNSpec(4, 8, residual=True, parallel=p)), BF16, BF16) for p in (False, True))
    assert (alone.activation_bytes_fused, beside.activation_bytes_fused) == (2 * 2 * 4, 2 * 3 * 4)


@given(d_model=sizes, d_ff=sizes, tokens=st.integers(1, 2**31))
def test_gated_closed_form(d_model, d_ff, tokens):
    found = traffic(
        steps(FFNSpec(d_model, d_ff, "swiglu", norm="rmsnorm", residual=True, dropout=0.1)), FP32, BF16, tokens
    )
    weights = 4 * 3 * d_model * d_ff
    values = 2 * (d_model + d_ff) + 2 * d_ff + 3 * d_ff + (d_ff + d_model)  # gate and up, act, hidden, down
    values += 2 * d_model + 3 * d_model  # norm, residual
    assert found == Traffic(weights, 2 * tokens * values, 2 * tokens * 2 * d_model, tokens * 6 * d_model * d_ff)
    assert found.flops_per_byte() == tokens * 6 * d_model * d_ff / (weights + 2 * tokens * values)
    assert found.flops_per_byte(fused=True) == tokens * 6 * d_model * d_ff / (weights + 4 * tokens * d_model)


def test_moe_by_hand():
    # 3 tokens, d_model 4, d_ff 8, 5 experts, top 2, one shared expert; every number of one byte's share times 2.
    spec = FFNSpec(4, 8, "swiglu", moe=MoE(5, 2, 1))
    expert = 2 * (4 + 8) + 2 * 8 + 3 * 8 + (8 + 4)
    router = (4 + 5) + (5 + 5)
    mixing = 5 + 2 * 4 + 4
    per_token = router + 2 * expert + mixing + expert + 3 * 4  # the last: shared and routed added
    found = traffic(steps(spec), BF16, BF16, 3)
    assert found.activation_bytes == 2 * 3 * per_token
    assert found.activation_bytes_fused == 2 * 3 * 2 * 4
    touched = 5 * (1 - (3 / 5) ** 3)
    assert found.weight_bytes_read == round(2 * (4 * 5 + 96 + 96 * touched))
    assert found.matmul_flops == 3 * 2 * (4 * 5 + 3 * 96)
    weighed = traffic(steps(FFNSpec(4, 8, "swiglu", moe=MoE(5, 2, 1, weigh="input"))), BF16, BF16, 3)
    assert weighed.activation_bytes - found.activation_bytes == 2 * 3 * 2 * (4 + 4)  # x read, x weighted written
    assert traffic(steps(spec), BF16, BF16, 10**6).weight_bytes_read == 2 * (4 * 5 + 6 * 96)


@pytest.mark.parametrize(("experts", "top_k", "tokens"), [(4, 1, 3), (4, 2, 3), (5, 3, 2), (3, 3, 2), (6, 2, 1)])
def test_touched_experts_are_the_mean_over_every_way_to_choose(experts, top_k, tokens):
    reached = {frozenset(): 1}
    choices = [frozenset(c) for c in combinations(range(experts), top_k)]
    for _ in range(tokens):
        after: dict[frozenset[int], int] = {}
        for seen, ways in reached.items():
            for choice in choices:
                after[seen | choice] = after.get(seen | choice, 0) + ways
        reached = after
    mean = sum(len(seen) * ways for seen, ways in reached.items()) / len(choices) ** tokens
    assert experts_touched(experts, top_k, tokens) == pytest.approx(mean, rel=1e-12)


def test_touched_experts_at_the_ends():
    assert experts_touched(256, 8, 1) == 8
    assert experts_touched(8, 8, 5) == 8
    assert experts_touched(256, 8, 2**60) == 256


@given(d_model=sizes, d_ff=sizes, goal=st.integers(1, 500), fused=st.booleans(), name=st.sampled_from(["bf16", "fp8"]))
def test_tokens_at_a_ridge_are_the_closed_form(d_model, d_ff, goal, fused, name):
    weights = storage(name)
    block = steps(FFNSpec(d_model, d_ff, "swiglu"))
    held = 3 * d_model * d_ff * weights.block_bytes
    moved = 2 * (2 * d_model if fused else 3 * d_model + 8 * d_ff)
    flops = 6 * d_model * d_ff
    expected = ceil(goal * held / (flops - goal * moved)) if flops > goal * moved else None
    found = tokens_at(goal, lambda tokens: traffic(block, weights, BF16, tokens), fused)
    assert found == expected


@given(experts=st.integers(1, 64), goal=st.floats(0.5, 60), data=st.data())
def test_tokens_at_a_ridge_are_the_least(experts, goal, data):
    block = steps(FFNSpec(256, 384, "swiglu", moe=MoE(experts, data.draw(st.integers(1, experts)))))

    def intensity(tokens: int) -> float:
        return traffic(block, BF16, BF16, tokens).flops_per_byte()

    found = tokens_at(goal, lambda tokens: traffic(block, BF16, BF16, tokens))
    if found is None:
        assert intensity(2**50) < goal
    else:
        assert intensity(found) >= goal * (1 - 1e-12)
        assert found == 1 or intensity(found - 1) < goal


def test_an_intensity_that_is_only_approached_is_never_reached():
    assert tokens_at(2, lambda tokens: Traffic(10, tokens, tokens, 2 * tokens)) is None
    assert tokens_at(2, lambda tokens: Traffic(10, tokens, tokens, 3 * tokens)) == 20
    assert tokens_at(2, lambda tokens: Traffic(10, tokens, 0, 2 * tokens), fused=True) == 10


@pytest.mark.parametrize("goal", [0, -1.0, inf, nan])
def test_no_ridge(goal):
    with pytest.raises(FFNError, match="FLOPs per byte must be a positive number"):
        tokens_at(goal, lambda tokens: Traffic(1, tokens, tokens, tokens))


def test_parts_add_up():
    block = steps(FFNSpec(8, 24, "swiglu", moe=MoE(4, 2)))
    one = traffic(block, BF16, BF16, 5)
    assert one.times(3) == one + one + one
    assert one.moved() == one.weight_bytes_read + one.activation_bytes
    assert one.moved(fused=True) == one.weight_bytes_read + one.activation_bytes_fused


def test_a_rank_reads_its_share_of_the_matrices_and_all_of_the_input():
    block = steps(FFNSpec(64, 128, "swiglu", bias=False))
    part, whole = traffic(shard(block, 0, 4), BF16, BF16, 5), traffic(block, BF16, BF16, 5)
    assert 4 * part.weight_bytes_read == whole.weight_bytes_read
    assert 4 * part.matmul_flops == whole.matmul_flops
    assert part.activation_bytes_fused == whole.activation_bytes_fused
    assert part.activation_bytes == 2 * 5 * (3 * 64 + 8 * 32)
    assert part == traffic(steps(FFNSpec(64, 32, "swiglu", bias=False)), BF16, BF16, 5)


def test_stored_weights_are_read_packed():
    block = steps(FFNSpec(64, 128, "swiglu"))
    packed = storage("q4_0")
    found = traffic(block, packed, activation_dtype(packed), 2)
    assert found.weight_bytes_read == 3 * 64 * 128 * 18 // 32
    assert found.activation_bytes == traffic(block, BF16, BF16, 2).activation_bytes


# --- kernels ----------------------------------------------------------------------------------------------------------


@given(d_model=sizes, d_ff=sizes, tokens=st.integers(1, 9), gated=st.booleans())
def test_kernels_are_a_product_the_elementwise_steps_and_a_product(d_model, d_ff, tokens, gated):
    """As torch's functions: gate and up in one product, `glu` or `gelu`, down; each reads and writes its tensors."""
    with torch.device("meta"):
        up = torch.nn.Linear(d_model, 2 * d_ff if gated else d_ff, bias=False, dtype=torch.bfloat16)
        down = torch.nn.Linear(d_ff, d_model, bias=False, dtype=torch.bfloat16)
        x = torch.empty(tokens, d_model, dtype=torch.bfloat16)
    spec = FFNSpec(d_model, d_ff, activation="sigmoid" if gated else "gelu", gated=gated, bias=False)
    found = [one.work for one in launches(steps(spec), BF16, BF16, tokens)]
    middle = torch.nn.functional.glu if gated else torch.nn.functional.gelu
    value, expected = x, []
    for function in (up, middle, down):
        with Moved() as moved:
            value = function(value)
        expected.append((moved.weights, moved.activations))
    assert [(one.weight_bytes_read, one.activation_bytes) for one in found] == expected
    assert [one.matmul_flops for one in found] == [2 * tokens * up.weight.numel(), 0, 2 * tokens * down.weight.numel()]


@given(
    d_model=sizes,
    d_ff=sizes,
    tokens=st.integers(1, 300),
    experts=st.integers(1, 9),
    top_k=st.integers(1, 9),
    shared=st.integers(0, 2),
    norm=st.sampled_from(["none", "rmsnorm"]),
)
def test_kernels_do_the_work_of_the_block(d_model, d_ff, tokens, experts, top_k, shared, norm):
    """FLOPs and weights are the block's; activations more than its ends, not more than every step's."""
    moe = MoE(experts, min(top_k, experts), shared_experts=shared)
    body = steps(FFNSpec(d_model, d_ff, gated=True, bias=False, moe=moe, norm=norm, residual=norm != "none"))
    whole, found = traffic(body, BF16, BF16, tokens), launches(body, BF16, BF16, tokens)
    total = sum((one.work for one in found), Traffic())
    assert total.matmul_flops == whole.matmul_flops
    assert total.weight_bytes_read == pytest.approx(whole.weight_bytes_read, abs=len(found))
    assert whole.activation_bytes_fused <= total.activation_bytes <= whole.activation_bytes


def test_the_kernels_of_a_mixture_by_hand():
    """4 experts of 5 -> 3, 2 a token, 7 tokens: 14 rows; all experts' weights if each is touched."""
    body = steps(FFNSpec(5, 3, gated=True, bias=False, moe=MoE(4, 2)))
    router, route, up, act, down, mixed = launches(body, BF16, BF16, 7, touched=4)
    assert [one.routed for one in (router, route, up, act, down, mixed)] == [False, False, True, True, True, True]
    assert up.work == Traffic(2 * 4 * 2 * 3 * 5, 2 * 14 * (5 + 6), 2 * 14 * (5 + 6), 2 * 14 * 5 * 6)
    assert act.work == Traffic(0, 2 * 14 * (6 + 3), 2 * 14 * (6 + 3), 0)
    assert down.work == Traffic(2 * 4 * 3 * 5, 2 * 14 * (3 + 5), 2 * 14 * (3 + 5), 2 * 14 * 3 * 5)
    assert mixed.work == Traffic(0, 2 * (14 * 5 + 7 * 5), 2 * (14 * 5 + 7 * 5), 0)
    assert launches(body, BF16, BF16, 7, touched=1)[2].work.weight_bytes_read == 2 * 1 * 2 * 3 * 5


def test_a_rank_has_its_part_of_every_kernel_and_a_collective_is_none():
    """Split over two, the products and the hidden values halve; the ends do not."""
    body = steps(FFNSpec(6, 8, gated=True, bias=False))
    whole, half = (launches(shard(body, 0, n), BF16, BF16, 3) for n in (1, 2))
    assert len(half) == len(whole) == 3
    assert [2 * one.work.matmul_flops for one in half] == [one.work.matmul_flops for one in whole]
    assert [2 * one.work.weight_bytes_read for one in half] == [one.work.weight_bytes_read for one in whole]
    assert half[0].work.activation_bytes == 2 * 3 * (6 + 8)


def test_products_one_after_another_are_kernels_of_their_own():
    """Only products of the same tensor can be one."""
    wide, narrow = Axis("d_ff", 8), Axis("d_model", 6)
    body = (Step("up", Linear(narrow, wide), ("x",)), Step("down", Linear(wide, narrow), ("up",)))
    assert [one.work.activation_bytes for one in launches(body, BF16, BF16, 3)] == [2 * 3 * 14, 2 * 3 * 14]


def test_the_kernels_of_every_known_model_do_its_work():
    """Latent experts, shared ones, identities, norms between: whatever the catalog has."""
    for name in catalog.names():
        for group in catalog.find(name).model.groups:
            whole, kernels = traffic(group.steps, BF16, BF16, 37), launches(group.steps, BF16, BF16, 37)
            total = sum((one.work for one in kernels), Traffic())
            assert total.matmul_flops == whole.matmul_flops, name
            assert total.weight_bytes_read == pytest.approx(whole.weight_bytes_read, abs=len(kernels))
            assert whole.activation_bytes_fused <= total.activation_bytes <= whole.activation_bytes


widths = st.integers(1, 300)


def counted_flops(module: torch.nn.Module, d_model: int, tokens: int) -> int:
    with FlopCounterMode(display=False) as counter:
        module(torch.empty(tokens, d_model, device="meta"))
    return counter.get_total_flops()


@given(d_model=widths, d_ff=widths, gated=st.booleans(), bias=st.booleans(), tokens=st.integers(1, 9))
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


@given(d_model=widths, d_ff=widths, experts=st.integers(1, 20), shared=st.integers(0, 3), data=st.data())
def test_moe_closed_form(d_model, d_ff, experts, shared, data):
    top_k = data.draw(st.integers(1, experts))
    found = cost(steps(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(experts, top_k, shared))))
    expert, router = 3 * d_model * d_ff, d_model * experts
    assert found.params == experts * expert + router + shared * expert
    assert found.params_active == top_k * expert + router + shared * expert
    assert found.matmul_flops == 2 * found.params_active  # every active weight is one multiply-add per token


@given(d_model=widths, d_ff=widths, experts=st.integers(1, 6), shared=st.integers(0, 2))
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


amounts, rates = st.integers(1, 10**15), st.floats(1e6, 1e16)


@given(amounts, amounts, rates, rates)
def test_the_floor_is_work_over_the_attainable_rate(flops, moved, peak, bandwidth):
    """As Williams et al. write it: attainable FLOP/s = min(peak, bandwidth x intensity)."""
    floor = time_floor(flops, moved, peak, bandwidth)
    assert floor.seconds == pytest.approx(flops / min(peak, bandwidth * (flops / moved)))
    if abs(flops / moved / (peak / bandwidth) - 1) > 1e-9:
        assert floor.bound == ("memory" if flops / moved < peak / bandwidth else "compute")


def test_at_the_ridge_itself():
    floor = time_floor(8, 2, 4.0, 1.0)
    assert (floor.compute_s, floor.memory_s, floor.seconds, floor.bound) == (2.0, 2.0, 2.0, "compute")
