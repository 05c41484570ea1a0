from __future__ import annotations

from dataclasses import asdict

import pytest

from ffncli.block.dtypes import storage
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.traffic import model_traffic, ridge_tokens, token_costs
from ffncli.models.model import Group, Model

BF16 = storage("bf16")
DENSE, SPARSE = FFNSpec(64, 768, "swiglu", norm="rmsnorm"), FFNSpec(64, 96, "swiglu", moe=MoE(8, 2))
MIXED = Model("m", (Group("decoder", (0,), DENSE), Group("decoder", (1, 2), SPARSE)))


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
    found = model_traffic(MIXED, BF16, 3)
    expert = 3 * 64 * 96
    touched = 8 * (1 - (6 / 8) ** 3)
    assert found.weight_bytes_read == 2 * 3 * 64 * 768 + 2 * round(2 * (64 * 8 + touched * expert))
    assert found.matmul_flops == 3 * 2 * (3 * 64 * 768 + 2 * (64 * 8 + 2 * expert))
    (row,) = token_costs(MIXED, BF16, [3])
    assert row.experts_touched == pytest.approx(touched)
    assert {k: v for k, v in asdict(row).items() if k in asdict(found)} == asdict(found)


def test_a_rank_of_four():
    whole, part = token_costs(MIXED, BF16, [3]), token_costs(MIXED, BF16, [3], ranks=4)
    router = 2 * 2 * 64 * 8
    assert 4 * (part[0].weight_bytes_read - router) == whole[0].weight_bytes_read - router
    assert part[0].activation_bytes_fused == whole[0].activation_bytes_fused
    with pytest.raises(FFNError, match="d_ff = 768 does not divide over 5 ranks"):
        token_costs(MIXED, BF16, [1], ranks=5)


def test_ridge():
    model = catalog.find("llama-2-7b").model
    weights, flops, unfused = 4_328_521_728, 2 * 4_328_521_728, 32 * 2 * (8 * 4096 + 8 * 11008)
    tokens = ridge_tokens(model, storage("fp8"), 300)
    assert tokens == -(-300 * weights // (flops - 300 * unfused))
    assert ridge_tokens(model, storage("fp8"), 300, fused=True) == -(-300 * weights // (flops - 300 * 32 * 4 * 4096))
    assert ridge_tokens(model, storage("fp8"), 10_000) is None
    assert ridge_tokens(model, storage("fp8"), 300, ranks=4) > tokens
