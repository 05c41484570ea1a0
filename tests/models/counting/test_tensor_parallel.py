"""Splits: against torch's chunks and its own column- and row-parallel styles, and a ring that is walked."""

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
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.parallel import all_gather_bytes, rank_counts, ring_all_reduce_bytes, split
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
