"""The table of a GPU's case: arms replay graphs of their own copies, and what they give is what a plain call gives.

On a processor, with a simulated torch.cuda: a replay hands out what was computed when it was captured.
"""

import random

import pytest
import torch

from ffncli.bench.arms import Table, kernels_by_label, twin_of
from ffncli.bench.graphs import REPLAYED, Launching
from ffncli.bench.placement import Caching
from ffncli.bench.problem import Problem
from ffncli.bench.records import GEMM, TWIN, Case
from ffncli.bench.seat import Seat, made
from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import choices
from tests.bench.fake_cuda import FakeCuda

SPEC = FFNSpec(8, 16, "silu", gated=True)


def table_of(cuda, passes="forward", copies=3, small=True):
    problem = Problem.of(Case("8x16:swiglu", "8x16:swiglu", SPEC, 4, passes=passes), 1)
    kernels = kernels_by_label(choices(["eager,packed"]), problem.steps, SPEC)
    draw = random.Random(0)
    seats = [Seat(name, made(kernel, problem), problem, draw, 1.0) for name, kernel in kernels.items()]
    launching = Launching(small, cuda)
    return Table(problem, seats, twin_of(seats[0], problem, draw), Caching("warm", copies), 1 << 20, launching)


@pytest.mark.parametrize("passes", ["forward", "forward+backward"])
def test_arms_replay_their_copies_in_turn(passes):
    cuda = FakeCuda()
    table = table_of(cuda, passes)
    with torch.enable_grad() if passes != "forward" else torch.inference_mode():
        arms = {arm.name: arm for arm in table.place(0)}
        assert set(arms) >= {"eager", "packed", TWIN, GEMM}
        assert table.launched == REPLAYED
        for seat in (*table.seats, table.twin):
            own = [seat.on_copy(copy) for copy in seat.copies]
            given = [arms[seat.name].call() for _ in range(7)]
            assert [id(given[i]) for i in range(3)] == [id(given[i]) for i in range(3, 6)]
            assert len({id(out) for out in given}) == 3
            for number, out in enumerate(given):
                torch.testing.assert_close(flat(out), flat(own[number % 3]), rtol=0, atol=0)
            assert seat.out is given[-1]
        table.inspect()
    assert not table.wrong


def flat(out):
    return [out] if isinstance(out, torch.Tensor) else [out[0], *out[1]]


def test_a_large_case_is_called_as_before():
    table = table_of(cuda := FakeCuda(), small=False)
    with torch.inference_mode():
        arms = {arm.name: arm for arm in table.place(0)}
        assert arms["eager"].call() is not arms["eager"].call()
    assert table.launched == ""
    assert not cuda.log


def test_each_placement_is_captured_anew():
    table = table_of(FakeCuda())
    with torch.inference_mode():
        first = {arm.name: arm.call for arm in table.place(0)}
        second = {arm.name: arm.call for arm in table.place(1)}
    assert all(first[name] is not second[name] for name in ("eager", "packed", TWIN, GEMM))
    assert table.seats[0].call is second["eager"]
    assert table.arms["packed"].call is second["packed"]
