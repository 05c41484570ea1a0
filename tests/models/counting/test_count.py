"""Counts of a model, its traffic and time floors, by hand; rates from measurements on machines that are made up."""

from dataclasses import asdict, replace

import pytest

from ffncli.block.dtypes import dtype, storage
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.cluster import NO_WIRES, Accelerators
from ffncli.models.counting.cluster_plan import PlanQuestion, plan_model
from ffncli.models.counting.count import count
from ffncli.models.counting.plan import Planner
from ffncli.models.counting.speeds import MeasuredBlock, MeasuredSpeeds, predicted_s
from ffncli.models.counting.traffic import (
    device_floors,
    model_traffic,
    rate_format,
    ridge_of,
    ridge_tokens,
    token_costs,
)
from ffncli.models.model import Group, Model, Resolved, block_model
from ffncli.system.hardware import named

DENSE = FFNSpec(4, 8, "swiglu", norm="rmsnorm", shared_norm=True)
SPARSE = FFNSpec(4, 8, "swiglu", moe=MoE(5, 2, 3, shared_d_ff=10))
MIXED = Resolved(Model("m", (Group("decoder", (0,), DENSE), Group("decoder", (1, 2), SPARSE))), "m")
PER_DENSE, PER_SPARSE = 3 * 4 * 8, 5 * 3 * 4 * 8 + 4 * 5 + 3 * 4 * 10


def test_totals_are_over_all_layers_and_tokens():
    found = count(MIXED, "bf16", tokens=7)
    one = count(MIXED)
    assert found.ffn_params_per_layer == PER_SPARSE
    assert found.ffn_params_total == PER_DENSE + 2 * PER_SPARSE
    assert found.weight_bytes == 2 * found.ffn_params_total
    assert found.matmul_flops_total == 7 * 2 * found.ffn_params_active
    assert found.elementwise_flops_total == 7 * one.elementwise_flops_total > 0
    assert (found.tokens, found.layers, found.uniform) == (7, 3, False)
    assert [g.shared_d_ff for g in found.groups] == [0, 10]


def test_layers_are_uniform_whatever_stack_they_are_in():
    assert count(catalog.find("transformer-base")).uniform
    groups = Group("decoder", (0,), DENSE), Group("decoder", (1,), replace(DENSE, bias=True))
    same_widths = Resolved(Model("m", groups), "m")
    assert not count(same_widths).uniform


def test_norms_are_marked():
    (norm, *others) = count(MIXED).groups[0].tensors
    assert (norm.name, norm.norm, norm.shared) == ("norm.weight", True, True)
    assert not any(t.norm or t.shared for t in others)


@pytest.mark.parametrize(("stored", "name", "size"), [(None, "fp32", 4), ("bf16", "bf16", 2), ("gptq-4bit", "bf16", 2)])
def test_bytes_are_of_the_stored_dtype(stored, name, size):
    mixed = replace(MIXED, model=replace(MIXED.model, dtype=stored))
    found = count(mixed)
    assert (found.dtype, found.weight_bytes) == (name, size * found.ffn_params_total)
    assert count(mixed, "fp64").weight_bytes == 8 * found.ffn_params_total


BF16 = storage("bf16")
GATED, ROUTED = FFNSpec(64, 768, "swiglu", norm="rmsnorm"), FFNSpec(64, 96, "swiglu", moe=MoE(8, 2))
TWO_KINDS = Model("m", (Group("decoder", (0,), GATED), Group("decoder", (1, 2), ROUTED)))


def test_llama_by_hand():
    one, many = token_costs(catalog.find("llama-2-7b").model, BF16, (1, 512))
    weights, flops = 2 * 4_328_521_728, 2 * 4_328_521_728
    # Per value of d_model: norm 2, the input of gate and up 2, the output of down 1, residual 3.
    unfused = 32 * 2 * (8 * 4096 + 8 * 11008)
    assert one.flops_per_byte == flops / (weights + unfused)
    assert many.flops_per_byte == 512 * flops / (weights + 512 * unfused)
    assert many.flops_per_byte_fused == 512 * flops / (weights + 512 * 32 * 2 * 2 * 4096)
    assert (one.tokens, many.tokens, one.experts_touched, one.ranks) == (1, 512, None, 1)
    assert (one.dtype, one.activation_dtype) == ("bf16", "bf16")


def test_layers_of_two_kinds_add_up():
    found = model_traffic(TWO_KINDS, BF16, 3)
    expert = 3 * 64 * 96
    touched = 8 * (1 - (6 / 8) ** 3)
    assert found.weight_bytes_read == 2 * 3 * 64 * 768 + 2 * round(2 * (64 * 8 + touched * expert))
    assert found.matmul_flops == 3 * 2 * (3 * 64 * 768 + 2 * (64 * 8 + 2 * expert))
    (row,) = token_costs(TWO_KINDS, BF16, [3])
    assert row.experts_touched == pytest.approx(touched)
    assert {k: v for k, v in asdict(row).items() if k in asdict(found)} == asdict(found)


def test_a_rank_of_four():
    whole, part = token_costs(TWO_KINDS, BF16, [3]), token_costs(TWO_KINDS, BF16, [3], ranks=4)
    router = 2 * 2 * 64 * 8
    assert 4 * (part[0].weight_bytes_read - router) == whole[0].weight_bytes_read - router
    assert part[0].activation_bytes_fused == whole[0].activation_bytes_fused
    with pytest.raises(FFNError, match="d_ff = 768 does not divide over 5 ranks"):
        token_costs(TWO_KINDS, BF16, [1], ranks=5)


def test_ridge():
    model = catalog.find("llama-2-7b").model
    weights, flops, unfused = 4_328_521_728, 2 * 4_328_521_728, 32 * 2 * (8 * 4096 + 8 * 11008)
    tokens = ridge_tokens(model, storage("fp8"), 300)
    assert tokens == -(-300 * weights // (flops - 300 * unfused))
    assert ridge_tokens(model, storage("fp8"), 300, fused=True) == -(-300 * weights // (flops - 300 * 32 * 4 * 4096))
    assert ridge_tokens(model, storage("fp8"), 10_000) is None
    assert ridge_tokens(model, storage("fp8"), 300, ranks=4) > tokens


H100, V100, B200 = (named(name, "--ridge") for name in ("h100", "v100", "b200"))
LLAMA = catalog.find("llama-2-7b").model
WEIGHTS, D = 32 * 3 * 4096 * 11008, 4096


def test_llama_on_an_h100_by_hand():
    one, many = device_floors(H100, token_costs(LLAMA, BF16, (1, 4096)), BF16, 2 * 6_738_415_616)
    assert one.memory_s == pytest.approx((2 * WEIGHTS + 32 * 2 * D * 2) / 3350e9)
    assert one.compute_s == pytest.approx(2 * WEIGHTS / 989.4e12)
    assert (one.bound, one.floor_s) == ("memory", one.memory_s)
    assert many.compute_s == pytest.approx(4096 * 2 * WEIGHTS / 989.4e12)
    assert (many.bound, many.floor_s) == ("compute", many.compute_s)
    assert one.ridge_flops_per_byte == pytest.approx(295.3, abs=0.1)
    assert (one.rate, one.peak_flops_per_s, one.bytes_per_s) == ("bf16", 989.4e12, 3350e9)
    assert (one.needed_bytes, one.memory_bytes, one.fits) == (13_476_831_232, 81_559 << 20, True)
    assert device_floors(H100, token_costs(LLAMA, BF16, (1,)), BF16, (81_559 << 20) + 1)[0].fits is False


def test_one_of_several_ranks_reads_its_part_and_says_nothing_of_what_fits():
    (whole,) = device_floors(H100, token_costs(LLAMA, BF16, (1,)), BF16, 1)
    (part,) = device_floors(H100, token_costs(LLAMA, BF16, (1,), ranks=8), BF16, 1)
    assert part.compute_s == pytest.approx(whole.compute_s / 8)
    assert (part.ranks, part.needed_bytes, part.fits) == (8, None, None)


@pytest.mark.parametrize(
    ("device", "weights", "rate"),
    [
        (H100, "fp8", "fp8"), (H100, "mxfp4", "bf16"), (B200, "mxfp4", "fp4"), (H100, "q4_0", "bf16"),
        (H100, "int8", "int8"), (H100, "int4", "bf16"), (H100, "fp32", "fp32"), (H100, "fp64", None),
        (V100, "bf16", None), (V100, "fp16", "fp16"), (V100, "fp8", None),
    ],
)  # fmt: skip
def test_the_rate_is_that_of_the_format_that_products_are_computed_in(device, weights, rate):
    assert rate_format(device, storage(weights)) == rate


def test_without_a_rate_there_is_no_floor_but_the_traffic_is_known():
    (found,) = device_floors(V100, token_costs(LLAMA, BF16, (1,)), BF16, 2 * WEIGHTS)
    assert (found.bound, found.compute_s, found.floor_s, found.ridge_flops_per_byte) == (None,) * 4
    assert found.memory_s == pytest.approx((2 * WEIGHTS + 32 * 2 * D * 2) / 900e9)
    assert found.fits is True  # of 16 and 32 GB the larger
    assert ridge_of(V100, BF16) is None


def test_what_is_only_roughly_known_is_marked():
    (sure,) = device_floors(H100, token_costs(LLAMA, BF16, (1,)), BF16, 1)
    (rough,) = device_floors(replace(H100, approx=frozenset({"bf16"})), token_costs(LLAMA, BF16, (1,)), BF16, 1)
    assert (sure.approximate, rough.approximate) == (False, True)


FP32, F, B = dtype("fp32"), 1e12, 1e11
SHAPES = ((256, 1024), (512, 2048), (1024, 1024))


def block(d_model: int, d_ff: int, tokens: int, share: float = 1.0) -> MeasuredBlock:
    """A block whose every kernel takes the longer of FLOPs / F and bytes / B, over a share."""
    blank = MeasuredBlock(f"{d_model}x{d_ff}", FFNSpec(d_model, d_ff, "gelu"), FP32, tokens, "eager", 1.0)
    seconds = sum(max(one.matmul_flops / F, one.moved() / B) for one in blank.kernels)
    return replace(blank, time_s=seconds / share)


def machine(share: float = 1.0) -> MeasuredSpeeds:
    return MeasuredSpeeds(tuple(block(d, f, n, share) for d, f in SHAPES for n in (1, 8, 64, 512)))


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_a_machine_with_one_share_everywhere_predicts_another_block(share):
    """The roofs are what some block reached, so the prediction is exact but for what no block reached."""
    for other in (block(768, 3072, 1, share), block(384, 2048, 16, share), block(768, 2048, 500, share)):
        assert predicted_s(machine(share), other) == pytest.approx(other.time_s, rel=0.03)


def test_what_similar_blocks_reached_counts_more():
    """Few tokens reach half of the bandwidth, many the whole rate: each new block is like its neighbours."""
    blocks = tuple(block(d, f, n, 0.5 if n < 20 else 1.0) for d, f in SHAPES for n in (1, 4, 16, 64, 256))
    speeds = MeasuredSpeeds(blocks)
    assert predicted_s(speeds, block(512, 1024, 2)) == pytest.approx(block(512, 1024, 2, 0.5).time_s, rel=0.1)
    assert predicted_s(speeds, block(512, 1024, 128)) == pytest.approx(block(512, 1024, 128).time_s, rel=0.1)
    assert predicted_s(speeds, blocks[3]) == pytest.approx(blocks[3].time_s, rel=0.02)  # itself


def test_a_block_left_out_is_left_out_with_all_its_tokens():
    speeds = machine()
    left = speeds.without(speeds.blocks[0])
    assert {one.label for one in left.blocks} == {"512x2048", "1024x1024"}
    assert predicted_s(MeasuredSpeeds(()), speeds.blocks[0]) is None


def test_a_plan_at_measured_rates_takes_the_predicted_time():
    other = block(768, 3072, 32, 0.8)
    row = Planner(block_model(other.spec, "x").model, FP32).row(
        Accelerators("cpu", machine(0.8), None, NO_WIRES), Ranks(), 32
    )
    assert row.time_s == pytest.approx(predicted_s(machine(0.8), other))
    assert (row.fits, row.links, row.rate) == (None, "", "fp32")
    bf16 = Planner(block_model(other.spec, "x").model, dtype("bf16"))
    assert "no rate of cpu" in bf16.row(Accelerators("cpu", machine(), None, NO_WIRES), Ranks(), 1).refused


def test_measured_speeds_take_the_place_of_the_data_sheet():
    model = block_model(FFNSpec(768, 3072, "gelu"), "x")
    question = PlanQuestion(device="h100,cpu", tp=1, tokens=1, dtype="fp32")
    plan = plan_model(model, question, {"cpu": machine(), "H100 SXM5": machine(0.5)})
    assert [row.device for row in plan.rows] == ["H100 SXM5", "cpu"]
    assert plan.rows[0].time_s == pytest.approx(2 * plan.rows[1].time_s, rel=0.01)
    assert (plan.assumed[0].gemm_efficiency, plan.assumed[0].memory_efficiency) == (None, None)
    with pytest.raises(FFNError, match="needs measured"):
        plan_model(model, question)
    with pytest.raises(FFNError, match="no times for H100"):
        plan_model(model, PlanQuestion(device="h100"), {"cpu": machine()})


def test_a_mixture_is_like_mixtures():
    """Dense blocks reach the whole roofline here, mixtures a quarter; without any, one is like the rest."""
    experts = FFNSpec(256, 512, "silu", gated=True, moe=MoE(8, 2))
    blank = [MeasuredBlock("m", experts, FP32, n, "eager", 1.0) for n in (1, 16, 256)]
    mixtures = tuple(
        replace(one, time_s=4 * sum(max(k.matmul_flops / F, k.moved() / B) for k in one.kernels)) for one in blank
    )
    other = MeasuredBlock("o", replace(experts, d_ff=768), FP32, 16, "eager", 1.0)
    whole = sum(max(k.matmul_flops / F, k.moved() / B) for k in other.kernels)
    both, dense = MeasuredSpeeds((*machine().blocks, *mixtures)), machine()
    assert predicted_s(both, other) == pytest.approx(4 * whole, rel=0.03)
    assert predicted_s(dense, other) == pytest.approx(whole, rel=0.03)
    row = Planner(block_model(other.spec, "o").model, FP32).row(Accelerators("cpu", both, None, NO_WIRES), Ranks(), 16)
    assert row.time_s == pytest.approx(4 * whole, rel=0.03)
    assert predicted_s(both, block(768, 3072, 16)) == pytest.approx(block(768, 3072, 16).time_s, rel=0.03)


def test_between_two_numbers_of_tokens_the_share_is_in_between():
    """All at 1 token, a quarter at 16, all at 4096: a half at 4 and 256; beyond the ends, what the end reached."""
    speeds = MeasuredSpeeds(tuple(block(512, 2048, n, share) for n, share in ((1, 1.0), (16, 0.25), (4096, 1.0))))
    for tokens, share in ((1, 1.0), (4, 0.5), (16, 0.25), (256, 0.5), (9999, 1.0)):
        new = block(512, 2048, tokens, share)
        assert predicted_s(speeds, new) == pytest.approx(new.time_s, rel=0.03), tokens


def test_nearer_sizes_weigh_more():
    """A small block reaches everything, one of 16 times its weights a quarter; each other is like the nearer."""
    small, large = ([block(d, 4 * d, n, share) for n in (1, 256)] for d, share in ((256, 1.0), (1024, 0.25)))
    speeds = MeasuredSpeeds((*small, *large))
    near_small, near_large = block(280, 1120, 1), block(940, 3760, 1)
    assert predicted_s(speeds, near_small) == pytest.approx(near_small.time_s, rel=0.15)
    assert predicted_s(speeds, near_large) == pytest.approx(4 * near_large.time_s, rel=0.15)
