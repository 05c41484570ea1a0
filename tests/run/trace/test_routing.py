"""The load of the experts: from routes written by hand, and against what transformers' own router chooses."""

from __future__ import annotations

import json

import pytest
import torch

import ffncli
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.run.trace.routing import Routing, routing_of
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
