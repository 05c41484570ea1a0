"""Placements against deepseek-ai/EPLB's own results and by brute force; caches against a replay token by token."""

import random
from collections import Counter
from itertools import combinations, product

import pytest
import torch

import ffncli
from ffncli.errors import FFNError
from ffncli.run.corpus.placement import ExpertParallelism, busiest, cache_hits, imbalance, in_order, place
from ffncli.run.corpus.question import POLICIES
from tests.oracles.prompted import made
from tests.run.corpus.test_corpus import TEXTS
from tests.run.corpus.test_experts import choices, ids_of, output

# (experts, ranks, redundant, groups, nodes) → the experts on each rank, as EPLB's rebalance_experts returned them for
# the loads of `drawn`, which have no equals: these EPLB leaves to torch's sort.
EPLB = {
    (8, 4, 4, 1, 1): [[2, 7, 3], [2, 5, 5], [0, 6, 4], [0, 6, 1]],
    (12, 4, 4, 4, 2): [[10, 1, 0, 9], [2, 1, 0, 11], [3, 7, 6, 8], [5, 7, 4, 8]],
    (16, 8, 8, 4, 2): [[13, 1, 3], [2, 14, 0], [2, 1, 0], [15, 15, 12], [5, 4, 7], [8, 9, 10], [8, 4, 11], [6, 6, 11]],
    (6, 3, 0, 1, 1): [[5, 2], [0, 1], [3, 4]],
    (9, 3, 3, 3, 1): [[8, 5, 2, 7], [6, 4, 2, 1], [3, 3, 5, 0]],
    (8, 4, 8, 8, 4): [[2, 2, 2, 7], [1, 1, 1, 3], [4, 4, 6, 6], [0, 0, 5, 5]],
    (12, 6, 6, 3, 2): [[8, 9, 11], [8, 9, 4], [3, 7, 5], [3, 10, 4], [1, 2, 0], [1, 2, 6]],
}
# the example of EPLB's README: two layers of 12 experts, 16 replicas, 4 groups, 2 nodes, 8 ranks
README = {
    (90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86):
        [[5, 6], [5, 7], [8, 4], [3, 4], [10, 9], [10, 2], [0, 1], [11, 1]],
    (20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27):
        [[7, 10], [6, 8], [6, 11], [8, 9], [2, 4], [5, 1], [5, 0], [3, 1]],
}  # fmt: skip


def drawn(seed: int, experts: int) -> torch.Tensor:
    return torch.tensor([random.Random(seed * 1000 + at).random() for at in range(experts)])


@pytest.mark.parametrize(("seed", "case"), [*enumerate(EPLB)])
def test_placements_are_those_of_eplb(seed: int, case: tuple[int, int, int, int, int]) -> None:
    experts, ranks, redundant, groups, nodes = case
    placed = place(drawn(seed, experts), ExpertParallelism(ranks, redundant, groups, nodes))
    assert [list(rank) for rank in placed] == EPLB[case]


@pytest.mark.parametrize("load", README)
def test_the_example_of_eplb(load: tuple[int, ...]) -> None:
    placed = place(torch.tensor(load), ExpertParallelism(8, 4, 4, 2))
    assert [list(rank) for rank in placed] == README[load]


def test_every_placement_is_whole_and_its_copies_are_the_best() -> None:
    """Ranks are full, groups stay on their node, and no other number of copies makes the largest replica smaller."""
    draw = random.Random(7)
    for seed in range(60):
        nodes, per_node = draw.choice([1, 2]), draw.choice([1, 2, 3])
        groups, ranks, size = nodes * draw.choice([1, 2]), nodes * per_node, draw.choice([2, 3])
        experts = groups * size
        redundant = -experts % ranks + ranks * draw.choice([0, 1])
        load = drawn(seed, experts)
        placed = place(load, ExpertParallelism(ranks, redundant, groups, nodes))
        copies = Counter(expert for rank in placed for expert in rank)
        assert {len(rank) for rank in placed} == {(experts + redundant) // ranks}
        assert sorted(copies) == [*range(experts)]
        for node in range(nodes):
            here = {expert for rank in placed[node * per_node : (node + 1) * per_node] for expert in rank}
            assert all(len({e for e in here if e // size == group}) in (0, size) for group in range(groups))
            more = redundant // nodes
            least = min(
                max(float(load[e]) / (1 + extra) for e, extra in zip(sorted(here), extras, strict=True))
                for extras in product(range(more + 1), repeat=len(here)) if sum(extras) == more
            ) if more <= 3 and len(here) <= 6 else None  # fmt: skip
            if least is not None:
                assert max(float(load[e]) / copies[e] for e in here) == pytest.approx(least, rel=1e-6)


def test_the_busiest_rank_by_hand() -> None:
    load = torch.tensor([6, 2, 1, 3])
    assert busiest(load, ((0, 1), (2, 3))) == 8
    assert imbalance(load, ((0, 1), (2, 3))) == pytest.approx(8 / 6)
    assert busiest(load, ((0, 1, 2), (0, 3, 3))) == pytest.approx(6 / 2 + 3)
    assert in_order(5, 3) == ((0, 1), (2, 3), (4,))
    assert imbalance(torch.zeros(4), ((0, 1), (2, 3))) is None


# --- caches -----------------------------------------------------------------------------------------------------------


def replayed(sequence: list[int], policy: str, slots: int) -> int:
    """Hits of a cache whose victim is looked up in the whole past at every miss."""
    held: list[int] = []
    hits = 0
    pinned = sorted(set(sequence), key=lambda e: (-sequence.count(e), sequence.index(e)))[:slots]
    for at, expert in enumerate(sequence):
        past = sequence[:at]
        if expert in held:
            hits += 1
            continue
        if policy == "pin" and expert not in pinned:
            continue
        if len(held) == slots:
            last = {one: at - 1 - past[::-1].index(one) for one in held}
            key = (lambda one: last[one]) if policy == "lru" else (lambda one: (past.count(one), last[one]))  # noqa: B023
            held.remove(min(held, key=key))
        held.append(expert)
    return hits


def most_hits(sequence: list[int], slots: int) -> int:
    """The most hits of any cache that may keep or leave each expert it loads: all contents are tried."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for expert in sequence:
        after: dict[frozenset[int], int] = {}
        for held, hits in reached.items():
            ways = [held] if expert in held else [held, *(frozenset(kept) | {expert} for kept in
                    combinations(held, min(len(held), slots - 1)))]  # fmt: skip
            for way in ways:
                after[way] = max(after.get(way, 0), hits + (expert in held))
        reached = after
    return max(reached.values())


def test_caches_are_those_of_a_replay_and_none_is_above_the_best() -> None:
    draw = random.Random(3)
    for _ in range(200):
        experts, length = draw.randint(2, 7), draw.randint(1, 40)
        weights = [draw.random() ** 2 for _ in range(experts)]
        sequence, slots = draw.choices(range(experts), weights, k=length), [1, 2, 3, 5]
        found = {(one.policy, one.slots): one.hit_rate for one in cache_hits(sequence, POLICIES, slots)}
        for size in slots:
            for policy in ("lru", "lfu", "pin"):
                assert found[policy, size] == replayed(sequence, policy, size) / length
                assert found[policy, size] <= found["best", size]
            assert found["best", size] == most_hits(sequence, size) / length
    assert [one.hit_rate for one in cache_hits([], ("lru",), (2,))] == [None]


# --- in a model -------------------------------------------------------------------------------------------------------


REDUNDANT = {"mixtral": 4, "qwen3_moe": 6}


@pytest.mark.parametrize("name", REDUNDANT)
def test_a_corpus_is_placed_and_replayed_by_its_router(name: str) -> None:
    """Loads and choices are those of transformers' router; the first half is the first 12 of 23 texts."""
    survey = ffncli.experts(made(name).path, TEXTS, ablate_texts=0, ep=4, redundant=REDUNDANT[name],
                            cache="lru,best", slots=[1, 3])  # fmt: skip
    split = ExpertParallelism(4, REDUNDANT[name])
    tokens_before = sum(len(text.split()) for text in TEXTS[:12])
    before, own, other = 0.0, 0.0, 0.0
    for layer in survey.layers:
        tokens, count, placement = choices(name, layer.layer), len(layer.experts), layer.placement
        first, second = (
            torch.bincount(torch.tensor([e for token in some for e in token]), minlength=count)
            for some in (tokens[:tokens_before], tokens[tokens_before:])
        )
        assert placement is not None
        assert placement.ranks == place(first + second, split)
        assert placement.imbalance == imbalance(first + second, placement.ranks)
        assert placement.imbalance_in_order == imbalance(first + second, in_order(count, 4))
        assert placement.second_half == imbalance(second, in_order(count, 4))
        assert placement.second_half_placed == imbalance(second, place(first, split))
        before += busiest(second, in_order(count, 4))
        own += busiest(second, place(second, split))
        other += busiest(second, place(first, split))
        assert all(set(one.ranks) == {r for r in range(4) if one.expert in placement.ranks[r]} for one in layer.experts)
        sequence = [expert for token in tokens for expert in token]
        assert layer.caches == cache_hits(sequence, ("lru", "best"), (1, 3))
        assert [one.hit_rate for one in layer.caches][:2] == pytest.approx([layer.hit_rates[0], layer.hit_rates[2]])
    assert survey.worth is not None
    assert survey.worth.saved == pytest.approx(1 - own / before)
    assert survey.worth.kept == pytest.approx(1 - other / before)


def test_one_text_has_no_other_half() -> None:
    survey = ffncli.experts(made("mixtral").path, TEXTS[:1], ablate_texts=0, ep=2)
    assert survey.worth is not None
    assert survey.worth.kept is None
    assert survey.layers[0].placement is not None
    assert survey.layers[0].placement.second_half is None


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_saliency_is_the_weighted_output_of_the_expert(name: str) -> None:
    """The expert's weighted output is the block's output with it minus that without it."""
    model = made(name).model
    for layer in ffncli.experts(made(name).path, TEXTS, ablate_texts=0).layers:
        mlp = model.get_submodule(f"model.layers.{layer.layer}.mlp")
        entered: list[torch.Tensor] = []
        hook = mlp.register_forward_pre_hook(lambda m, a, entered=entered: entered.append(a[0].flatten(0, -2)))
        with torch.no_grad():
            for text in TEXTS:
                model(input_ids=ids_of(text))
            hook.remove()
            x, tokens = torch.cat(entered), choices(name, layer.layer)
            whole = output(mlp, x)
            for one in layer.experts:
                down = mlp.experts.down_proj  # type: ignore[union-attr]
                kept = down[one.expert].clone()  # type: ignore[index]
                down[one.expert] = 0  # type: ignore[index, operator]
                sizes = (whole - output(mlp, x)).norm(dim=-1)[[one.expert in token for token in tokens]]
                down[one.expert] = kept  # type: ignore[index, operator]
                assert one.saliency == (pytest.approx(float(sizes.mean()), rel=1e-4) if len(sizes) else None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ep": 3}, "evenly"),
        ({"ep": 4, "nodes": 3}, "nodes"),
        ({"ep": 2, "groups": 3}, "groups"),
        ({"redundant": 2}, "needs ep"),
        ({"cache": "mru"}, "cache"),
        ({"slots": 0}, "slots"),
    ],
)
def test_what_cannot_be_placed(options: dict[str, object], words: str) -> None:
    with pytest.raises(FFNError, match=words):
        ffncli.experts(made("mixtral").path, TEXTS[:2], ablate_texts=0, **options)  # type: ignore[arg-type]
