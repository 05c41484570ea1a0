"""Planted duplicates are found, and the likeness of experts is that of their weights and of hooks on their outputs."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

import ffncli
from tests.oracles.prompted import built, made, through
from tests.run.corpus.test_corpus import TEXTS, ids_of


def test_planted_duplicates_are_found(tmp_path: Path) -> None:
    """A copy, a scaled copy, and one whose up and down are negated; one that is only half a copy is not."""
    model: Any = built("llama", tmp_path)
    mlp = model.model.layers[1].mlp
    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight.t()
    with torch.no_grad():
        for rows in (gate, up, down):
            rows[9], rows[11] = rows[4], 3 * rows[5]
        gate[13], up[13], down[13] = gate[6], -up[6], -down[6]
        gate[15] = gate[7]
        up[20] = 0
    model.save_pretrained(tmp_path)
    row = ffncli.corpus(tmp_path, TEXTS, layer=1, similar=0.95).rows[0]
    found = {(one.first, one.second): (one.cosine_in, one.cosine_out) for one in row.similar_pairs}
    assert found == {(4, 9): pytest.approx((1, 1)), (5, 11): pytest.approx((1, 1)), (6, 13): pytest.approx((1, -1))}
    assert row.near_dead_units == 1
    every = ffncli.corpus(tmp_path, TEXTS[:2], layer=1, similar=0.2).rows[0].similar_pairs
    rows = [functional.normalize(one.detach().double(), dim=-1) for one in (gate, up)]
    least = torch.minimum(rows[0] @ rows[0].t(), (rows[1] @ rows[1].t()).abs()).triu(1)
    expected = {(i, j) for i, j in (least >= 0.2).nonzero().tolist()}
    assert {(one.first, one.second) for one in every} == expected or len(every) == 100
    assert ffncli.corpus(tmp_path, TEXTS[:2], layer=1).rows[0].similar_pairs == ()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_alike_by_weights_and_by_outputs(name: str) -> None:
    model = made(name).model
    for layer in ffncli.experts(made(name).path, TEXTS, ablate_texts=0, similar=1e-6).layers:
        mlp: Any = model.get_submodule(f"model.layers.{layer.layer}.mlp")
        x = torch.cat([through(model, {"x": f"model.layers.{layer.layer}.mlp"}, input_ids=ids_of(text))["x"]
                       for text in TEXTS])  # fmt: skip
        with torch.no_grad():
            chosen = mlp.gate(x)[-1]
            outputs = []
            for expert in range(len(layer.experts)):
                gate, up = (x @ mlp.experts.gate_up_proj[expert].t()).chunk(2, -1)
                outputs.append((functional.silu(gate) * up) @ mlp.experts.down_proj[expert].t())
        found = {(one.first, one.second): one for one in layer.similar_experts}
        for first, second in combinations(range(len(layer.experts)), 2):
            both = (chosen == first).any(-1) & (chosen == second).any(-1)
            mine, other = (torch.cat([w[e].flatten() for w in (mlp.experts.gate_up_proj, mlp.experts.down_proj)])
                           for e in (first, second))  # fmt: skip
            weights = float(functional.cosine_similarity(mine, other, dim=0))
            same = functional.cosine_similarity(outputs[first][both], outputs[second][both], dim=-1)
            mean = float(same.mean()) if len(same) else None
            assert ((first, second) in found) == (max(weights, -1.0 if mean is None else mean) >= 1e-6)
            if (one := found.get((first, second))) is not None:
                assert one.weights == pytest.approx(weights, abs=1e-5)
                assert one.tokens == int(both.sum())
                assert one.outputs == (None if mean is None else pytest.approx(mean, abs=1e-4))
