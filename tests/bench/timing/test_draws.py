"""Where random numbers are drawn: for a case on a GPU nowhere but there, and those of the bare products once."""

import random

import pytest
import torch

from ffncli.bench.machine import machine
from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing import arms as arms_module
from ffncli.bench.timing.arms import Arms
from ffncli.bench.timing.bare_products import Chain
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.bench.timing.placement import Caching
from ffncli.block.recipe import FFNSpec, MoE
from ffncli.kernels import built_in
from tests.bench.fake_draws import FakeDraws

BLOCKS = {"dense": FFNSpec(8, 16, "swiglu"), "mixture": FFNSpec(8, 16, "swiglu", moe=MoE(4, 2))}


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_gpu_draws_its_numbers_itself(monkeypatch, block, passes):
    case = Case("s", "s", BLOCKS[block], 5, passes=passes, device="cuda")
    monkeypatch.setattr(machine, "finish", lambda device: None)
    monkeypatch.setattr(arms_module, "anchor_of", lambda *_: None)  # of a real GPU; the same for all cases
    with FakeDraws() as device:
        problem = refereed(Problem.of(case, 5))
        weights = sum(tensor.numel() for tensor in problem.weights.values())
        assert device.drawn == {"cpu": 0, "cuda": weights}
        placed = PlacedKernel("eager", build_kernel(built_in("eager"), problem), problem, random.Random(0))
        arms = Arms(problem, [placed], None, Caching("warm"), 1 << 20)
        for number in (0, 1):
            arms.place(number)
        assert device.drawn["cpu"] == 0
        assert device.drawn["cuda"] > weights


def test_the_bare_products_draw_once(monkeypatch):
    drawn = []
    real = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *size, **more: drawn.append(size) or real(*size, **more))
    problem = Problem.of(Case("s", "s", BLOCKS["mixture"], 5, passes="forward+backward"), 5)
    chain = Chain(problem, random.Random(0))
    _ = problem.experts
    drawn.clear()
    chain.place(1)
    assert drawn
    first, drawn[:] = len(drawn), []
    entered = chain.entry.clone()
    chain.place(2)
    assert not drawn
    assert first == len(chain._shapes)
    assert torch.equal(chain.entry, entered)
