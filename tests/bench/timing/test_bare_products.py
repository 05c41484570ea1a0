"""The bare products: as many FLOPs as torch counts in the block itself, and the right matrices, copy after copy."""

import random
from itertools import combinations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.bare_products import Chain
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.run.engine.execute import run

D, F, T = 16, 24, 7
BLOCKS = {
    "plain": FFNSpec(D, F, "relu"),
    "gated": FFNSpec(D, F, "swiglu", norm="rmsnorm", residual=True),
    "mixture": FFNSpec(D, F, "swiglu", moe=MoE(8, 2)),
    "few experts touched": FFNSpec(D, F, "gelu", moe=MoE(64, 1)),
    "shared expert": FFNSpec(D, F, "swiglu", moe=MoE(4, 2, shared_experts=1)),
}


def placed(label: str, passes: str = "forward", copies: int = 1) -> tuple[Chain, Problem]:
    problem = Problem.of(Case("s", "s", BLOCKS[label], T, passes=passes), 11)  # type: ignore[arg-type]
    chain = Chain(problem, random.Random(0))
    chain.place(copies)
    return chain, problem


def counted(call) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops()


@pytest.mark.parametrize("label", BLOCKS)
def test_forward_has_the_flops_that_torch_counts_in_the_block(label):
    chain, problem = placed(label)
    x = problem.first.x.clone().requires_grad_()  # without gradients the counter counts a linear twice
    weights = {name: t.clone().requires_grad_() for name, t in problem.weights.items()}
    assert counted(chain.call) == counted(lambda: run(problem.steps, weights, {problem.entry: x}))


@pytest.mark.parametrize("label", BLOCKS)
def test_backward_too(label):
    chain, problem = placed(label, "forward+backward")
    x = problem.first.x.clone().requires_grad_()
    weights = {name: t.clone().requires_grad_() for name, t in problem.weights.items()}

    def both():
        y = run(problem.steps, weights, {problem.entry: x})
        torch.autograd.grad(y, [x, *weights.values()], torch.ones_like(y), allow_unused=True)

    assert counted(chain.call) == counted(both) == 3 * counted(placed(label)[0].call)


@pytest.mark.parametrize(
    ("label", "flops"),
    [
        ("plain", 2 * 2 * T * D * F),
        ("gated", 2 * 3 * T * D * F),
        ("mixture", 2 * 2 * 3 * T * D * F + 2 * T * D * 8),  # top 2, and the router
        ("few experts touched", 2 * 2 * T * D * F + 2 * T * D * 64),
        ("shared expert", 2 * 3 * 3 * T * D * F + 2 * T * D * 4),
    ],
)
def test_flops_in_closed_form(label, flops):
    assert counted(placed(label)[0].call) == flops


def test_every_product_is_of_its_own_matrix_and_what_was_written_before(monkeypatch):
    seen = []
    chain, problem = placed("gated", "forward+backward", copies=2)
    real = torch.mm

    def mm(a, b, out):
        seen.append((a, b, real(a, b, out=out)))
        return out

    monkeypatch.setattr(torch, "mm", mm)
    chain.call()
    w = problem.weights
    (x, gate, g_out), (x2, up, u_out), (entering, down, _), *backward = seen
    assert torch.equal(gate, w["gate.weight"].T)
    assert torch.equal(up, w["up.weight"].T)
    assert torch.equal(down, w["down.weight"].T)
    assert x.data_ptr() == x2.data_ptr()
    assert entering.data_ptr() in (g_out.data_ptr(), u_out.data_ptr())
    shapes = [(tuple(a.shape), tuple(b.shape), tuple(out.shape)) for a, b, out in backward]
    assert shapes == [
        ((T, D), (D, F), (T, F)), ((D, T), (T, F), (D, F)),  # of down: the gradient of what enters, and of W
        ((T, F), (F, D), (T, D)), ((F, T), (T, D), (F, D)),
        ((T, F), (F, D), (T, D)), ((F, T), (T, D), (F, D)),
    ]  # fmt: skip
    for a, b, out in seen:
        assert torch.allclose(out.double(), a.double() @ b.double(), rtol=1e-4, atol=1e-5)
    first = [b.data_ptr() for _, b, _ in seen[:3]]
    seen.clear()
    chain.call()
    second = [b.data_ptr() for _, b, _ in seen[:3]]
    assert not set(first) & set(second)  # the other copy
    seen.clear()
    chain.call()
    assert [b.data_ptr() for _, b, _ in seen[:3]] == first


def test_written_is_nothing_that_is_read_as_a_matrix():
    chain, problem = placed("mixture", "forward+backward", copies=3)
    assert len(chain.copies) == 3
    memory = [(a._memory.data_ptr(), a._memory.data_ptr() + a._memory.numel()) for a in chain._arenas]
    memory += [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in problem.weights.values()]
    assert all(a[1] <= b[0] or b[1] <= a[0] for a, b in combinations(memory, 2))
    before = {name: t.clone() for name, t in problem.weights.items()}
    chain.call()
    assert all(torch.equal(problem.weights[name], t) for name, t in before.items())
