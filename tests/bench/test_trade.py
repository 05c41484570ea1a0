"""Which memory an arm gets is chance."""

from __future__ import annotations

import random

import torch

from ffncli.bench.problem import Problem
from ffncli.bench.records import Case
from ffncli.bench.seat import Seat, made, trade
from ffncli.block.recipe import FFNSpec
from ffncli.kernels import built_in


def test_seats_trade_their_memory_and_still_own_all_of_it() -> None:
    problem = Problem.of(Case("8x16:swiglu", "8x16:swiglu", FFNSpec(8, 16, "swiglu"), tokens=2), 0)
    draw = random.Random(0)
    seats = [Seat(name, made(built_in("eager"), problem), problem, draw, 1.0) for name in ("a", "b", "c")]
    homes, met = {id(memory) for seat in seats for memory in seat.arenas}, {seat.name: set() for seat in seats}
    for _ in range(20):
        trade(seats, draw)
        for seat in seats:
            seat.place(1)
            met[seat.name].add(id(seat.arenas[1]))
        assert {id(memory) for seat in seats for memory in seat.arenas} == homes  # nobody shares, nothing is lost
        assert len({tensor.data_ptr() for seat in seats for tensor in seat.copies[0]}) == 9
        with torch.inference_mode():
            first, *others = (seat.call() for seat in seats)
        assert all(torch.equal(first, other) for other in others)
    assert all(len(places) == 3 for places in met.values())
