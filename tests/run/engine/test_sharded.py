"""Ranks simulated one after the other: their parts make up every tensor, their sum is the whole block."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import shard
from ffncli.run.engine.execute import run
from ffncli.run.engine.sharded import share_of, summed
from ffncli.run.engine.weights import random_weights

DENSE = FFNSpec(6, 12, "silu", gated=True, bias=True)


def test_each_rank_has_its_own_rows_or_columns() -> None:
    block = steps(DENSE)
    weights = random_weights(block, torch.Generator().manual_seed(0))
    shares = [share_of(weights, block, shard(block, rank, 3), rank) for rank in range(3)]
    for name, axis in (("gate.weight", 0), ("up.weight", 0), ("up.bias", 0), ("down.weight", 1)):
        assert torch.equal(torch.cat([share[name] for share in shares], axis), weights[name])
    assert [("down.bias" in share) for share in shares] == [True, False, False]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "moe",
    [
        None, MoE(4, 2, shared_experts=1), MoE(4, 2, 1, latent=4), MoE(4, 2, 1, mixed_bias=True),
        MoE(4, 2, 1, latent=4, latent_norm=True, expert_norm=True), MoE(4, 2, 1, latent=4, mixed_norm=True),
    ],
)  # fmt: skip
def test_the_ranks_summed_are_the_whole(ranks: int, moe: MoE | None) -> None:
    block = steps(FFNSpec(6, 12, "silu", gated=True, bias=moe is None, moe=moe, norm="rmsnorm", residual=True))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, torch.float64)
    weights |= {
        name: torch.rand_like(weights[name]) for name in ("biased.bias", "expert_norm.weight") if name in weights
    }
    x = {"x": torch.randn(5, 6, dtype=torch.float64, generator=generator)}
    found = summed([shard(block, rank, ranks) for rank in range(ranks)], block, weights, x)
    torch.testing.assert_close(found, run(block, weights, x), rtol=1e-12, atol=1e-12)
