"""Which steps show hidden units."""

from __future__ import annotations

import pytest

from ffncli.block.activations import hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.shard import shard
from ffncli.block.steps import Experts
from ffncli.block.value import unit_steps


@pytest.mark.parametrize(
    ("spec", "units"),
    [
        (FFNSpec(8, 16, "relu"), {"act": "down"}),
        (FFNSpec(8, 16, "swiglu", norm="rmsnorm", residual=True), {"act": None, "hidden": "down"}),
        (FFNSpec(8, 16, "relu", dropout=0.1), {"act": None, "dropout": "down"}),
        (FFNSpec(8, 16, "identity"), {}),
        (FFNSpec(8, 8, "relu"), {"act": "down"}),  # d_ff by its name, not by its size
        (FFNSpec(8, 16, "quick_gelu", gated=True, limits=hard_limits(7.0, 1.0)), {"act": None, "hidden": "down"}),
        (
            FFNSpec(8, 16, "swiglu", moe=MoE(4, 2, 1)),
            {"shared.act": None, "shared.hidden": "shared.down"},
        ),
    ],
)
def test_units_are_read_off_the_steps(spec, units):
    assert unit_steps(steps(spec)) == units


def test_experts_have_them_in_their_program():
    (experts,) = [s.op for s in steps(FFNSpec(8, 16, "swiglu", moe=MoE(4, 2))) if isinstance(s.op, Experts)]
    assert unit_steps(experts.program) == {"act": None, "hidden": "down"}


def test_a_rank_has_its_part_of_the_units():
    assert unit_steps(shard(steps(FFNSpec(8, 16, "swiglu")), 0, 2)) == {"act": None, "hidden": "down"}
