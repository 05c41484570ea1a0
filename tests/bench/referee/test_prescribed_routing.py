"""Prescribed routing: what transformers' own routers choose for the x that is written, and how often."""

import math
from collections import Counter
from hashlib import sha256
from itertools import permutations

import pytest
import torch

import ffncli
from ffncli.bench.records import Case
from ffncli.bench.referee import prescribed_routing as module
from ffncli.bench.referee.prescribed_routing import words
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.fresh_inputs import source_of
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.block.steps import Axis, Route

PLAIN = MoE(8, 2)
BIASED = MoE(8, 2, router_bias=True, order="choose_first")  # gpt-oss
GROUPED = MoE(32, 4, score="sigmoid", correction=True, groups=8, top_groups=3, group_best=2)  # DeepSeek-V3
TOKENS, D = 24, 64


def problem_of(moe: MoE, routing: str, tokens: int = TOKENS, d_model: int = D, **more) -> Problem:
    case = Case("s", "s", FFNSpec(d_model, 8, "swiglu", moe=moe), tokens, routing=routing, **more)
    return Problem.of(case, 7)


def written(problem: Problem, calls: int = 20) -> tuple[list[torch.Tensor], object]:
    """The x of so many timed calls, and the load that was counted."""
    source, xs = source_of(problem), []
    for _ in range(calls):
        x = torch.empty(problem.case.tokens, problem.case.spec.d_model, dtype=problem.dtype)
        source.write(x)
        xs.append(x)
    return xs, source.load


def router(problem: Problem, moe: MoE) -> torch.nn.Module:
    """transformers' router with the weights of the problem."""
    pytest.importorskip("transformers")
    common = {"hidden_size": problem.case.spec.d_model, "num_experts_per_tok": moe.top_k}
    if moe.groups > 1:
        from transformers.models.deepseek_v3 import modeling_deepseek_v3 as code

        config = code.DeepseekV3Config(**common, n_routed_experts=moe.experts, n_group=moe.groups,
                                       topk_group=moe.top_groups)  # fmt: skip
        made = code.DeepseekV3TopkRouter(config)
    elif moe.router_bias:
        from transformers.models.gpt_oss import modeling_gpt_oss as code

        made = code.GptOssTopKRouter(code.GptOssConfig(**common, num_local_experts=moe.experts))
    else:
        from transformers.models.mixtral import modeling_mixtral as code

        made = code.MixtralTopKRouter(code.MixtralConfig(**common, num_local_experts=moe.experts))
    made = made.to(problem.dtype)
    with torch.no_grad():
        made.weight.copy_(problem.weights["router.weight"])
        if moe.router_bias:
            made.bias.copy_(problem.weights["router.bias"])
    return made


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("routing", ["uniform", "zipf:1.2", "text"])
@pytest.mark.parametrize("moe", [PLAIN, BIASED, GROUPED])
def test_the_load_is_what_the_models_own_router_chooses(moe, routing, dtype):
    problem = problem_of(moe, routing, dtype=dtype)
    xs, load = written(problem)
    theirs = router(problem, moe)
    with torch.no_grad():
        counts = [torch.bincount(theirs(x)[2].flatten(), minlength=moe.experts) for x in xs]
    assert load.tokens_per_expert == pytest.approx((sum(counts) / len(xs)).tolist())
    assert load.touched == pytest.approx(sum(int((c > 0).sum()) for c in counts) / len(xs))
    assert load.elsewhere == 0
    if routing == "uniform":
        assert all(int(c.max() - c.min()) <= 1 for c in counts)
    elif routing != "text":
        assert max(load.tokens_per_expert) > 2.5 * TOKENS * moe.top_k / moe.experts
    first = problem.first.x
    with torch.no_grad():
        chosen = theirs(first)[2]
    assert problem.experts.sum(0).tolist() == torch.bincount(chosen.flatten(), minlength=moe.experts).tolist()


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(1, 8, 2), (7, 8, 3), (32, 6, 6 - 1), (5, 64, 8), (64, 8, 2)])
def test_uniform_is_as_even_as_it_can_be_and_not_the_same_twice(tokens, experts, top_k):
    op, generator = Route(Axis("experts", experts), top_k), torch.Generator().manual_seed(1)
    draws = [module.balanced(op, tokens, generator) for _ in range(6)]
    for wanted in draws:
        assert wanted.sum(1).tolist() == [top_k] * tokens
        load = wanted.sum(0)
        assert int(load.max() - load.min()) <= 1
    assert any(not torch.equal(draws[0], other) for other in draws[1:])


def test_text_sends_every_word_where_its_hash_says():
    """By hand, one expert after the other: the 272 words of the address in their order; some come often."""
    counts, problem = Counter(words()), problem_of(PLAIN, "text")
    assert (len(words()), counts["that"], counts["nation"], len(counts)) == (272, 13, 5, 138)
    by_word = {
        word: set(sorted(range(8), key=lambda e: sha256(f"{word} {e}".encode()).digest())[-2:]) for word in counts
    }
    routes = problem.routing.draw(272, torch.Generator())
    assert [set(row.nonzero().flatten().tolist()) for row in routes] == [by_word[word] for word in words()]
    some = problem.routing.draw(50, torch.Generator().manual_seed(3))
    assert {tuple(row) for row in some.tolist()} <= {tuple(row) for row in routes.tolist()}


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_zipf_draws_experts_one_after_the_other_without_replacement(top_k):
    """The closed form: the chance of being among the first k of all orders in which experts can be drawn."""
    experts, exponent, draws = 5, 1.2, 40_000
    raw = [rank**-exponent for rank in range(1, experts + 1)]
    chances = [one / sum(raw) for one in raw]
    expected = [0.0] * experts
    for order in permutations(range(experts), top_k):
        left, chance = 1.0, 1.0
        for expert in order:
            chance, left = chance * chances[expert] / left, left - chances[expert]
        for expert in order:
            expected[expert] += chance
    popularity = torch.tensor([math.log(one) for one in chances], dtype=torch.float64)
    op = Route(Axis("experts", experts), top_k)
    wanted = module.popular(op, popularity, draws, torch.Generator().manual_seed(2))
    assert wanted.sum(1).unique().tolist() == [top_k]
    for measured, share in zip((wanted.double().mean(0)).tolist(), expected, strict=True):
        assert measured == pytest.approx(share, abs=4 * math.sqrt(share * (1 - share) / draws))


def test_zipf_is_a_permutation_of_its_ranks_the_same_in_every_process():
    """Over many calls the loads, sorted, follow the closed form of one expert for each token; zipf:0 is even."""
    case = problem_of(MoE(6, 1), "zipf:2").case
    loads = [written(Problem.of(case, seed), 300)[1].tokens_per_expert for seed in (7, 8)]
    shares = [rank**-2.0 / sum(rank**-2.0 for rank in range(1, 7)) for rank in range(1, 7)]
    drawn = 300 * TOKENS
    for load in loads:  # binomial, seeded anew in every run: five standard deviations
        for measured, share in zip(sorted(load, reverse=True), shares, strict=True):
            deviation = math.sqrt(share * (1 - share) / drawn)
            assert measured / TOKENS == pytest.approx(share, abs=5 * deviation)
    assert loads[0].index(max(loads[0])) == loads[1].index(max(loads[1]))
    even = written(problem_of(MoE(6, 1), "zipf:0"), 300)[1].tokens_per_expert
    assert even == pytest.approx([TOKENS / 6] * 6, rel=0.15)


def saved_trace(path, tokens: int, moe: MoE = PLAIN) -> torch.Tensor:
    """A trace of a mixture, saved there; which experts its tokens chose."""
    session = ffncli.trace(
        f"{D}x8:swiglu", tokens=tokens, experts=moe.experts, top_k=moe.top_k, input="randn", save=str(path), seed=3
    )
    return session.tensors["route"].reshape(tokens, -1) != 0


@pytest.mark.parametrize("suffix", [".safetensors", ".npz", ".json"])
def test_a_saved_traces_routes_are_reproduced_token_by_token(tmp_path, suffix):
    path = tmp_path / f"trace{suffix}"
    routes = saved_trace(path, TOKENS)
    problem = problem_of(PLAIN, str(path))
    assert torch.equal(problem.experts, routes)
    xs, load = written(problem, 3)
    assert load.tokens_per_expert == tuple(routes.sum(0).tolist())
    assert not torch.equal(xs[0], xs[1])
    theirs = router(problem, PLAIN)
    for x in xs:
        with torch.no_grad():
            chosen = theirs(x)[2]
        assert [set(row) for row in chosen.tolist()] == [set(row.nonzero().flatten().tolist()) for row in routes]


def test_for_another_number_of_tokens_routes_are_drawn_from_the_file(tmp_path):
    routes = saved_trace(tmp_path / "t.safetensors", 12)
    experts = problem_of(PLAIN, str(tmp_path / "t.safetensors"), tokens=200).experts
    known = Counter(map(tuple, routes.tolist()))
    drawn = Counter(map(tuple, experts.tolist()))
    assert drawn.keys() <= known.keys()
    assert len(drawn) > len(known) / 2


def test_x_is_moved_no_further_than_its_logits_need():
    """The least change, by torch's own least squares."""
    problem = problem_of(BIASED, "uniform", dtype="fp64")
    x = torch.randn(TOKENS, D, dtype=torch.float64)
    wanted = problem.routing.draw(TOKENS, torch.Generator().manual_seed(0))
    moved = problem.routing.entered(x, wanted) - x
    weight = problem.weights["router.weight"].double()
    least = torch.linalg.lstsq(weight, (moved @ weight.T).T, driver="gelsd").solution.T
    assert float((moved - least).norm()) < 1e-9 * float(moved.norm())
    assert 0 < float(moved.norm()) < 0.5 * float(x.norm())
    before, after = (torch.nn.functional.linear(one, weight, problem.weights["router.bias"]) for one in (x, x + moved))
    unwanted = after[~wanted].reshape(TOKENS, -1).sort(-1).values
    assert torch.allclose(unwanted, before.sort(-1).values[:, :-2], atol=1e-12)


def test_where_d_model_is_too_small_the_count_says_so():
    problem = problem_of(MoE(32, 4), "uniform", d_model=8)
    xs, load = written(problem, 10)
    scores = torch.stack([x @ problem.weights["router.weight"].T for x in xs])
    chosen = scores.topk(4).indices
    counts = torch.bincount(chosen.flatten(), minlength=32) / 10
    assert load.tokens_per_expert == pytest.approx(counts.tolist())
    assert load.elsewhere > 0.5


def test_of_other_blocks_and_without_a_routing_nothing_changes():
    """The numbers of every seed are those that they were."""
    plain = Problem.of(Case("s", "s", FFNSpec(D, 8, "swiglu", moe=PLAIN), TOKENS), 7)
    assert plain.routing is None
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(7 + 1))
    same = [torch.equal(a, b) for a, b in zip(plain.first.x, x, strict=True)]
    assert sum(same) >= TOKENS - 2  # a token that rounding decides is drawn again


def test_gradients_are_random_and_checked_inputs_are_routed_too():
    problem = problem_of(PLAIN, "uniform", passes="forward+backward")
    assert problem.experts.sum(0).tolist() == [6] * 8
    other = problem.routing.chosen(problem.other(1))
    assert other.sum(0).tolist() == [6] * 8
    source, g = source_of(problem), torch.empty(TOKENS, D)
    source.write_gradient(g)
    assert source.load.touched is None
    assert 0.8 < float(g.std()) < 1.2
