"""Which memory an arm gets is chance."""

import random

import torch

from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel, shuffle_buffers
from ffncli.block.recipe import FFNSpec
from ffncli.kernels import built_in


def test_seats_trade_their_memory_and_still_own_all_of_it() -> None:
    problem = Problem.of(Case("8x16:swiglu", "8x16:swiglu", FFNSpec(8, 16, "swiglu"), tokens=2), 0)
    draw = random.Random(0)
    kernels = [PlacedKernel(name, build_kernel(built_in("eager"), problem), problem, draw) for name in ("a", "b", "c")]
    homes, met = (
        {id(memory) for placed in kernels for memory in placed.arenas},
        {placed.name: set() for placed in kernels},
    )
    for _ in range(20):
        shuffle_buffers(kernels, draw)
        for placed in kernels:
            placed.place(1)
            met[placed.name].add(id(placed.arenas[1]))
        assert {id(memory) for placed in kernels for memory in placed.arenas} == homes  # nobody shares, nothing is lost
        assert len({tensor.data_ptr() for placed in kernels for tensor in placed.copies[0]}) == 9
        with torch.inference_mode():
            first, *others = (placed.call() for placed in kernels)
        assert all(torch.equal(first, other) for other in others)
    assert all(len(places) == 3 for places in met.values())
