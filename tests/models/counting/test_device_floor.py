"""Time floors of a model on an accelerator, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.block.dtypes import storage
from ffncli.models import catalog
from ffncli.models.counting.traffic import device_floors, rate_format, ridge_of, token_costs
from ffncli.system.hardware import named

H100, V100, B200 = (named(name, "--ridge") for name in ("h100", "v100", "b200"))
LLAMA, BF16 = catalog.find("llama-2-7b").model, storage("bf16")
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
    assert (one.needed_bytes, one.memory_bytes, one.fits) == (13_476_831_232, 80_000_000_000, True)
    assert device_floors(H100, token_costs(LLAMA, BF16, (1,)), BF16, 80_000_000_001)[0].fits is False


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
