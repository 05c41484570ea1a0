"""The arms of a GPU's case: they replay graphs of their own copies, and what they give is what a plain call gives.

On a processor, with a simulated torch.cuda: a replay hands out what was computed when it was captured.
"""

import random

import pytest
import torch

from ffncli.bench.records import GEMM, TWIN, Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing.arms import Arms, kernels_by_label, twin_of
from ffncli.bench.timing.cuda_graphs import REPLAYED, Launching
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.bench.timing.placement import Caching
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from tests.bench.fake_cuda import FakeCuda

SPEC = FFNSpec(8, 16, "silu", gated=True)


def arms_of(cuda, passes="forward", copies=3, small=True):
    problem = refereed(Problem.of(Case("8x16:swiglu", "8x16:swiglu", SPEC, 4, passes=passes), 1))
    kernels = kernels_by_label(choices(["eager,packed"]), problem.steps, SPEC)
    draw = random.Random(0)
    kernels = [PlacedKernel(name, build_kernel(kernel, problem), problem, draw) for name, kernel in kernels.items()]
    launching = Launching(small, cuda)
    return Arms(problem, kernels, twin_of(kernels[0], problem, draw), Caching("warm", copies), 1 << 20, launching)


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_arms_replay_their_copies_in_turn(passes):
    cuda = FakeCuda()
    arms = arms_of(cuda, passes)
    with torch.enable_grad() if passes != "forward" else torch.inference_mode():
        by_name = {arm.name: arm for arm in arms.place(0)}
        assert set(by_name) >= {"eager", "packed", TWIN, GEMM}
        assert arms.launched == REPLAYED
        for placed in (*arms.kernels, arms.twin):
            own = [placed.on_copy(copy) for copy in placed.copies]
            given = [by_name[placed.name].call() for _ in range(7)]
            assert [id(given[i]) for i in range(3)] == [id(given[i]) for i in range(3, 6)]
            assert len({id(out) for out in given}) == 3
            for number, out in enumerate(given):
                torch.testing.assert_close(flat(out), flat(own[number % 3]), rtol=0, atol=0)
            assert placed.out is given[-1]
        arms.inspect()
    assert not arms.wrong


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else [out[0], *out[1]]


def test_a_large_case_is_called_as_before():
    arms = arms_of(cuda := FakeCuda(), small=False)
    with torch.inference_mode():
        by_name = {arm.name: arm for arm in arms.place(0)}
        assert by_name["eager"].call() is not by_name["eager"].call()
    assert arms.launched == ""
    assert not cuda.log


def test_each_placement_is_captured_anew():
    arms = arms_of(FakeCuda())
    with torch.inference_mode():
        first = {arm.name: arm.call for arm in arms.place(0)}
        second = {arm.name: arm.call for arm in arms.place(1)}
    assert all(first[name] is not second[name] for name in ("eager", "packed", TWIN, GEMM))
    assert arms.kernels[0].call is second["eager"]
    assert arms.by_name["packed"].call is second["packed"]
