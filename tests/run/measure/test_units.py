"""Hidden units over the tokens, against whole-tensor numpy and tensors made to have them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.run.engine.execute import execute
from ffncli.run.engine.trace import trace
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure import statistics as chunks
from ffncli.run.measure.units import unit_statistics


@pytest.fixture(params=[40, 1 << 20])
def chunk(request, monkeypatch):
    monkeypatch.setattr(chunks, "_CHUNK", request.param)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.usefixtures("chunk")
def test_dead_units_are_those_that_no_token_makes_active(dtype):
    x = torch.randn(30, 20, generator=torch.Generator().manual_seed(0)).relu().to(dtype) + 0.5
    x[:, [2, 7]] = 0
    x[:, 8] = 5e-4
    x[:, 9] = 0
    x[29, 9] = 1.0  # the last token alone
    x[:, 11] = math.nan
    found = unit_statistics(x.reshape(5, 6, 20))
    assert (found.units, found.tokens, found.dead, found.near_dead) == (20, 30, 2, 3)
    assert unit_statistics(torch.zeros(50, 20, dtype=dtype)).dead == 20
    assert found.largest_norm == found.most_active == ()


@pytest.mark.usefixtures("chunk")
def test_the_largest_units_are_numpys():
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(25, 16, generator=draw)
    x[3, 4], x[20, 11] = -60.0, 30.0  # a large norm from one token is not much activity
    down = torch.randn(8, 16, generator=draw)
    found = unit_statistics(x, 3, down)
    values = x.double().numpy()
    norms, means = np.linalg.norm(values, axis=0), np.abs(values).mean(0)
    assert [u.unit for u in found.largest_norm] == np.argsort(-norms)[:3].tolist()
    assert [u.unit for u in found.most_active] == np.argsort(-means)[:3].tolist()
    assert (found.largest_norm[0].largest, found.largest_norm[0].token) == (-60.0, 3)
    for u in (*found.largest_norm, *found.most_active):
        assert (u.norm, u.mean_abs) == (pytest.approx(norms[u.unit], 1e-12), pytest.approx(means[u.unit], 1e-12))
        assert u.largest == values[u.token, u.unit] == max(values[:, u.unit], key=abs)
        alone = np.outer(values[:, u.unit], down.double().numpy()[:, u.unit])  # what it adds to the output
        assert u.writes == pytest.approx(np.linalg.norm(alone), rel=1e-12)


def test_more_units_than_there_are_ties_and_values_that_are_not_finite():
    x = torch.ones(2, 4)
    x[0, 1], x[1, 2] = math.nan, -math.inf
    found = unit_statistics(x, 9)
    assert [u.unit for u in found.largest_norm] == [0, 3, 1, 2]
    assert [(u.norm, u.token, u.writes) for u in found.largest_norm[2:]] == [(1.0, 1, None), (1.0, 0, None)]


def test_a_trace_has_units_where_they_are():
    block = steps(FFNSpec(8, 16, "swiglu"))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    x = torch.randn(6, 8)
    found = trace(block, weights, {"x": x}, top_units=2)
    assert [r.name for r in found.steps if r.units] == ["act", "hidden"]
    tensors = {event.name: event.tensor for event in execute(block, weights, {"x": x})}
    best = found.step("hidden").units.largest_norm[0]
    assert best.norm == pytest.approx(tensors["hidden"].double().norm(dim=0).max().item(), rel=1e-12)
    assert best.writes == pytest.approx(best.norm * weights["down.weight"][:, best.unit].double().norm().item())
    assert found.step("act").units.largest_norm[0].writes is None
    assert trace(block, weights, {"x": x[:0]}).step("act").units is None


def test_experts_have_units_of_their_own_and_tokens_by_their_number():
    block = steps(FFNSpec(8, 16, "relu", moe=MoE(4, 1)))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    found = trace(block, weights, {"x": torch.randn(12, 8)}, inside=None, top_units=16)
    inner = [r for r in found.steps if r.units]
    assert inner
    assert all(r.name.startswith("experts.") and r.name.endswith(".act") for r in inner)
    for record in inner:
        e = int(record.name.split(".")[1])
        units = record.units
        assert units.tokens == len(record.tokens)
        assert {u.token for u in units.largest_norm} <= set(record.tokens)
        assert [one.token for one in units.per_token] == list(record.tokens)
        column = weights["down.weight"][e][:, units.largest_norm[0].unit].double().norm().item()
        assert units.largest_norm[0].writes == pytest.approx(units.largest_norm[0].norm * column)


def test_dropout_in_eval_hands_on_what_it_was_given():
    block = steps(FFNSpec(8, 16, "relu", dropout=0.5))
    weights = random_weights(block, torch.Generator().manual_seed(0))
    found = trace(block, weights, {"x": torch.randn(6, 8)}, top_units=2)
    act, dropout = found.step("act"), found.step("dropout")
    assert (dropout.op, dropout.formula, dropout.inputs) == ("dropout", "dropout(act, 0.5)", ("act",))
    assert (dropout.zeros, dropout.std, dropout.values) == (act.zeros, act.std, act.values)
    assert (act.flops, dropout.flops, dropout.parameters) == (6 * 16, 0, ())
    assert [u.unit for u in dropout.units.largest_norm] == [u.unit for u in act.units.largest_norm]
    assert dropout.units.largest_norm[0].writes
