"""The load of the experts: from routes written by hand, and against what transformers' own router chooses."""

import json

import pytest
import torch
from transformers import TopKLogitsWarper, TopPLogitsWarper

import ffncli
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import routes
from ffncli.run.trace.routing import Chosen, Routing, chosen_experts, routing_of, sampling
from tests.oracles.prompted import IDS, PROMPT, built, ids, made

BLOCK = steps(FFNSpec(4, 8, "silu", gated=True, moe=MoE(4, 2)))


def test_the_load_of_routes_written_by_hand():
    route = torch.tensor([[[0.25, 0.0, 0.75, 0], [0.5, 0.5, 0.0, 0]], [[0.0, -0.75, 0.25, 0], [1.0, 0.0, 1.0, 0]]])
    assert routing_of(BLOCK, {"route": route}) == Routing(
        "route", 4, (3, 2, 3, 0), 8, 2.0, (3,), 0, 3 / 8, pytest.approx(1.5612781244591327), 2.0
    )
    even = routing_of(BLOCK, {"route": torch.eye(4)})
    assert (even.idle_experts, even.entropy_bits, even.max_entropy_bits) == ((), 2.0, 2.0)
    assert routing_of(steps(FFNSpec(4, 8)), {}) is None


def test_identity_experts_and_tokens_without_a_choice():
    route = torch.tensor([[0.5, 0, 0, 0, 0.25, 0.25], [0, 0, 0, 0, 1.0, 0]])  # two identity experts behind the four
    block = steps(FFNSpec(4, 8, "silu", gated=True, moe=MoE(4, 2, identity_experts=2)))
    found = routing_of(block, {"route": route})
    assert (found.tokens_per_expert, found.choices, found.identity_choices) == ((1, 0, 0, 0), 1, 3)
    none = routing_of(BLOCK, {"route": torch.zeros(3, 4)})
    assert (none.choices, none.busiest_expert, none.entropy_bits, none.idle_experts) == (0, None, None, (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("name", "layer", "router"), [("mixtral", 1, "gate"), ("qwen3_moe", 2, "gate"), ("gpt_oss", 0, "router")]
)
def test_the_load_is_that_of_transformers_router(name, layer, router, call):
    chosen = []
    module = made(name).model.get_submodule(f"model.layers.{layer}.mlp.{router}")
    handle = module.register_forward_hook(lambda m, a, output: chosen.append(output[2]))
    with torch.no_grad():
        made(name).model(input_ids=ids())
    handle.remove()
    load = torch.bincount(chosen[0].flatten(), minlength=module.num_experts)
    path = str(made(name).path)
    found = ffncli.trace(path, layer=layer, prompt=PROMPT).routing
    assert found.tokens_per_expert == tuple(load.tolist())
    assert (found.tokens, found.choices) == (len(IDS), load.sum())
    assert found.idle_experts == tuple((load == 0).nonzero().flatten().tolist())
    assert (found.busiest_expert, found.busiest_share) == (int(load.argmax()), load.max() / load.sum())
    shares = torch.distributions.Categorical(probs=load.double())
    assert found.entropy_bits == pytest.approx(shares.entropy().item() / torch.tensor(2.0).log().item())
    rows = ffncli.survey(path, prompt=PROMPT).rows
    assert rows[layer].routing == found
    layers = json.loads(call("trace", path, "--layer", "all", "--prompt", PROMPT, "--json")[1])["layers"]
    assert layers[layer]["routing"]["tokens_per_expert"] == load.tolist()


def test_the_pages_name_idle_experts_and_the_busiest(call, tmp_path):
    model = built("mixtral", tmp_path)
    chosen = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda m, a, output: chosen.append(output[2]))
    with torch.no_grad():
        model(input_ids=ids())
    load = torch.bincount(chosen[0].flatten(), minlength=8).tolist()
    idle = [expert for expert, tokens in enumerate(load) if not tokens]
    arguments = ("trace", str(tmp_path), "--prompt", PROMPT, "--layer")
    out = call(*arguments, "1")[1]
    assert f"experts: {8 - len(idle)} of 8 used  8 choices for 4 tokens" in out
    assert f"idle: {', '.join(map(str, idle))}\n" in out
    busiest = load.index(max(load))
    table = out[out.index("The busiest experts; evenly spread, each has 1 (12.5 %)") :].splitlines()
    assert table[2].split() == [str(busiest), str(max(load)), f"{12.5 * max(load):g}", f"{max(load)}"]
    every = call(*arguments, "all")[1]
    row = every[every.index("The load of the experts") :].splitlines()[3].split()
    assert row[:4] == ["1", f"{8 - len(idle)}", "of", "8"]
    assert row[4:7] == [str(busiest), f"{12.5 * max(load):g}", "12.5"]
    header, *rows = call(*arguments, "all", "--csv")[1].splitlines()
    cells = dict(zip(header.split(","), rows[1].split(","), strict=True))
    assert cells["tokens_per_expert"] == ";".join(map(str, load))
    assert "tokens_per_expert" not in call("trace", "gpt2", "--d-model", "4", "--layer", "all", "--csv")[1]
    assert "load of the experts" not in call("trace", "gpt2", "--d-model", "4", "--layer", "all")[1]
    many = call("trace", "8x16:swiglu", "--experts", "24", "--top-k", "1", "--tokens", "1")[1]
    assert "experts: 1 of 24 used  1 choice for 1 token\n" in many
    assert " and 15 more\n" in many


OF_THREE = steps(FFNSpec(4, 8, "silu", gated=True, moe=MoE(3, 2)))


def test_the_heaviest_come_first_and_those_not_chosen_not_at_all() -> None:
    route = torch.tensor([[[0.25, 0.0, 0.75], [0.5, 0.5, 0.0]], [[0.0, -0.75, 0.25], [0.0, 0.0, 0.0]]])
    assert chosen_experts(OF_THREE, {"route": route}) == (
        Chosen("route", 0, (2, 0), (0.75, 0.25)),
        Chosen("route", 1, (0, 1), (0.5, 0.5)),
        Chosen("route", 2, (1, 2), (-0.75, 0.25)),
        Chosen("route", 3, (), ()),
    )
    assert [one.token for one in chosen_experts(OF_THREE, {"route": route}, 3)] == [0, 1, 3]


def test_a_dense_block_has_no_routes() -> None:
    assert [*routes(OF_THREE)] == ["route"]
    assert chosen_experts(steps(FFNSpec(4, 8)), {}) == ()


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def kept(filtered: torch.Tensor) -> list[set[int]]:
    """The ids that a transformers filter leaves."""
    return [set(row.isfinite().nonzero().flatten().tolist()) for row in filtered]


@pytest.mark.parametrize("top_k", [1, 5, 50])
@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_the_sets_are_those_of_transformers(top_k, top_p):
    logits = drawn(4, 50)
    found = sampling(logits.softmax(-1), top_k, top_p, show=None)
    by_k = kept(TopKLogitsWarper(top_k)(None, logits))
    by_p = kept(TopPLogitsWarper(top_p)(None, logits))
    for one, ks, ps in zip(found, by_k, by_p, strict=True):
        assert {c.id for c in one.candidates if c.in_top_k} == ks
        assert {c.id for c in one.candidates if c.in_top_p} == ps
        assert one.top_p_count == len(ps)


def test_figures_are_torchs():
    probs = drawn(3, 40).softmax(-1)
    for row, one in zip(probs, sampling(probs, 7, 0.8), strict=True):
        best = row.topk(7)
        assert one.argmax == int(row.argmax())
        assert one.probability == float(row.max())
        assert [c.id for c in one.candidates[:7]] == best.indices.tolist()
        assert [c.probability for c in one.candidates[:7]] == best.values.tolist()
        mass = row.sort(descending=True).values.cumsum(0)
        assert one.top_k_mass == pytest.approx(float(mass[6]), rel=1e-12)
        assert one.top_p_mass == pytest.approx(float(mass[one.top_p_count - 1]), rel=1e-12)
        assert [c.cumulative for c in one.candidates] == pytest.approx(mass[:8].tolist(), rel=1e-12)
        assert one.top_p_mass >= 0.8 > float(mass[one.top_p_count - 2])


def test_edges():
    (one,) = sampling(torch.tensor([0.5, 0.25, 0.125, 0.125]), 9, 0.5)
    assert (one.top_k, one.top_k_mass, one.top_p_count, one.position) == (4, 1.0, 1, ())
    (one,) = sampling(torch.tensor([[0.25, 0.25, 0.25, 0.25]]), 1, 1.0)
    assert (one.argmax, one.top_p_count, one.position) == (0, 4, (0,))
    tenths = torch.full((10,), 0.1, dtype=torch.float64)  # ten tenths add up to a little less than 1
    assert sampling(tenths, 1, 1.0)[0].top_p_count == 10
    (one,) = sampling(torch.tensor([float("nan"), 0.5]), 1, 0.9)
    assert (one.argmax, one.probability, one.top_p_mass, one.candidates) == (None, None, None, ())


def test_first_and_last_positions_are_shown():
    probs = drawn(2, 30, 11).softmax(-1)
    found = sampling(probs, 3, 0.9, show=4)
    assert [one.position for one in found] == [(b, t) for b in (0, 1) for t in (0, 1, 28, 29)]
    assert found[5].argmax == int(probs[1, 1].argmax())
    assert {len(one.candidates) for one in found} == {4}
    assert len(sampling(probs, 3, 0.9, show=None)) == 60
