"""Ranks simulated one after the other: their parts make up every tensor, their sum is the whole block."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import Ranks, rank_steps, shard
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
    found = summed(block, weights, x, Ranks(ranks))
    torch.testing.assert_close(found, run(block, weights, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tp", "ep"), [(1, 2), (1, 4), (2, 2), (3, 4)])
@pytest.mark.parametrize("tokens", [1, 5, 8])  # fewer than ranks, not a multiple, a multiple
@pytest.mark.parametrize(
    "moe",
    [
        MoE(4, 2, shared_experts=1), MoE(8, 3, 1, latent=4, mixed_norm=True), MoE(4, 1, weigh="input"),
        MoE(4, 3, identity_experts=2), MoE(4, 2, 2, shared_routed=True), MoE(4, 2, skip_experts=2),
        MoE(8, 2, groups=4, top_groups=2, correction=True), MoE(4, 2, expert_norm=True, mixed_bias=True),
        MoE(4, 2, lookup=9),
    ],
)  # fmt: skip
def test_ranks_with_experts_of_their_own_give_the_whole(tp: int, ep: int, tokens: int, moe: MoE) -> None:
    block = steps(FFNSpec(6, 12, "silu", gated=True, bias=True, moe=moe, norm="rmsnorm", residual=True))
    generator = torch.Generator().manual_seed(0)
    weights = random_weights(block, generator, torch.float64)
    names = ("biased.bias", "expert_norm.weight", "route.correction")
    weights |= {name: torch.rand_like(weights[name]) for name in names if name in weights}
    inputs = {"x": torch.randn(1, tokens, 6, dtype=torch.float64, generator=generator)}
    if moe.lookup:
        inputs["token_ids"] = torch.arange(tokens).reshape(1, -1, 1) % moe.lookup
    found = summed(block, weights, inputs, Ranks(tp, ep))
    torch.testing.assert_close(found, run(block, weights, inputs), rtol=1e-12, atol=1e-12)


def test_nothing_is_copied_for_a_rank() -> None:
    block = steps(FFNSpec(6, 12, "silu", gated=True, moe=MoE(4, 2)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    own = share_of(weights, block, rank_steps(block, 3, Ranks(2, 2)), 1, 1)
    assert all(own[name].untyped_storage().data_ptr() == weights[name].untyped_storage().data_ptr() for name in own)
    assert torch.equal(own["down.weight"], weights["down.weight"][2:, :, 6:])
