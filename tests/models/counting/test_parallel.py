"""Splits against torch's chunks and its own column- and row-parallel styles, and a ring that is walked; experts' tokens
against draws, what each rank holds and sends against routings that are walked."""

from dataclasses import replace
from itertools import combinations, permutations
from math import comb, prod

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from ffncli.block.cost import cost
from ffncli.block.dtypes import STORED, TABLE, storage, weight_bytes
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.traffic import experts_touched, rank_experts_touched
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.expert_load import expert_load, skew_text
from ffncli.models.counting.parallel import (
    all_gather_bytes,
    exchange,
    exchanged,
    expert_rank_counts,
    rank_counts,
    ring_all_reduce_bytes,
    split,
)
from ffncli.models.counting.traffic import token_costs
from ffncli.models.model import Group, Model, block_model
from tests.oracles import modules

BF16 = storage("bf16")
BLOCKS = [
    FFNSpec(64, 1536, "gelu", norm="layernorm", residual=True),
    FFNSpec(64, 1536, "swiglu", bias=True, norm="rmsnorm", residual=True),
    FFNSpec(64, 1536, "xielu", parallel=True),
    FFNSpec(64, 1536, "swiglu", bias=True, moe=MoE(4, 2, 1, shared_gate=True, router_bias=True, correction=True)),
    FFNSpec(64, 1536, "swiglu", moe=MoE(4, 2, 3, shared_d_ff=3072)),
]


def a_block(spec: FFNSpec) -> Model:
    return block_model(spec, "block").model


@pytest.mark.parametrize("spec", BLOCKS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("name", ["fp32", "fp8", "q4_0", "nf4"])
def test_ranks_add_up_to_the_whole_and_the_copies(spec, ranks, name):
    weights = storage(name)
    found = split(a_block(spec), ranks, weights)
    (group,) = found.groups
    own = [s for s in group.slices if not s.name.startswith("norm")]
    copied = [s for s in own if s.place == "copied"]
    params = group.rank_0_params + (ranks - 1) * group.other_rank_params
    size = group.rank_0_weight_bytes + (ranks - 1) * group.other_rank_weight_bytes
    assert params == cost(a_block(spec).main.steps).params + (ranks - 1) * sum(s.params for s in copied)
    assert size == weight_bytes(a_block(spec).main.steps, weights) + (ranks - 1) * sum(s.bytes for s in copied)
    assert group.rank_0_params == sum(s.params for s in own)
    assert group.rank_0_weight_bytes == sum(s.bytes for s in own)
    assert group.other_rank_params == sum(s.params for s in own if s.place != "rank 0")
    assert found.whole_params_total == cost(a_block(spec).main.steps).params


def test_places():
    spec = FFNSpec(64, 768, "swiglu", bias=True, norm="rmsnorm", residual=True, moe=MoE(4, 2, 1, shared_gate=True))
    assert {s.name: s.place for s in split(a_block(spec), 2, BF16).groups[0].slices} == {
        **dict.fromkeys(("norm.weight", "router.weight", "shared_gate.weight"), "copied"),
        **{
            f"{at}{name}.{part}": "column"
            for at in ("", "shared.")
            for name in ("gate", "up")
            for part in ("weight", "bias")
        },
        **{f"{at}down.weight": "row" for at in ("", "shared.")},
        **{f"{at}down.bias": "rank 0" for at in ("", "shared.")},
    }


@pytest.mark.parametrize("spec", BLOCKS)
@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_slices_are_torchs_chunks(spec, ranks):
    axis = {"column": lambda s: len(s.shape) - 1 - s.name.endswith("weight"), "row": lambda s: len(s.shape) - 1}
    for s in split(a_block(spec), ranks, BF16).groups[0].slices:
        whole = torch.empty(s.shape, device="meta", dtype=torch.bfloat16)
        parts = whole.chunk(ranks, axis[s.place](s)) if s.place in axis else [whole]
        assert {tuple(part.shape) for part in parts} == {s.rank_shape}
        assert (s.params, s.bytes) == (parts[0].numel(), parts[0].nbytes)


@pytest.mark.parametrize("gated", [False, True])
def test_slices_are_those_of_torchs_parallel_styles(gated):
    ranks = 4
    distributed.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    try:
        module = (modules.Gated if gated else modules.Plain)(64, 768, bias=False)
        plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(module, init_device_mesh("cpu", (ranks,)), {n: plan[n] for n, _ in module.named_children()})
        local = {name: tuple(p.to_local().shape) for name, p in module.named_parameters()}
    finally:
        distributed.destroy_process_group()
    spec = FFNSpec(64, 768, "silu", gated=gated, bias=False)
    assert {s.name: s.rank_shape for s in split(a_block(spec), ranks, BF16).groups[0].slices} == local


def sent_over_a_ring(parts: int, part: int) -> list[int]:
    """Bytes that each rank passes on until all hold the sum of all, every rank's data in `parts` parts of `part`."""
    held = [[{rank} for _ in range(parts)] for rank in range(parts)]  # whose numbers each part sums
    sent = [0] * parts
    everyone = set(range(parts))
    for round_ in range(2 * (parts - 1)):
        moving = [(rank, (rank - round_) % parts) for rank in range(parts)]
        arriving = [((rank + 1) % parts, which, held[rank][which]) for rank, which in moving]
        for rank, which, numbers in arriving:
            held[rank][which] = held[rank][which] | numbers
            sent[rank] += part
    assert all(numbers == everyone for rank in held for numbers in rank)
    return sent


@given(ranks=st.integers(1, 12), part=st.integers(1, 1000))
def test_ring_bytes_are_those_of_a_ring_that_is_walked(ranks, part):
    assert sent_over_a_ring(ranks, part) == [ring_all_reduce_bytes(ranks * part, ranks)] * ranks


def test_wire_bytes_of_llama():
    found = split(catalog.find("llama-2-7b").model, 4, BF16, tokens=3)
    assert found.ring_all_reduce_bytes_per_token == 2 * 3 / 4 * 4096 * 2
    assert found.all_gather_bytes_per_token == 3 * 4096 * 2
    assert found.ring_all_reduce_bytes_total == 32 * 3 * found.ring_all_reduce_bytes_per_token
    assert found.all_gather_bytes_total == 32 * 3 * found.all_gather_bytes_per_token
    assert (found.d_ff, found.layers, found.tokens, found.groups[0].all_reduces) == (2752, 32, 3, 1)
    assert 4 * found.rank_0_params_total == found.whole_params_total == 4_328_521_728
    assert 4 * found.other_rank_weight_bytes_total == 2 * 4_328_521_728
    packed = split(catalog.find("llama-2-7b").model, 4, storage("q4_0"))
    assert packed.ring_all_reduce_bytes_per_token == found.ring_all_reduce_bytes_per_token  # activations in bf16
    assert packed.activation_dtype == "bf16"


def test_one_part_in_three_of_a_byte_is_no_rounding():
    assert ring_all_reduce_bytes(8192, 3) == pytest.approx(4 * 8192 / 3, rel=1e-15)
    assert all_gather_bytes(8192, 3) == 16384
    assert isinstance(ring_all_reduce_bytes(8192, 4), int)  # whole bytes print as such
    found = split(a_block(FFNSpec(64, 768)), 3, BF16, tokens=3)
    assert found.ring_all_reduce_bytes_total == 2 * 2 * 64 * 2


def test_nothing_is_sent_by_one_rank_alone():
    found = split(a_block(BLOCKS[1]), 1, BF16)
    assert found.ring_all_reduce_bytes_per_token == found.all_gather_bytes_total == found.groups[0].all_reduces == 0


def test_a_model_of_two_kinds_of_layers():
    dense, sparse = FFNSpec(64, 768, "swiglu"), FFNSpec(64, 96, "swiglu", moe=MoE(4, 2, 1))
    model = Model("m", (Group("decoder", (0,), dense), Group("decoder", (1, 2), sparse)))
    found = split(model, 2, BF16)
    per_sparse = 5 * 3 * 64 * 48 + 64 * 4
    assert found.rank_0_params_total == 3 * 64 * 384 + 2 * per_sparse
    assert found.d_ff == 48
    assert [(g.d_ff, g.shared_d_ff, g.other_rank_params) for g in found.groups] == [
        (384, 0, 3 * 64 * 384),
        (48, 48, per_sparse),
    ]
    assert rank_counts(model, BF16) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 96)
    assert rank_counts(model, storage("q4_0")) == (1, 3)


@given(
    widths=st.lists(st.integers(1, 40), min_size=1, max_size=3), times=st.sampled_from([1, 2, 32]),
    shared=st.integers(0, 2), row=st.sampled_from([*TABLE[:1], storage("int4"), storage("q8_0")]),
)  # fmt: skip
def test_rank_counts_are_all_that_divide(widths, times, shared, row):
    specs = [FFNSpec(64, width * times, moe=MoE(4, 2, shared, shared_d_ff=24 * times)) for width in widths]
    model = Model("m", tuple(Group("decoder", (i,), spec) for i, spec in enumerate(specs)))
    cut = [width * times for width in widths] + [24 * times] * bool(shared)
    possible = [n for n in range(1, max(cut) + 1) if all(size % (n * row.block) == 0 for size in cut)]
    assert list(rank_counts(model, row)) == possible
    for ranks in range(1, 60):
        if ranks in possible:
            assert split(model, ranks, row).ranks == ranks
        else:
            expect_the_nearest(model, ranks, row, possible)


def expect_the_nearest(model: Model, ranks: int, row, possible: list[int]) -> None:
    with pytest.raises(FFNError) as refused:
        split(model, ranks, row)
    below, above = [n for n in possible if n < ranks], [n for n in possible if n > ranks]
    near = " and ".join(str(n) for n in (*below[-1:], *above[:1]))
    assert refused.value.hint == (f"nearest: {near}" if near else "choose another --dtype")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "ranks", "dtype", "message"),
    [
        ("llama-2-7b", 3, "bf16", "d_ff = 11008 does not divide over 3 ranks; nearest: 2 and 4"),
        ("llama-2-7b", 20000, "bf16", "d_ff = 11008 does not divide over 20000 ranks; nearest: 11008"),
        ("llama-2-7b", 16, "q4_0",
         "d_ff = 11008 over 16 ranks is 688 per rank, not a multiple of q4_0's block size 32; nearest: 8 and 43"),
        ("llama-2-7b", 2, "q4_k",
         "d_ff = 11008 over 2 ranks is 5504 per rank, not a multiple of q4_k's block size 256; nearest: 1 and 43"),
        ("gpt-oss-120b", 8, "mxfp4",
         "d_ff = 2880 over 8 ranks is 360 per rank, not a multiple of mxfp4's block size 32; nearest: 6 and 9"),
        ("gpt-oss-120b", 1, "q4_k",
         "d_ff = 2880 over 1 rank is 2880 per rank, not a multiple of q4_k's block size 256; choose another --dtype"),
    ],
)  # fmt: skip
def test_refusals(name, ranks, dtype, message):
    with pytest.raises(FFNError) as refused:
        split(catalog.find(name).model, ranks, storage(dtype))
    assert (str(refused.value), refused.value.code) == (message, 2)


def test_a_shared_width_that_does_not_divide_is_named():
    spec = FFNSpec(64, 96, "swiglu", moe=MoE(4, 2, 1, shared_d_ff=81))
    with pytest.raises(FFNError, match="shared d_ff = 81 does not divide over 2 ranks; nearest: 1 and 3"):
        split(a_block(spec), 2, BF16)


def test_a_norm_over_d_ff_stays_whole():
    spec = FFNSpec(64, 96, gated=True, sub_norm=True)
    assert split(a_block(spec), 1, BF16).ranks == 1
    with pytest.raises(FFNError, match="a norm covers d_ff, so it cannot be split over ranks; nearest: 1"):
        split(a_block(spec), 2, BF16)


def test_rows_of_d_model_have_to_be_whole_blocks_too():
    model = a_block(FFNSpec(48, 96))
    with pytest.raises(FFNError, match=r"up.weight: q4_0 stores 32 weights in a block; a row of 48"):
        split(model, 1, storage("q4_0"))


@given(spec=st.sampled_from(BLOCKS), row=st.sampled_from([*TABLE, *STORED]), ranks=st.integers(1, 24))
def test_every_split_of_every_format_is_of_whole_blocks_or_refused(spec, row, ranks):
    model = a_block(spec)
    assume(64 % row.block == 0)
    if ranks not in rank_counts(model, row):
        with pytest.raises(FFNError):
            split(model, ranks, row)
        return
    for s in split(model, ranks, row).groups[0].slices:
        assert s.place != "row" or s.rank_shape[-1] % row.block == 0


MIXTURE = FFNSpec(64, 96, "swiglu", bias=True, norm="rmsnorm", moe=MoE(8, 2, 1, router_bias=True))


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_grid_holds_the_whole_and_the_copies(tp, ep):
    model = a_block(MIXTURE)
    found = split(model, tp, BF16, ep=ep)
    routed = 8 * (3 * 64 * 96 + 2 * 96 + 64)
    shared, router = 3 * 64 * 96 + 2 * 96 + 64, 64 * 8 + 8
    assert found.whole_params_total == routed + shared + router == cost(model.main.steps).params
    held = found.rank_0_params_total + (tp - 1) * found.other_rank_params_total
    assert held == routed // ep + shared + tp * router
    assert (found.ranks, found.expert_ranks) == (tp, ep)


def test_places_of_a_grid():
    slices = {one.name: one for one in split(a_block(MIXTURE), 2, BF16, ep=4).groups[0].slices}
    assert {name: one.place for name, one in slices.items()} == {
        "norm.weight": "copied", "router.weight": "copied", "router.bias": "copied",
        "gate.weight": "experts, column", "up.weight": "experts, column", "down.weight": "experts, row",
        "gate.bias": "experts, column", "up.bias": "experts, column", "down.bias": "experts, rank 0",
        **{f"shared.{name}.{kind}": "column" for name in ("gate", "up") for kind in ("weight", "bias")},
        "shared.down.weight": "row", "shared.down.bias": "rank 0",
    }  # fmt: skip
    assert (slices["down.weight"].shape, slices["down.weight"].rank_shape) == ((8, 64, 96), (2, 64, 48))
    alone = split(a_block(MIXTURE), 1, BF16, ep=4).groups[0].slices
    assert {one.place for one in alone if one.shape != one.rank_shape} == {"experts"}
    assert {one.place for one in alone if one.shape == one.rank_shape} == {"copied"}


def rows_sent(experts: int, top_k: int, ranks: int) -> float:
    """The mean over all choices of a token on rank 0: how many of its rows go to another rank."""
    own = experts // ranks
    choices = list(combinations(range(experts), top_k))
    return sum(expert >= own for chosen in choices for expert in chosen) / len(choices)


@given(own=st.integers(1, 3), ranks=st.integers(1, 4), data=st.data())
def test_bytes_are_those_of_all_routings(own, ranks, data):
    experts = own * ranks
    top_k = data.draw(st.integers(1, min(experts, 4)))
    model = a_block(FFNSpec(6, 12, moe=MoE(experts, top_k)))
    if ranks == 1 or not experts % ranks:
        found = exchange(model, ranks, BF16, tokens=5)
        expected = rows_sent(experts, top_k, ranks) * 6 * 2
        assert found.dispatch_bytes_per_token == pytest.approx(expected, abs=1e-12)
        assert found.combine_bytes_total == pytest.approx(5 * expected, abs=1e-12)
        assert found.tokens_per_expert == pytest.approx(5 * ranks * top_k / experts)


def test_qwen3_over_8_ranks():
    """128 experts, 8 per token, 48 layers of d_model 2,048, in bf16."""
    found = exchange(catalog.find("qwen3-30b-a3b").model, 8, BF16, tokens=32)
    assert (found.experts, found.top_k, found.layers, found.all_to_alls) == (16, 8, 48, 2)
    assert found.dispatch_bytes_per_token == found.combine_bytes_per_token == 8 * 2048 * 2 * 7 / 8
    assert found.dispatch_bytes_total + found.combine_bytes_total == 48 * 32 * 2 * 28672
    assert found.tokens_per_expert == 32 * 8 * 8 / 128


def test_only_layers_with_experts_send_and_dense_ones_are_copied():
    dense, sparse = FFNSpec(64, 768, "swiglu"), FFNSpec(64, 96, "swiglu", moe=MoE(4, 2))
    model = Model("m", (Group("decoder", (0, 1, 2), dense), Group("decoder", (3, 4), sparse, runs=2)))
    found = exchange(model, 2, BF16)
    assert (found.layers, found.experts, len(found.groups)) == (2, 2, 1)
    assert found.dispatch_bytes_total == 2 * 2 * found.dispatch_bytes_per_token == 2 * 2 * 2 * 64 * 2 / 2
    assert split(model, 1, BF16, ep=2).rank_0_params_total == 3 * 3 * 64 * 768 + 2 * (2 * 3 * 64 * 96 + 64 * 4)


def test_rows_have_the_experts_width():
    latent = FFNSpec(64, 96, moe=MoE(8, 3, 1, latent=16))
    assert exchanged(a_block(latent).main.steps) == (3 * 16, 3 * 16)
    routed = FFNSpec(64, 96, moe=MoE(8, 3, 2, shared_routed=True))
    assert exchanged(a_block(routed).main.steps) == (3 * 64, 3 * 64)
    assert exchanged(a_block(FFNSpec(64, 96)).main.steps) == (0, 0)


@pytest.mark.parametrize(("experts", "top_k", "ranks", "tokens"), [(4, 2, 2, 1), (4, 1, 4, 1), (3, 2, 3, 1)])
def test_touched_experts_of_a_rank_are_those_of_all_routings(experts, top_k, ranks, tokens):
    """Every rank's token chooses: the mean number of rank 0's experts that any token chose."""
    choices, own = list(combinations(range(experts), top_k)), experts // ranks
    total = 0
    for code in range(len(choices) ** (ranks * tokens)):
        touched = {e for at in range(ranks * tokens) for e in choices[code // len(choices) ** at % len(choices)]}
        total += len(touched & set(range(own)))
    expected = total / comb(experts, top_k) ** (ranks * tokens)
    assert rank_experts_touched(own, top_k, tokens, ranks) == pytest.approx(expected)


def test_a_whole_number_of_experts_is_printed_as_one():
    assert [repr(rank_experts_touched(8, 2, tokens, 1)) for tokens in (1, 2)] == ["2", repr(experts_touched(8, 2, 2))]


def test_a_ranks_traffic_is_its_own_experts():
    model = a_block(replace(MIXTURE, bias=False))
    whole, part = (token_costs(model, BF16, [2**20], ep=ep)[0] for ep in (1, 4))
    routed = 2 * 8 * 3 * 64 * 96
    assert whole.weight_bytes_read - part.weight_bytes_read == routed * 3 // 4
    assert (part.ranks, part.experts_touched, part.matmul_flops) == (4, 2, whole.matmul_flops)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("mixtral-8x7b", 3, "experts = 8 does not divide over 3 ranks; nearest: 2 and 4"),
        ("mixtral-8x7b", 16, "experts = 8 does not divide over 16 ranks; nearest: 8"),
        ("gpt2", 2, "gpt2 has no experts to split over 2 ranks; tp splits its d_ff"),
    ],
)
def test_experts_that_do_not_divide(name, ranks, message):
    model = catalog.find(name).model
    for refused in (lambda: exchange(model, ranks, BF16), lambda: split(model, 1, BF16, ep=ranks)):
        with pytest.raises(FFNError) as error:
            refused()
        assert (str(error.value), error.value.code) == (message, 2)
    assert expert_rank_counts(model) == ((1, 2, 4, 8) if name == "mixtral-8x7b" else (1,))


def test_an_unknown_top_k_is_not_guessed():
    model = replace(a_block(MIXTURE), unknown=frozenset(["top_k"]))
    with pytest.raises(FFNError, match="does not specify its top_k"):
        exchange(model, 2, BF16)


def drawn(experts: int, top_k: int, tokens: int, exponent: float, batches: int = 400) -> np.ndarray:
    """Counts [batches, experts]: a token takes the top_k largest of log weight + Gumbel noise (Yellott 1977)."""
    rng = np.random.default_rng(0)
    keys = -exponent * np.log(np.arange(1, experts + 1)) + rng.gumbel(size=(batches, tokens, experts))
    chosen = np.argpartition(-keys, top_k - 1, -1)[..., :top_k]
    return np.stack([np.bincount(batch.ravel(), minlength=experts) for batch in chosen])


@pytest.mark.parametrize("skew", ["uniform", "zipf:0.7", "zipf:1.2"])
@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "ranks"),
    [(8, 2, 1, 4), (8, 2, 64, 4), (32, 4, 16, 8), (32, 4, 600, 8), (16, 1, 50, 4)],
)
def test_expectations_are_those_of_simulated_batches(experts, top_k, tokens, ranks, skew):
    counts = drawn(experts, top_k, tokens, float(skew.partition(":")[2] or 0))
    by_rank = counts.reshape(len(counts), ranks, -1)
    load = expert_load(experts, top_k, tokens, ranks, skew)
    assert load.per_expert == tokens * top_k / experts == pytest.approx(counts.mean())
    assert load.busiest == pytest.approx(counts.max(-1).mean(), rel=0.08)
    assert load.touched == pytest.approx((counts > 0).sum(-1).mean(), rel=0.03)
    assert load.imbalance == pytest.approx(by_rank.sum(-1).max(-1).mean() / by_rank.sum(-1).mean(), rel=0.15)
    assert load.touched_rank == pytest.approx((by_rank > 0).sum(-1).max(-1).mean(), rel=0.15)


def test_uniform_is_the_closed_form():
    for experts, top_k, tokens in ((8, 2, 1), (8, 2, 100), (256, 8, 7), (4, 4, 3)):
        assert expert_load(experts, top_k, tokens).touched == pytest.approx(experts_touched(experts, top_k, tokens))
        assert expert_load(experts, top_k, tokens) == expert_load(experts, top_k, tokens, skew="zipf:0")


def test_two_of_four_experts_drawn_one_after_the_other_by_hand():
    """The touched experts of one token are its top_k; the most popular one's chance by all orders of the draw."""
    weights = [rank**-1.2 for rank in range(1, 5)]
    first = sum(
        prod(weights[i] / (sum(weights) - sum(weights[j] for j in order[:at])) for at, i in enumerate(order[:2]))
        for order in permutations(range(4), 2)
        if 0 in order
    )
    load = expert_load(4, 2, 1000, skew="zipf:1.2")
    assert expert_load(4, 2, 1, skew="zipf:1.2").touched == pytest.approx(2)
    assert load.busiest == pytest.approx(1000 * first, rel=0.05)


def test_one_rank_has_everything():
    load = expert_load(64, 8, 5)
    assert (load.imbalance, load.touched_rank) == (1.0, load.touched)
    assert expert_load(64, 8, 512).busiest == pytest.approx(expert_load(64, 8, 513).busiest, rel=0.01)  # two methods


@pytest.mark.parametrize("text", ["zipf", "zipf:-1", "zipf:21", "unifrom", "", "x.safetensors"])
def test_another_skew_is_refused(text):
    with pytest.raises(FFNError, match="--skew"):
        skew_text("--skew", text)


def test_an_exponent_is_as_short_as_possible():
    assert (skew_text("--skew", "zipf:1.20"), skew_text("--skew", "uniform")) == ("zipf:1.2", "uniform")
