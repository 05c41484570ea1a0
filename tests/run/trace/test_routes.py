"""Which experts a token is given to, from routes written by hand."""

from __future__ import annotations

import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import routes
from ffncli.run.trace.routing import Chosen, chosen_experts

BLOCK = steps(FFNSpec(4, 8, "silu", gated=True, moe=MoE(3, 2)))


def test_the_heaviest_come_first_and_those_not_chosen_not_at_all() -> None:
    route = torch.tensor([[[0.25, 0.0, 0.75], [0.5, 0.5, 0.0]], [[0.0, -0.75, 0.25], [0.0, 0.0, 0.0]]])
    assert chosen_experts(BLOCK, {"route": route}) == (
        Chosen("route", 0, (2, 0), (0.75, 0.25)),
        Chosen("route", 1, (0, 1), (0.5, 0.5)),
        Chosen("route", 2, (1, 2), (-0.75, 0.25)),
        Chosen("route", 3, (), ()),
    )
    assert [one.token for one in chosen_experts(BLOCK, {"route": route}, 3)] == [0, 1, 3]


def test_a_dense_block_has_no_routes() -> None:
    assert [*routes(BLOCK)] == ["route"]
    assert chosen_experts(steps(FFNSpec(4, 8)), {}) == ()
