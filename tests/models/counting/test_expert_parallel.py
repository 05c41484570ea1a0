"""Experts: tokens for each against draws, what each rank holds and sends against routings that are walked."""

from dataclasses import replace
from itertools import combinations, permutations
from math import comb, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ffncli.block.cost import cost
from ffncli.block.dtypes import storage
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.traffic import experts_touched, rank_experts_touched
from ffncli.errors import FFNError
from ffncli.models import catalog
from ffncli.models.counting.expert_load import expert_load, skew_text
from ffncli.models.counting.parallel import exchange, exchanged, expert_rank_counts, split
from ffncli.models.counting.traffic import token_costs
from ffncli.models.model import Group, Model, block_model

BF16 = storage("bf16")
MIXTURE = FFNSpec(64, 96, "swiglu", bias=True, norm="rmsnorm", moe=MoE(8, 2, 1, router_bias=True))


def one_block(spec: FFNSpec) -> Model:
    return block_model(spec, "block").model


@pytest.mark.parametrize("ep", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2])
def test_the_grid_holds_the_whole_and_the_copies(tp, ep):
    model = one_block(MIXTURE)
    found = split(model, tp, BF16, ep=ep)
    routed = 8 * (3 * 64 * 96 + 2 * 96 + 64)
    shared, router = 3 * 64 * 96 + 2 * 96 + 64, 64 * 8 + 8
    assert found.whole_params_total == routed + shared + router == cost(model.main.steps).params
    held = found.rank_0_params_total + (tp - 1) * found.other_rank_params_total
    assert held == routed // ep + shared + tp * router
    assert (found.ranks, found.expert_ranks) == (tp, ep)


def test_places_of_a_grid():
    slices = {one.name: one for one in split(one_block(MIXTURE), 2, BF16, ep=4).groups[0].slices}
    assert {name: one.place for name, one in slices.items()} == {
        "norm.weight": "copied", "router.weight": "copied", "router.bias": "copied",
        "gate.weight": "experts, column", "up.weight": "experts, column", "down.weight": "experts, row",
        "gate.bias": "experts, column", "up.bias": "experts, column", "down.bias": "experts, rank 0",
        **{f"shared.{name}.{kind}": "column" for name in ("gate", "up") for kind in ("weight", "bias")},
        "shared.down.weight": "row", "shared.down.bias": "rank 0",
    }  # fmt: skip
    assert (slices["down.weight"].shape, slices["down.weight"].rank_shape) == ((8, 64, 96), (2, 64, 48))
    alone = split(one_block(MIXTURE), 1, BF16, ep=4).groups[0].slices
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
    model = one_block(FFNSpec(6, 12, moe=MoE(experts, top_k)))
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
    assert exchanged(one_block(latent).main.steps) == (3 * 16, 3 * 16)
    routed = FFNSpec(64, 96, moe=MoE(8, 3, 2, shared_routed=True))
    assert exchanged(one_block(routed).main.steps) == (3 * 64, 3 * 64)
    assert exchanged(one_block(FFNSpec(64, 96)).main.steps) == (0, 0)


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
    model = one_block(replace(MIXTURE, bias=False))
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
def test_refusals(name, ranks, message):
    model = catalog.find(name).model
    for refused in (lambda: exchange(model, ranks, BF16), lambda: split(model, 1, BF16, ep=ranks)):
        with pytest.raises(FFNError) as error:
            refused()
        assert (str(error.value), error.value.code) == (message, 2)
    assert expert_rank_counts(model) == ((1, 2, 4, 8) if name == "mixtral-8x7b" else (1,))


def test_an_unknown_top_k_is_not_guessed():
    model = replace(one_block(MIXTURE), unknown=frozenset(["top_k"]))
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
