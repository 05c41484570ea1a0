"""Plans and times of collectives by hand, against the counts of --tp, and draws of the router's choices."""

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
from ffncli.models.counting.expert_load import expert_load
from ffncli.models.counting.parallel import split
from ffncli.models.counting.plan import Planner
from ffncli.models.counting.traffic import device_floors, token_costs
from ffncli.models.model import block_model
from ffncli.system.hardware import Device, Link, link_named, named

H100, A100, V100, GB200 = (named(name, "--device") for name in ("h100", "a100", "v100", "gb200"))
LLAMA, MIXTRAL = catalog.find("llama-2-7b"), catalog.find("mixtral-8x7b")
BF16, D, F, LAYERS = storage("bf16"), 4096, 11008, 32
WEIGHTS = LAYERS * 3 * D * F
EXPERT = 3 * 4096 * 14336  # Mixtral's, 8 in each of 32 layers
PERFECT = Assumptions(gemm_efficiency=1.0, memory_efficiency=1.0, link_efficiency=1.0)


def cluster(device: Device, given: Assumptions | None = None) -> Accelerators:
    return cluster_of(device, assumed(device, given or Assumptions()))


def planner(model, name="bf16", **more) -> Planner:
    return Planner(model.model, storage(name), **more)


def handed_over(tokens: int, ranks: int = 1) -> float:
    """What Llama's kernels read and write in bf16: norm; gate and up; activation and product; down; residual."""
    return LAYERS * tokens * 2 * (2 * D + (D + 2 * F / ranks) + 3 * F / ranks + (F / ranks + D) + 3 * D)


def test_llama_on_one_h100_by_hand():
    one = planner(LLAMA).row(cluster(H100), Ranks(), 1)
    assert one.memory_s == pytest.approx((2 * WEIGHTS + handed_over(1)) / 3.35e12 / 0.9)
    assert one.compute_s == pytest.approx(2 * WEIGHTS / 989.4e12 / 0.8)
    assert (one.bound, one.time_s, one.link_s, one.efficiency) == ("memory", one.memory_s, 0, 1)
    assert one.ridge_flops_per_byte == pytest.approx(989.4e12 * 0.8 / (3.35e12 * 0.9))
    assert one.tokens_per_s == pytest.approx(1 / one.time_s)
    many = planner(LLAMA).row(cluster(H100), Ranks(), 4096)
    assert many.compute_s == pytest.approx(4096 * one.compute_s)
    elementwise = LAYERS * 4096 * 2 * (2 * D + 3 * F + 3 * D) / 3.35e12 / 0.9  # the others are bound by arithmetic
    assert (many.bound, many.time_s) == ("compute", pytest.approx(many.compute_s + elementwise))


def test_at_full_rates_a_plan_is_no_faster_than_the_floor_of_the_data_sheet():
    """Both count the same arithmetic; kernels that hand over through memory move more than the least."""
    for device, model, name in ((H100, LLAMA, "bf16"), (H100, LLAMA, "fp8"), (A100, MIXTRAL, "bf16")):
        weights = storage(name)
        for floor in device_floors(device, token_costs(model.model, weights, (1, 100, 5000)), weights, None):
            row = planner(model, name).row(cluster(device, PERFECT), Ranks(), floor.tokens)
            assert (row.rate, row.ridge_flops_per_byte) == (floor.rate, pytest.approx(floor.ridge_flops_per_byte))
            assert row.compute_s == pytest.approx(floor.compute_s)
            assert floor.floor_s < row.time_s < 1.3 * floor.floor_s
            assert row.memory_s > floor.memory_s


def test_the_bound_changes_at_the_ridge():
    plan, where = planner(LLAMA), cluster(H100)
    ridge = plan.row(where, Ranks(), 1).ridge_flops_per_byte
    seen = set()
    for tokens in range(250, 400, 5):
        gate_up = 2 * tokens * D * 2 * F / (2 * (2 * D * F + tokens * (D + 2 * F)))
        down = 2 * tokens * D * F / (2 * (D * F + tokens * (D + F)))
        if (gate_up < ridge) == (down < ridge):
            bound = plan.row(where, Ranks(), tokens).bound
            assert bound == ("memory" if down < ridge else "compute"), tokens
            seen.add(bound)
    assert seen == {"memory", "compute"}


def test_eight_ranks_of_llama_by_hand():
    row = planner(LLAMA).row(cluster(H100), Ranks(8), 100)
    size = 100 * D * 2
    assert row.memory_s == pytest.approx((2 * WEIGHTS / 8 + handed_over(100, 8)) / 3.35e12 / 0.9)
    ring = 6.6e-6 + 14 * 0.6e-6 + 2 * 7 / 8 * size / (0.25 * 450e9 * 0.8)  # by NCCL's LL
    assert row.link_s == pytest.approx(LAYERS * ring)
    assert row.time_s == pytest.approx(row.memory_s + row.link_s)
    alone = planner(LLAMA).row(cluster(H100), Ranks(), 100)
    assert row.efficiency == pytest.approx(alone.time_s / (8 * row.time_s))
    assert (row.all_reduces, row.all_to_alls, row.links) == (32, 0, "nvlink4")
    assert row.sent_bytes == split(LLAMA.model, 8, BF16, 100).ring_all_reduce_bytes_total


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
    where, load = cluster(H100), expert_load(8, 2, 64, ranks=8)
    row = planner(MIXTRAL).row(where, Ranks(1, 8), 64)
    router = 8 * 2 * 4096 * 8
    work = round(8 * 2 * 2 * EXPERT * load.imbalance) + router
    assert row.compute_s == pytest.approx(LAYERS * work / (989.4e12 * 0.8), rel=1e-6)
    weights = 2 * (EXPERT * load.touched_rank + 4096 * 8)
    routed = 16 * ((4096 + 2 * 14336) + 3 * 14336 + (14336 + 4096) + 4096) + 8 * 4096  # the last: mixing, 16 rows to 8
    rest = 8 * (2 * 4096 + (4096 + 8) + 2 * 8 + 3 * 4096)  # norm, router, its choice, residual
    moved = weights + 2 * (routed * load.imbalance + rest)
    assert row.memory_s == pytest.approx(LAYERS * moved / (3.35e12 * 0.9), rel=1e-4)
    size = round(8 * load.imbalance) * 2 * 4096 * 2
    exchange = 6.6e-6 + 0.6e-6 + 7 / 8 * size / (0.25 * 450e9 * 0.8)  # by NCCL's LL
    assert row.link_s == pytest.approx(2 * LAYERS * exchange)
    assert (row.all_reduces, row.all_to_alls, row.tokens_per_expert) == (0, 64, 16)
    assert row.busiest_expert_tokens == load.busiest
    assert row.balanced_time_s < row.time_s


def test_a_skew_makes_a_rank_wait_for_the_popular_experts():
    even, skewed = (
        planner(MIXTRAL, skew=skew).row(cluster(H100), Ranks(1, 8), 4096) for skew in ("uniform", "zipf:1.2")
    )
    assert skewed.time_s > 1.5 * even.time_s
    assert skewed.balanced_time_s == pytest.approx(even.balanced_time_s)
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
    assert (one.gemm_efficiency, one.memory_efficiency, one.link, one.link_gbytes_per_s) == (0.5, 0.9, "pcie5", 63)
    assert one.changed == ("gemm_efficiency", "usable_memory", "link", "network", "per_node")
    where = cluster_of(H100, one)
    assert (where.memory_bytes, where.wires.per_node) == (81_559 << 19, 4)
    assert [assumed(device, Assumptions()).gemm_efficiency for device in (H100, A100)] == [0.8, 0.85]
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
