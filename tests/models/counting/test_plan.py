"""Plans and times of collectives by hand, against the counts of --tp, and draws of the router's choices."""

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffncli.block.dtypes import storage
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.cluster import Accelerators, Assumptions, Wires, assumed, cluster_of
from ffncli.models.counting.cluster_plan import PlanQuestion, cheapest, plan_model
from ffncli.models.counting.expert_load import expert_load, expert_rows, ranks_reached
from ffncli.models.counting.parallel import split
from ffncli.models.counting.plan import Planner
from ffncli.models.counting.times.fitted import fitted, skew_exponent
from ffncli.models.counting.times.kernels import (
    Loads,
    PlannedKernel,
    TimeConstants,
    chip_of,
    class_of,
    computed_in,
    kernel_time,
)
from ffncli.models.counting.traffic import device_floors, token_costs
from ffncli.models.model import block_model
from ffncli.system.hardware import Device, Link, link_named, named

H100, A100, V100, GB200 = (named(name, "--device") for name in ("h100", "a100", "v100", "gb200"))
LLAMA, MIXTRAL = catalog.find("llama-2-7b"), catalog.find("mixtral-8x7b")
BF16, D, F, LAYERS = storage("bf16"), 4096, 11008, 32
WEIGHTS = LAYERS * 3 * D * F
EXPERT = 3 * 4096 * 14336  # Mixtral's, 8 in each of 32 layers


def cluster(device: Device, given: Assumptions | None = None) -> Accelerators:
    return cluster_of(device, assumed(device, given or Assumptions()))


def planner(model, name="bf16", **more) -> Planner:
    return Planner(model.model, storage(name), **more)


def constants(device: Device = H100, name: str = "bf16") -> TimeConstants:
    return fitted(device, name).constants


def product_s(rows: float, k: int, n: int, by: TimeConstants, device: Device = H100, products: float = 1) -> float:
    """A bf16 product of each of `products` experts with `rows` rows, as times.py states it; up to 128 rows."""
    tiles = products * -(-n // 128) / device.units
    waves = 1 + by.wave * (math.ceil(tiles) / tiles - 1)
    flops = 2 * products * max(rows, by.short_rows) * k * n * (1 + 30 / k) * waves
    moved = 2 * (products * k * n + products * rows * (k + n))
    compute, memory = flops / (device.flops_per_s("bf16") * by.peak), moved / (device.bytes_per_s * by.bandwidth)
    return (compute**by.overlap + memory**by.overlap) ** (1 / by.overlap)


def elementwise_s(values: float, by: TimeConstants, device: Device = H100) -> float:
    return 2 * values / (device.bytes_per_s * by.bandwidth)


def test_llama_on_one_h100_by_hand():
    """Norm; gate and up together; activation and product; down; residual: five kernels a layer."""
    by = constants()
    for tokens in (1, 100):
        one = planner(LLAMA).row(cluster(H100), Ranks(), tokens)
        products = product_s(tokens, D, 2 * F, by) + product_s(tokens, F, D, by)
        others = elementwise_s(tokens * (2 * D + 3 * F + 3 * D), by)
        assert one.time_s == pytest.approx(LAYERS * (products + others + 5e-6 * by.launch_us), rel=1e-9)
        assert one.launch_s == pytest.approx(LAYERS * 5e-6 * by.launch_us)
        assert (one.link_s, one.efficiency, one.quantize_s, one.unknown) == (0, 1, 0, "")
        assert one.tokens_per_s == pytest.approx(tokens / one.time_s)
        assert one.ridge_flops_per_byte == pytest.approx(989.4e12 * by.peak / (3.35e12 * by.bandwidth))


def test_whole_tiles_and_waves():
    """300 rows are three tiles; 300 x 4096 in tiles of 128 x 128 are 96, one wave of 132 units."""
    by, chip = TimeConstants(1, 1, 0, 0.5, 64, 40), chip_of(H100, "bf16")
    one = kernel_time(PlannedKernel(0, 0, 0, 4096, 4096, Loads.of([(300, 1)])), chip, by)
    share = 3 * 32 / 132
    assert one.compute_s == pytest.approx(2 * 384 * 4096 * 4126 * (1 + 0.5 * (1 / share - 1)) / 989.4e12)
    assert one.memory_s == pytest.approx(2 * 300 * (4096 + 4096) / 3.35e12)
    assert one.bound == "compute"


def test_quantizing_x_is_a_step_with_its_own_time():
    by, chip = constants(H100, "fp8"), chip_of(H100, "fp8")
    one = kernel_time(PlannedKernel(0, 4096 * 4096, 0, 4096, 4096, Loads.of([(512, 1)])), chip, by)
    assert one.quantize_s == pytest.approx(512 * 4096 * by.quantize / 3.35e12)
    assert 2 < by.quantize < 12  # reading in 16 bits, writing in 8, and a pass for the scales
    assert one.seconds == pytest.approx(
        (one.compute_s**by.overlap + one.memory_s**by.overlap) ** (1 / by.overlap) + one.launch_s + one.quantize_s
    )
    assert planner(LLAMA, "fp8").row(cluster(H100), Ranks(), 512).quantize_s > 0


def test_weights_alone_are_unpacked():
    """fp8 on an A100 and q4_0 anywhere are computed in bf16, with x in bf16 and the weights' own bytes."""
    for device, name, kind in ((A100, "fp8", "int8_weights"), (H100, "q4_0", "int4_weights")):
        row = planner(LLAMA, name).row(cluster(device), Ranks(), 1)
        assert class_of(device, storage(name)) == kind
        assert (row.rate, row.quantize_s) == ("bf16", 0)
    assert class_of(H100, storage("mxfp4")) == "mxfp4_weights"
    assert computed_in(named("b200", "--device"), storage("mxfp4")) == "fp8"


def test_a_plan_is_no_faster_than_the_floor_of_the_data_sheet():
    for device, model, name in ((H100, LLAMA, "bf16"), (H100, LLAMA, "fp8"), (A100, MIXTRAL, "bf16")):
        weights = storage(name)
        for floor in device_floors(device, token_costs(model.model, weights, (1, 100, 5000)), weights, None):
            row = planner(model, name).row(cluster(device), Ranks(), floor.tokens)
            assert row.rate == floor.rate
            assert floor.floor_s < row.time_s < 2.5 * floor.floor_s
            assert row.time_low_s < row.time_s < row.time_high_s


def test_compute_takes_over_at_the_number_of_tokens_that_is_said():
    plan, where = planner(LLAMA), cluster(H100)
    turn = plan.compute_bound_from(where, Ranks())
    assert 150 < turn < 500
    assert plan.row(where, Ranks(), turn).bound == "compute"
    assert plan.row(where, Ranks(), round(0.97 * turn) - 1).bound == "memory"
    assert plan.compute_bound_from(cluster(H100, Assumptions(per_node=1)), Ranks(16)) is None  # the link binds


def test_eight_ranks_of_llama_by_hand():
    row = planner(LLAMA).row(cluster(H100), Ranks(8), 100)
    size, by = 100 * D * 2, constants()
    products = product_s(100, D, 2 * F // 8, by) + product_s(100, F // 8, D, by)
    others = elementwise_s(100 * (2 * D + 3 * F // 8 + 3 * D), by)
    kernels = LAYERS * (products + others + 5e-6 * by.launch_us)
    ring = 6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * size / (0.25 * 450e9 * 0.8)  # by NCCL's LL
    assert row.link_s == pytest.approx(LAYERS * ring)
    assert row.time_s == pytest.approx(kernels + row.link_s)
    alone = planner(LLAMA).row(cluster(H100), Ranks(), 100)
    assert row.efficiency == pytest.approx(alone.time_s / (8 * row.time_s))
    assert (row.all_reduces, row.all_to_alls, row.links) == (32, 0, "nvlink4")
    assert row.sent_bytes == row.received_bytes == split(LLAMA.model, 8, BF16, 100).ring_all_reduce_bytes_total


def test_the_link_may_bind():
    assert planner(LLAMA).row(cluster(H100, Assumptions(per_node=1)), Ranks(16), 4096).bound == "link"


@pytest.mark.parametrize(("tp", "ep"), [(1, 1), (2, 1), (1, 4), (2, 4)])
@pytest.mark.parametrize("name", ["bf16", "fp8"])
def test_memory_is_that_of_the_counts(tp, ep, name):
    weights = storage(name)
    for model in (MIXTRAL, catalog.find("deepseek-v3")):
        counted = split(model.model, tp, weights, ep=ep)
        row = planner(model, name, other_bytes=1000).row(cluster(H100), Ranks(tp, ep), 8)
        assert row.ffn_weight_bytes == counted.rank_0_weight_bytes_total
        assert row.model_weight_bytes == counted.rank_0_weight_bytes_total + 1000 // tp
        assert row.needed_bytes == row.model_weight_bytes + row.activation_bytes
        assert row.fits == (row.needed_bytes <= (81_559 << 20) * 0.9)


def test_activations_of_a_layer_by_hand():
    """x enters; a norm, gate, up, the activation, their product, down and the residual's sum are written."""
    bare = block_model(FFNSpec(64, 256, "silu", gated=True), "64x256:swiglu")
    row = planner(bare).row(cluster(H100), Ranks(2), 10)
    assert row.activation_bytes == 10 * 2 * (4 * 128 + 64 + 64)  # gate, up, silu, product; down and its sum
    assert row.model_weight_bytes is None


def test_experts_over_ranks_by_hand():
    """8 ranks: 8 tokens each, one expert each; the busiest rank has the expected most of 8 x 64 x 2 / 8 choices."""
    where, load, by = cluster(H100), expert_load(8, 2, 64, ranks=8), constants()
    row = planner(MIXTRAL).row(where, Ranks(1, 8), 64)
    rows, read = 16 * load.imbalance, load.touched_rank
    moved = [2 * (read * k * n + rows * (k + n)) for k, n in ((4096, 2 * 14336), (14336, 4096))]
    flops = [
        2 * max(rows, by.short_rows * read) * k * n * (1 + 30 / k) * (1 + by.wave * (math.ceil(t) / t - 1))
        * (1 / read) ** skew_exponent()  # of one expert, `read` are expected to have rows
        for k, n in ((4096, 2 * 14336), (14336, 4096)) for t in [read * n / 128 / 132]
    ]  # fmt: skip
    parts = [(f / (989.4e12 * by.peak), m / (3.35e12 * by.bandwidth)) for f, m in zip(flops, moved, strict=True)]
    products = sum((c**by.overlap + m**by.overlap) ** (1 / by.overlap) for c, m in parts)
    others = elementwise_s(rows * (3 * 14336) + load.imbalance * (16 * 4096 + 8 * 4096), by)
    experts = by.experts * (products + others)
    router = product_s(8, 4096, 8, by)
    rest = elementwise_s(8 * (2 * 4096 + 2 * 8 + 3 * 4096), by)  # norm, choice, residual
    size = 8 * 2 * 4096 * ranks_reached(8, 2, 8)
    exchange = 6.6e-6 + 0.6e-6 + 7 / 8 * load.imbalance * size / (0.25 * 450e9 * 0.8)  # by NCCL's LL
    assert row.link_s == pytest.approx(2 * LAYERS * exchange)
    kernels = LAYERS * (experts + router + rest + 8e-6 * by.launch_us)
    assert row.time_s == pytest.approx(kernels + row.link_s, rel=1e-3)
    assert (row.all_reduces, row.all_to_alls, row.tokens_per_expert) == (0, 64, 16)
    assert row.busiest_expert_tokens == load.busiest
    assert row.waiting_s == pytest.approx(row.time_s - row.balanced_time_s)
    assert row.balanced_time_s < row.time_s


def test_what_is_sent_and_what_is_received():
    """In bf16 the busiest rank receives `imbalance` times the mean and sends as much back; rows are not rounded."""
    load = expert_load(8, 2, 64, ranks=8)
    for sent, rows in (("choice", 2.0), ("rank", ranks_reached(8, 2, 8))):
        row = planner(MIXTRAL, rows_per=sent).row(cluster(H100), Ranks(1, 8), 64)
        mean = LAYERS * 7 / 8 * 8 * rows * 4096 * 2
        assert row.sent_bytes == pytest.approx((1 + load.imbalance) * mean)
        assert row.received_bytes == pytest.approx(row.sent_bytes)
    fp8 = planner(MIXTRAL, dispatch="fp8").row(cluster(H100), Ranks(1, 8), 64)
    wide = planner(MIXTRAL, dispatch="bf16").row(cluster(H100), Ranks(1, 8), 64)
    scaled = 1 + 4 / 128
    assert fp8.sent_bytes / wide.sent_bytes == pytest.approx((scaled + 2 * load.imbalance) / (2 + 2 * load.imbalance))
    assert fp8.received_bytes / wide.sent_bytes == pytest.approx(
        (scaled * load.imbalance + 2) / (2 + 2 * load.imbalance)
    )
    assert planner(MIXTRAL, "fp8").row(cluster(H100), Ranks(1, 8), 64).dispatch == "fp8"
    assert planner(MIXTRAL, "fp8").row(cluster(A100), Ranks(1, 8), 64).dispatch == "bf16"


@pytest.mark.parametrize(("experts", "top_k", "ranks", "groups", "of"), [(256, 8, 8, 1, 1), (256, 8, 8, 8, 4),
                         (256, 8, 32, 8, 4), (64, 6, 2, 8, 3), (8, 2, 8, 1, 1), (160, 6, 4, 8, 3)])  # fmt: skip
def test_ranks_that_hold_some_of_a_tokens_experts(experts, top_k, ranks, groups, of):
    """Against draws: `of` of the groups, then `top_k` of their experts."""
    draw, size, found = random.Random(0), experts // groups, 0
    for _ in range(4000):
        chosen = draw.sample(range(groups), of)
        among = [group * size + n for group in chosen for n in range(size)]
        found += len({expert * ranks // experts for expert in draw.sample(among, top_k)})
    assert ranks_reached(experts, top_k, ranks, groups, of) == pytest.approx(found / 4000, rel=0.02)


@pytest.mark.parametrize("skew", ["uniform", "zipf:1.2"])
@pytest.mark.parametrize("ranks", [1, 4])
def test_expert_rows_sum_to_the_load(skew, ranks):
    load = expert_load(64, 6, 100, ranks, skew)
    rows = expert_rows(64, 6, 100, ranks, skew)
    assert sum(r * n for r, n in rows) == pytest.approx(600 / ranks * load.imbalance)
    assert sum(n for _, n in rows) == pytest.approx(load.touched_rank if ranks > 1 else load.touched)
    even = expert_rows(64, 6, 100, ranks, skew, even=True)
    assert sum(r * n for r, n in even) == pytest.approx(600 / ranks)


def test_a_token_crosses_the_network_once_for_each_node():
    """DeepSeek-V3 over 32 ranks of 4 nodes: 3 of 4 nodes are others, and the network carries a row for each."""
    model = catalog.find("deepseek-v3")
    row = planner(model, dispatch="bf16").row(cluster(H100), Ranks(1, 32), 32 * 4096)
    each, nodes = ranks_reached(256, 8, 32, 8, 4), ranks_reached(256, 8, 4, 8, 4)
    assert nodes < each
    load = expert_load(256, 8, 32 * 4096, 32)
    crossing = 58 * 2 * load.imbalance * 4096 * 7168 * 2 * nodes * 3 / 4 / (0.8 * 50e9)
    assert row.link_s == pytest.approx(crossing, rel=0.01)
    choice = planner(model, dispatch="bf16", rows_per="choice").row(cluster(H100), Ranks(1, 32), 32 * 4096)
    assert choice.link_s == pytest.approx(crossing * 8 / nodes, rel=0.01)


def test_shared_experts_may_run_during_the_all_to_alls():
    model = catalog.find("deepseek-v3")
    apart, together = (
        planner(model, "fp8", overlap=overlap).row(cluster(H100), Ranks(1, 64), 4096) for overlap in (False, True)
    )
    assert together.time_s < apart.time_s
    assert apart.time_s - together.time_s <= apart.link_s
    assert planner(MIXTRAL, overlap=True).row(cluster(H100), Ranks(1, 8), 64).time_s == pytest.approx(
        planner(MIXTRAL).row(cluster(H100), Ranks(1, 8), 64).time_s
    )


def test_nodes_put_devices_apart():
    two = planner(LLAMA, nodes=2).row(cluster(H100), Ranks(8), 4096)
    four = planner(LLAMA).row(cluster(H100, Assumptions(per_node=4)), Ranks(8), 4096)
    assert (two.time_s, two.links) == (four.time_s, "nvlink4 + ndr")
    assert two.link_s > planner(LLAMA).row(cluster(H100), Ranks(8), 4096).link_s
    assert "2 devices do not divide over 3 nodes" in planner(LLAMA, nodes=3).row(cluster(H100), Ranks(2), 1).refused


def test_dollars_per_million_tokens():
    row = planner(LLAMA, price=3.0).row(cluster(H100), Ranks(2), 64)
    assert row.cost_per_million_tokens == pytest.approx(2 * 3.0 / 3600 * row.time_s / 64 * 1e6)
    assert planner(LLAMA).row(cluster(H100), Ranks(2), 64).cost_per_million_tokens is None


def test_what_was_not_measured_has_a_wider_interval_and_says_so():
    def width(row) -> float:
        return row.time_high_s / row.time_low_s

    known = planner(LLAMA).row(cluster(H100), Ranks(), 64)
    for device, why in (("h100-nvl", "as H100 SXM5"), ("mi300x", "as the median of other devices")):
        row = planner(LLAMA).row(cluster(named(device, "--device")), Ranks(), 64)
        assert width(row) > width(known)
        assert why in row.unknown
    assert planner(LLAMA, "fp32").row(cluster(H100), Ranks(), 1).bound == "memory"  # not a tile's worth of arithmetic
    assert "fp32" in planner(LLAMA, "fp32").row(cluster(H100), Ranks(), 64).unknown
    assert width(planner(LLAMA).row(cluster(H100), Ranks(8), 64)) > width(known)  # collectives


def test_a_skew_makes_a_rank_wait_for_the_popular_experts():
    even, skewed = (
        planner(MIXTRAL, skew=skew).row(cluster(H100), Ranks(1, 8), 4096) for skew in ("uniform", "zipf:1.2")
    )
    assert skewed.time_s > 1.5 * even.time_s
    assert even.balanced_time_s < skewed.balanced_time_s < 1.3 * even.balanced_time_s  # uneven within a rank, too
    assert skewed.busiest_expert_tokens > 2 * even.busiest_expert_tokens


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([1, 2, 4, 8, 16]), st.sampled_from([1, 2, 4]), st.integers(1, 5000), st.integers(1, 5000),
    st.sampled_from(["uniform", "zipf:1.2"]),
)  # fmt: skip
def test_more_tokens_never_take_less(tp, ep, a, b, skew):
    spec = FFNSpec(256, 512, "silu", gated=True, moe=MoE(experts=8, top_k=2))
    plan = Planner(block_model(spec, "x").model, BF16, skew=skew)
    few, many = (plan.row(cluster(H100), Ranks(tp, ep), tokens) for tokens in sorted((a, b)))
    for name in ("time_s", "compute_s", "link_s", "activation_bytes", "busiest_expert_tokens", "experts_read"):
        assert getattr(few, name) <= getattr(many, name) * (1 + 2e-2), name  # rounded rows; two ways of an expectation
    assert few.balanced_time_s <= few.time_s * (1 + 1e-9)
    assert 0 < few.efficiency <= 1 + 1e-9


def test_what_cannot_be_split_says_why():
    where = cluster(H100)
    refused = planner(LLAMA).row(where, Ranks(3), 1)
    assert (refused.time_s, refused.fits) == (None, None)
    assert refused.refused == "d_ff = 11008 does not divide over 3 ranks; nearest: 2 and 4"
    assert "has no experts" in planner(LLAMA).row(where, Ranks(1, 2), 1).refused
    assert "experts = 8" in planner(MIXTRAL).row(where, Ranks(1, 3), 1).refused
    assert (
        planner(LLAMA).row(cluster(V100), Ranks(), 1).refused
        == "no rate of V100 SXM2 is known in bf16; known: fp32, fp16, int8"
    )
    lonely = replace(cluster(H100), wires=replace(where.wires, link=None))
    assert "no link of H100 SXM5 is known" in planner(LLAMA).row(lonely, Ranks(2), 1).refused


def test_the_cheapest_has_the_fewest_devices_then_the_least_time():
    plan = plan_model(
        catalog.find("llama-2-70b"), PlanQuestion(device="h100", tp=(1, 2, 4), tokens=(1, 4096), dtype=("bf16", "fp8"))
    )
    (best,) = plan.cheapest
    assert (best.dtype, best.tp, best.tokens) == ("fp8", 2, 1)
    assert {row.tp: row.fits for row in plan.rows} == {1: False, 2: True, 4: True}
    rows = [replace(best, time_s=3.0), replace(best, dtype="x", time_s=2.0), replace(best, dtype="y", tp=4, devices=4)]
    assert cheapest(rows).dtype == "x"
    assert cheapest([replace(best, fits=False)]) is cheapest([]) is None
    late = replace(best, tokens=9, fits=False)  # fits with few tokens only
    assert cheapest([best, late]) is None


def test_outside_the_ffns_a_packed_format_leaves_the_activations_format():
    row = plan_model(catalog.find("llama-2-70b"), PlanQuestion(device="h100", tp=1, tokens=1, dtype="fp8")).rows[0]
    ffn = 80 * 3 * 8192 * 28672
    assert row.ffn_weight_bytes == ffn
    assert row.model_weight_bytes == ffn + 2 * (68_976_648_192 - ffn)


def test_assumptions_take_the_place_of_defaults():
    given = Assumptions(gemm_efficiency=0.5, link="pcie5", network="hdr", per_node=4, usable_memory=0.5)
    one = assumed(H100, given)
    assert (one.gemm_efficiency, one.memory_efficiency, one.link, one.link_gbytes_per_s) == (0.5, None, "pcie5", 63)
    assert one.changed == ("gemm_efficiency", "usable_memory", "link", "network", "per_node")
    where = cluster_of(H100, one)
    assert (where.memory_bytes, where.wires.per_node) == (81_559 << 19, 4)
    plan = Planner(LLAMA.model, BF16)
    half, full = (plan.row(cluster(H100, Assumptions(gemm_efficiency=x)), Ranks(), 4096) for x in (0.5, 1.0))
    assert half.compute_s == pytest.approx(2 * full.compute_s)
    with pytest.raises(FFNError, match="link"):
        assumed(H100, Assumptions(link="nvlink99"))


def test_nothing_but_refusals_is_an_error():
    with pytest.raises(FFNError, match="no rate"):
        plan_model(LLAMA, PlanQuestion(device="v100", dtype="bf16"))
    with pytest.raises(FFNError, match="skew"):
        plan_model(LLAMA, PlanQuestion(device="h100", skew="x"))


NVLINK, NDR = link_named("nvlink4", "--link"), link_named("ndr", "--network")
EIGHT_A_NODE = Wires(NVLINK, NDR, per_node=8, efficiency=0.8)
# NCCL's protocol for many bytes (Simple): seconds of a call, of a step within a node, of a step between nodes
CALL, STEP, CROSSING = 8.4e-6, 3.4e-6, 14e-6


def test_a_ring_in_a_node():
    expected = CALL + 14 * STEP + 2 * 7 / 8 * 1e9 / (0.8 * 450e9)
    assert EIGHT_A_NODE.all_reduce_s(1e9, 8) == pytest.approx(expected)
    assert EIGHT_A_NODE.all_reduce_s(1e9, 1) == EIGHT_A_NODE.all_reduce_s(0, 8) == 0


@pytest.mark.parametrize(
    ("size", "expected"),
    [  # the least of NCCL's LL (6.6 + 14 × 0.6 us, a quarter of the bandwidth), LL128 (14 + 14 × 1.9, 0.92), Simple
        (1e3, 15.0e-6 + 1.75e3 / (0.25 * 360e9)),
        (4e6, 40.6e-6 + 1.75 * 4e6 / (0.92 * 360e9)),
        (1e8, 56.0e-6 + 1.75e8 / 360e9),
    ],
)
def test_few_bytes_wait_less_and_many_are_sent_faster(size, expected):
    assert EIGHT_A_NODE.all_reduce_s(size, 8) == pytest.approx(expected)


def test_over_pcie_there_is_no_ll128():
    cards = Wires(link_named("pcie4", "--link"), None, per_node=8, efficiency=1.0)
    for size in (1e3, 1e5, 1e6, 1e7):
        expected = min(20.6e-6 + 1.75 * size / (0.25 * 31e9), 88.2e-6 + 1.75 * size / 31e9)
        assert cards.all_reduce_s(size, 8) == pytest.approx(expected)


def test_a_ring_over_two_nodes_leaves_them_by_eight_ports():
    """8 ports of 50 GB/s are slower than the link's 450; of its 30 steps, 4 cross."""
    expected = CALL + 26 * STEP + 4 * CROSSING + 2 * 15 / 16 * 1e9 / (0.8 * 400e9)
    assert EIGHT_A_NODE.all_reduce_s(1e9, 16) == pytest.approx(expected)
    assert (EIGHT_A_NODE.names(8), EIGHT_A_NODE.names(9), EIGHT_A_NODE.names(1)) == (
        ("nvlink4",),
        ("nvlink4", "ndr"),
        (),
    )


def test_without_a_link_only_the_network_is_left():
    alone = Wires(None, NDR, per_node=1, efficiency=1.0)
    assert alone.all_reduce_s(1e9, 4) == pytest.approx(CALL + 6 * CROSSING + 1.5 * 1e9 / 50e9)
    assert alone.names(4) == ("ndr",)
    unknown = Wires(None, None, per_node=8, efficiency=1.0)
    assert unknown.all_reduce_s(1, 2) is unknown.all_to_all_s(1, 2) is unknown.names(2) is None


def test_an_all_to_all_takes_the_slower_of_link_and_network():
    """Of 16 ranks, 7 others are here and 8 there."""
    assert EIGHT_A_NODE.all_to_all_s(1e9, 8) == pytest.approx(CALL + STEP + 7 / 8 * 1e9 / (0.8 * 450e9))
    assert EIGHT_A_NODE.all_to_all_s(1e9, 16) == pytest.approx(CALL + CROSSING + 8 / 16 * 1e9 / (0.8 * 50e9))
    assert EIGHT_A_NODE.all_to_all_s(1e9, 8, apart=8) == pytest.approx(CALL + CROSSING + 7 / 8 * 1e9 / (0.8 * 50e9))


def test_of_a_link_without_a_switch_two_ranks_have_one_wire():
    mesh = Wires(link_named("xgmi-mi300x", "--link"), None, per_node=8, efficiency=1.0)
    wire = 448e9 / 7
    assert mesh.all_reduce_s(1e9, 2) == pytest.approx(CALL + 2 * STEP + 1e9 / wire)
    assert mesh.all_reduce_s(1e9, 8) == pytest.approx(CALL + 14 * STEP + 1.75e9 / 448e9)
    assert Link("x", "x", 10, "node", "").bytes_per_s(2) == 10e9


@given(st.integers(1, 300), st.integers(2, 64), st.integers(1, 10**9), st.integers(1, 10**9))
def test_more_bytes_never_take_less(per_node, ranks, a, b):
    wires = Wires(NVLINK, NDR, per_node, 0.8)
    small, large = sorted((a, b))
    for call in (wires.all_reduce_s, wires.all_to_all_s):
        assert call(small, ranks) <= call(large, ranks)
