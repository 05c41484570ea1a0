"""The losses of a router against transformers' own functions, and by hand."""

import math

import pytest
import torch

import ffncli
from ffncli.block.steps import Axis, Route
from ffncli.run.engine.execute import route
from ffncli.run.engine.router_losses import RouterSums


def losses_of(op: Route, logits: torch.Tensor, parts: int = 1) -> dict[str, float]:
    sums = RouterSums(op)
    for part in logits.chunk(parts):
        sums.add(part)
    load = (route(op, {}, logits) != 0).sum(0).tolist()
    return {one.name: one.value for one in sums.losses(load)}


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_load_balancing_is_that_of_mixtral(top_k: int) -> None:
    code = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    logits = torch.randn(40, 8, generator=torch.Generator().manual_seed(top_k), dtype=torch.float64)
    op = Route(Axis("experts", 8), top_k, score_dtype="input")
    theirs = code.load_balancing_loss_func((logits,), 8, top_k)
    ours = losses_of(op, logits, parts=3)
    assert ours["transformers"] == pytest.approx(theirs.item(), rel=1e-6)  # theirs counts in float32
    assert ours["switch"] == pytest.approx(ours["transformers"] / top_k, rel=1e-12)
    assert ours == pytest.approx(losses_of(op, logits), rel=1e-12)
    assert "deepseek-v3" not in ours


def test_the_losses_of_switch_transformers() -> None:
    code = pytest.importorskip("transformers.models.switch_transformers.modeling_switch_transformers")
    logits = torch.randn(1, 40, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    op = Route(Axis("experts", 8), 1, score_dtype="input")
    ours = losses_of(op, logits[0])
    assert ours["z-loss"] == pytest.approx(code.router_z_loss_func(logits).item(), rel=1e-12)
    probabilities = logits.softmax(-1)
    theirs = code.load_balancing_loss_func(probabilities, probabilities.argmax(-1))
    assert ours["switch"] == pytest.approx(theirs.item(), rel=1e-6)  # theirs counts in float32


def test_the_sequence_wise_loss_of_deepseek() -> None:
    logits = torch.randn(30, 6, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    op = Route(Axis("experts", 6), 2, score="sigmoid", score_dtype="input")
    expected = 0.0
    scores = [[1 / (1 + math.exp(-x)) for x in row] for row in logits.tolist()]
    for expert in range(6):
        f = 6 / (2 * 30) * sum(expert in sorted(range(6), key=lambda e: -row[e])[:2] for row in scores)
        expected += f * sum(row[expert] / sum(row) for row in scores) / 30
    assert losses_of(op, logits)["deepseek-v3"] == pytest.approx(expected, rel=1e-12)


def test_an_even_load_has_the_least_loss() -> None:
    op = Route(Axis("experts", 4), 1, score_dtype="input")
    even = losses_of(op, 50 * torch.eye(4, dtype=torch.float64))
    assert even["switch"] == pytest.approx(1.0)
    one = losses_of(op, 50 * torch.eye(4, dtype=torch.float64)[[0, 0, 0, 0]])
    assert one["switch"] == pytest.approx(4.0)
    assert even["z-loss"] == pytest.approx(2500.0)


def test_a_trace_has_them() -> None:
    session = ffncli.trace("8x16:swiglu", experts=4, top_k=2, tokens=12, dtype="fp64")
    expected = losses_of(Route(Axis("experts", 4), 2, score_dtype="input"), session["router"])
    assert {one.name: one.value for one in session.routing.losses} == pytest.approx(expected)
    assert ffncli.trace("8x16:swiglu", tokens=2).routing is None
