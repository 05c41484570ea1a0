"""Tokens per expert against draws: every expectation is compared with its mean over many simulated batches."""

from __future__ import annotations

from itertools import permutations
from math import prod

import numpy as np
import pytest

from ffncli.block.traffic import experts_touched
from ffncli.errors import FFNError
from ffncli.models.counting.expert_load import expert_load, skew_text


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
