"""The busiest of equally likely experts: against every way of choosing, and against draws of distinct experts."""

from collections import Counter
from fractions import Fraction
from itertools import combinations, product
from math import sqrt

import numpy as np
import pytest

from ffncli.models.counting.even_load import balanced, counted
from ffncli.models.counting.expert_load import expert_load


def by_every_choice(experts: int, top_k: int, tokens: int, groups: int) -> float:
    """The mean of the largest load over all ways in which tokens choose, each as likely as another."""
    each = experts // groups
    loads = Counter(
        max(Counter(expert // each for chosen in choice for expert in chosen).values())
        for choice in product(combinations(range(experts), top_k), repeat=tokens)
    )
    return float(Fraction(sum(load * n for load, n in loads.items()), loads.total()))


@pytest.mark.parametrize("case", [(4, 2, 1), (4, 2, 5), (5, 3, 4), (6, 1, 5), (8, 2, 3), (3, 3, 2), (2, 1, 9)])
def test_few_tokens_are_counted_exactly(case):
    assert counted(*case) == pytest.approx(by_every_choice(*case, groups=case[0]), rel=1e-12)
    assert expert_load(*case).busiest == counted(*case)


NEARLY = {(4, 2, 1, 2): 1e-9, (6, 3, 1, 3): 1e-9, (8, 2, 3, 2): 1e-9, (6, 1, 5, 6): 1e-7, (8, 2, 3, 4): 2e-3}


@pytest.mark.parametrize(("case", "near"), NEARLY.items())
def test_ranks_are_nearly_those_of_every_choice(case, near):
    """One token, two ranks and top-1 have exactly the form that is assumed."""
    experts, top_k, tokens, groups = case
    assert balanced(*case) == pytest.approx(by_every_choice(*case), rel=near)
    load = expert_load(experts, top_k, tokens, groups)
    assert load.imbalance == pytest.approx(balanced(*case) * groups / (tokens * top_k), rel=1e-7)


def drawn(experts: int, top_k: int, tokens: int, batches: int) -> np.ndarray:
    """Loads [batches, experts] of tokens that each take the top_k smallest of random keys."""
    rng = np.random.default_rng(0)
    keys = rng.random((batches, tokens, experts), dtype=np.float32)
    chosen = np.argpartition(keys, top_k - 1, -1)[..., :top_k].reshape(batches, -1)
    return np.stack([np.bincount(batch, minlength=experts) for batch in chosen])


COUNTED = [(8, 2, 32, 4), (16, 4, 16, 4), (64, 8, 8, 8), (16, 1, 60, 4), (4, 3, 20, 2)]
CORRECTED = [(64, 8, 9, 8), (8, 2, 33, 4), (8, 2, 64, 2), (32, 4, 128, 8)]


@pytest.mark.parametrize(("case", "share"), [*((case, 0) for case in COUNTED), *((case, 0.005) for case in CORRECTED)])
def test_the_busiest_of_drawn_batches(case, share):
    experts, top_k, tokens, ranks = case
    batches = max(18_000, min(40_000, 30_000_000 // (tokens * experts)))
    loads = drawn(experts, top_k, tokens, batches)
    found = expert_load(experts, top_k, tokens, ranks)
    for expected, largest in (
        (found.busiest, loads.max(-1)),
        (found.imbalance * tokens * top_k / ranks, loads.reshape(batches, ranks, -1).sum(-1).max(-1)),
    ):
        error = largest.std() / sqrt(batches)
        assert error < 0.001 * largest.mean()
        assert abs(expected - largest.mean()) < share * largest.mean() + 4 * error


@pytest.mark.parametrize(("experts", "tokens"), [(128, 2048), (512, 16_384), (16, 4096), (2, 1_000_000)])
def test_many_tokens_that_choose_one_expert(experts, tokens):
    """Their loads are multinomial."""
    loads = np.random.default_rng(0).multinomial(tokens, [1 / experts] * experts, size=20_000).max(-1)
    error = loads.std() / sqrt(len(loads))
    assert expert_load(experts, 1, tokens).busiest == pytest.approx(loads.mean(), rel=0.005, abs=4 * error)
