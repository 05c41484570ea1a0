"""Rates from measurements, on machines that are made up: their times follow from known rates."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.block.dtypes import dtype
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.models.counting.cluster import NO_WIRES, Accelerators, MeasuredBlock, MeasuredSpeeds, predicted_s
from ffncli.models.counting.cluster_plan import PlanQuestion, plan_model
from ffncli.models.counting.plan import Planner
from ffncli.models.model import block_model

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
    with pytest.raises(FFNError, match="no times of H100"):
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
