"""Roofline figures against closed forms and torch's FLOP counter; what ranks send, against numbers by hand."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ffncli.bench.judge import roofline
from ffncli.bench.judge.environment_match import match
from ffncli.bench.judge.roofline import communication_bytes, sent_by_rank
from ffncli.bench.judge.summary import summarise
from ffncli.bench.records import COLLECTIVES, COMPUTE, Case, Roof
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.shard import Ranks
from ffncli.errors import FFNError
from tests.bench.units import CASE, RUN, units_of

T, D, F = 4096, 1024, 2816
GATED = FFNSpec(D, F, "silu", gated=True, bias=False)
PLAIN = FFNSpec(D, F, "gelu", gated=False, bias=False)
H100 = "NVIDIA H100 80GB HBM3"


def case(spec=GATED, tokens=T, **other) -> Case:
    return Case("typed", "label", spec, tokens, **{"dtype": "bf16", "cache": "flush", **other})


@pytest.mark.parametrize(("spec", "matrices"), [(GATED, 3), (PLAIN, 2)])
def test_forward_counts_products_and_what_must_be_moved(spec, matrices):
    found = roofline.figures(case(spec), None, Roof(), "")
    assert found.flops == 2 * matrices * T * D * F
    assert found.bytes == 2 * (matrices * D * F + 2 * T * D)
    assert (found.tflops, found.roof_fraction, found.datasheet_fraction, found.fusion_saving_max) == (None,) * 4


def test_norm_and_residual_are_no_part_of_it():
    around = replace(GATED, norm="rmsnorm", norm_weight="plain", residual=True)
    assert roofline.work_of(case(around)) == roofline.work_of(case())


@pytest.mark.parametrize("spec", [GATED, PLAIN])
def test_forward_backward_is_three_times_forward_as_torch_counts(spec):
    spec = replace(spec, d_model=16, d_ff=24)
    x = torch.randn(7, 16, requires_grad=True)
    up, gate, down = (torch.randn(*s, requires_grad=True) for s in ((24, 16), (24, 16), (16, 24)))
    with FlopCounterMode(display=False) as counter:
        hidden = x @ up.T
        hidden = torch.nn.functional.silu(x @ gate.T) * hidden if spec.gated else torch.nn.functional.gelu(hidden)
        y = hidden @ down.T
        used = [x, up, down, *([gate] if spec.gated else [])]
        torch.autograd.grad(y, used, torch.ones_like(y))
    assert roofline.figures(case(spec, 7, passes="forward+backward"), None, Roof(), "").flops == (
        counter.get_total_flops()
    )


def test_forward_backward_moves_gradients_once():
    work = roofline.work_of(case(passes="forward+backward"))
    weights, x = 2 * 3 * D * F, 2 * T * D
    assert (work.weights_read, work.weights_written) == (weights, weights)
    assert (work.activations_read, work.activations_written) == (2 * x, 2 * x)  # x, grad of out; out, grad of x


def test_experts_that_are_expected_to_be_touched():
    spec = FFNSpec(64, 96, "silu", gated=True, bias=False, moe=MoE(8, 2))
    one, many = (roofline.work_of(case(spec, n)) for n in (1, 5))
    expert, router = 3 * 64 * 96 * 2, 64 * 8 * 2
    assert one.weights_read == 2 * expert + router
    assert many.weights_read == pytest.approx(8 * (1 - 0.75**5) * expert + router, abs=1)
    assert one.flops == 2 * (2 * 3 * 64 * 96 + 64 * 8)
    counted = roofline.work_of(case(spec, 5), experts_touched=2.5)
    assert counted.weights_read == 2.5 * expert + router
    assert counted.flops == many.flops
    figures = roofline.figures(case(spec, 5), None, Roof(), "", experts_touched=2.5)
    assert figures.bytes == counted.bytes
    assert roofline.fusable_bytes(case(spec, 5)) == 5 * 2 * 4 * 96 * 2


def test_time_over_the_slower_of_arithmetic_and_memory():
    roof = Roof(100e12, 1e12)
    work = roofline.work_of(case())
    arithmetic, memory = work.flops / 100e12, work.bytes / 1e12
    assert arithmetic > memory
    found = roofline.figures(case(), 2 * arithmetic, roof, "")
    assert found.roof_fraction == pytest.approx(0.5)
    assert found.tflops == pytest.approx(50)
    assert found.gbytes_per_s == pytest.approx(work.bytes / (2 * arithmetic) / 1e9)
    one = roofline.work_of(case(tokens=1))
    found = roofline.figures(case(tokens=1), 4 * one.bytes / 1e12, roof, "")
    assert found.roof_fraction == pytest.approx(0.25)


def test_the_data_sheet_in_the_dtype_of_the_case():
    work = roofline.work_of(case())
    seconds = work.flops / 989.4e12 / 0.5
    assert roofline.figures(case(device="cuda"), seconds, Roof(), H100).datasheet_fraction == pytest.approx(0.5)
    fp32 = case(device="cuda", dtype="fp32")
    assert roofline.figures(fp32, work.flops / 67e12, Roof(), H100).datasheet_fraction == pytest.approx(1)
    tf32 = roofline.figures(fp32, work.flops / 494.5e12, Roof(), H100, tf32=True)
    assert tf32.datasheet_fraction == pytest.approx(1)
    assert roofline.figures(case(device="cuda", dtype="fp64"), 1.0, Roof(), H100).datasheet_fraction is None
    assert roofline.figures(case(device="cuda"), 1.0, Roof(), "NVIDIA H100 Nobody").datasheet_fraction is None
    apple = case(device="cpu", dtype="fp32")  # the CPU has the same name as the GPU beside it
    assert roofline.figures(apple, 1.0, Roof(), "Apple M1").datasheet_fraction is None


def test_what_fits_into_the_cache_is_not_bound_by_memory():
    roof = Roof(1e15, 1e9, llc_bytes=10**9)  # arithmetic is free: only memory counts
    weights, ends = 2 * 3 * D * F, 2 * 2 * 8 * D

    def memory(cache: str, **other) -> float:
        small = case(tokens=8, cache=cache, **other)
        return roofline.figures(small, 1.0, replace(roof, **llc), "").roof_fraction * 1e9

    llc = {"llc_bytes": 10**9}
    for cache in ("warm", "shared"):
        assert memory(cache) == pytest.approx(roofline.work_of(case(tokens=8)).flops / 1e15 * 1e9)
    assert memory("cold-weights") == pytest.approx(weights)  # x and out may be in the cache
    assert memory("flush") == pytest.approx(weights + ends / 2)  # out may stay there
    assert memory("flush", passes="forward+backward") == pytest.approx(weights + ends)  # so may all gradients
    llc = {"llc_bytes": 10**6}  # a part fits: that much may be there
    assert memory("warm") == pytest.approx(weights + ends - 10**6)
    llc = {"llc_bytes": None}  # nothing is known: the plain model
    assert memory("warm") == pytest.approx(weights + ends)


def test_bound_and_ridge():
    roof, small = Roof(100e12, 1e12), case(tokens=8)
    work = roofline.work_of(small)
    found = roofline.figures(small, None, roof, "")
    assert (found.bound, found.ridge_flops_per_byte) == ("memory", 100.0)
    assert found.flops_per_byte == pytest.approx(work.flops / work.bytes)
    flushed = roofline.figures(small, None, replace(roof, llc_bytes=10**9), "")
    assert flushed.flops_per_byte == pytest.approx(work.flops / (work.bytes - 2 * 8 * D))  # the output may stay there
    assert roofline.figures(case(), None, roof, "").bound == "compute"
    cached = roofline.figures(case(tokens=8, cache="warm"), None, replace(roof, llc_bytes=10**9), "")
    assert (cached.bound, cached.flops_per_byte) == ("compute", None)
    unknown = roofline.figures(small, None, Roof(), "")
    assert (unknown.bound, unknown.ridge_flops_per_byte) == ("", None)
    sheet = roofline.figures(case(tokens=8, device="cuda"), None, Roof(), H100)
    assert (sheet.bound, sheet.ridge_flops_per_byte) == ("memory", pytest.approx(295.3, abs=0.1))


@pytest.mark.parametrize(
    ("d", "flops", "bandwidth", "low", "high"),
    [
        (4096, 795e12, 3.0e12, 0.0855, 0.0870),  # H100: 8.6 %
        (8192, 795e12, 3.0e12, 0.0425, 0.0435),  # 4.3 %
        (1024, 795e12, 3.0e12, 0.34, 0.355),  # 35 %
        (1536, 271e12, 0.9 * 2039e9, 0.127, 0.133),  # A100 80 GB: 13 % with the activation in one kernel
        (1536, 271e12, 0.9 * 1555e9, 0.165, 0.175),  # with the 40 GB card's bandwidth 17 %
        (4096, 271e12, 0.9 * 2039e9, 0.045, 0.055),  # 5 %
    ],
)
def test_what_fusing_can_save_as_worked_out(d, flops, bandwidth, low, high):
    wide = FFNSpec(d, 4 * d, "silu", gated=True, bias=False)
    found = roofline.figures(case(wide, 16384), None, Roof(flops, bandwidth), "")
    assert low < found.fusion_saving_max < high
    assert found.fusion_saving_max == pytest.approx(4 / 3 * flops / bandwidth / d)


def test_fusing_a_plain_block_and_training():
    roof, plain = Roof(795e12, 3.0e12), case(PLAIN, 16384)
    assert roofline.figures(plain, None, roof, "").fusion_saving_max == pytest.approx(795 / 3.0 / D)  # 4 B / 4 d
    numbers = T * F  # gated training: gate and up are read, the gradient of hidden is written and read
    assert roofline.fusable_bytes(case(passes="forward+backward")) == 2 * (2 * numbers + 2 * numbers)
    assert roofline.fusable_bytes(case(PLAIN, passes="forward+backward")) == 2 * (numbers + 2 * numbers)


def test_fusing_saves_next_to_nothing_where_the_weights_are_what_is_moved():
    found = roofline.figures(case(tokens=1), None, Roof(795e12, 3.0e12), "")
    assert found.fusion_saving_max < 0.002


def test_a_shared_expert_counts_with_the_others_and_its_gate_does_not():
    moe = MoE(8, 2, shared_experts=1, shared_d_ff=32, shared_gate=True)
    spec = FFNSpec(64, 96, "silu", gated=True, bias=False, moe=moe)
    assert roofline.fusable_bytes(case(spec, 5)) == 2 * 2 * 5 * 2 * (2 * 96 + 32)


LLAMA = Case("l", "l", FFNSpec(4096, 11008, "swiglu"), tokens=3, dtype="bf16")
MIXTURE = Case("m", "m", FFNSpec(64, 128, "swiglu", moe=MoE(8, 2)), tokens=16)


def over(case: Case, **ranks: int) -> Case:
    return replace(case, ranks=Ranks(**ranks))


def test_one_all_reduce_of_the_output_over_a_ring():
    four = over(LLAMA, tp=4)
    assert sent_by_rank(four).all_reduced == (3 * 4096,)
    assert sent_by_rank(four).exchanged == ()
    assert communication_bytes(four) == 2 * 3 / 4 * 3 * 4096 * 2


def test_two_all_to_alls_of_a_row_for_every_choice():
    four = over(MIXTURE, ep=4)  # every rank has 4 of the 16 tokens
    assert sent_by_rank(four).exchanged == (4 * 2 * 64,) * 2
    assert sent_by_rank(four).all_reduced == ()
    assert communication_bytes(four) == 2 * (4 * 2 * 64 * 4) * 3 / 4


def test_both_splits_send_both():
    both = over(MIXTURE, tp=2, ep=2)
    assert sent_by_rank(both).all_reduced == (8 * 64,) or sum(sent_by_rank(both).all_reduced) == 8 * 2 * 64
    reduced = sum(sent_by_rank(both).all_reduced) * 4
    assert communication_bytes(both) == 2 * (1 / 2) * reduced + 2 * (8 * 2 * 64 * 4) / 2


def test_few_tokens_still_exchange_something():
    assert sent_by_rank(over(replace(MIXTURE, tokens=4), ep=4)).exchanged == (128, 128)


def rows(times: dict[str, float], **ranks: int):
    case = over(CASE, **ranks)
    units = [
        replace(u, case=case.key, blocks=tuple(replace(b, case=case.key) for b in u.blocks)) for u in units_of(times)
    ]
    units = [replace(u, outcomes=tuple(o for o in u.outcomes if not o.kernel.endswith(COMPUTE))) for u in units]
    return {row.kernel: row for row in summarise(case, units, units_of.__defaults__[1], RUN)}


APART = {"eager": 1.0e-3, "mine": 1.3e-3, "eager" + COMPUTE: 0.8e-3, "mine" + COMPUTE: 0.7e-3, COLLECTIVES: 0.5e-3}


def test_a_row_shows_computing_and_communicating_apart():
    found = rows(APART, tp=2)
    assert set(found) == {"eager", "mine"}
    eager, mine = found["eager"], found["mine"]
    assert (eager.world_size, eager.layout, eager.communication_bytes) == (2, "tp2", 32 * 512 * 4)
    assert eager.compute_s == pytest.approx(0.8e-3, rel=0.01)
    assert eager.communication_s == mine.communication_s == pytest.approx(0.5e-3, rel=0.01)
    assert eager.overlap == pytest.approx(0.6, abs=0.05)  # 0.3 of the 0.5 ms are hidden
    assert mine.overlap == pytest.approx(-0.2, abs=0.05)  # 0.1 ms more than one after the other
    assert ", tp2" in eager.case


def test_without_a_call_of_its_own_computing_is_not_known():
    found = rows({"eager": 1e-3, COLLECTIVES: 5e-4}, tp=2)
    assert (found["eager"].compute_s, found["eager"].overlap) == (None, None)
    assert found["eager"].communication_s == pytest.approx(5e-4, rel=0.01)


def test_a_row_of_one_rank_has_none_of_these():
    row = rows({"eager": 1e-3})["eager"]
    assert (row.world_size, row.layout, row.compute_s, row.communication_s, row.communication_bytes, row.overlap) == (
        None, "", None, None, None, None
    )  # fmt: skip
    assert row.case == CASE.key


def test_rows_of_different_layouts_are_not_compared():
    base, new = rows(APART, tp=2).values(), rows(APART, tp=4).values()
    with pytest.raises(FFNError, match="layout: tp2 in BASE, tp4 in NEW") as error:
        match(list(base), list(new))
    assert "no case and kernel in common" in error.value.message
