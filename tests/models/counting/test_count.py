from __future__ import annotations

from dataclasses import replace

import pytest

from ffncli.block.recipe import FFNSpec, MoE
from ffncli.models import catalog
from ffncli.models.counting.count import count
from ffncli.models.model import Group, Model, Resolved

DENSE = FFNSpec(4, 8, "swiglu", norm="rmsnorm", shared_norm=True)
SPARSE = FFNSpec(4, 8, "swiglu", moe=MoE(5, 2, 3, shared_d_ff=10))
MIXED = Resolved(Model("m", (Group("decoder", (0,), DENSE), Group("decoder", (1, 2), SPARSE))), "m")
PER_DENSE, PER_SPARSE = 3 * 4 * 8, 5 * 3 * 4 * 8 + 4 * 5 + 3 * 4 * 10


def test_totals_are_over_all_layers_and_tokens():
    found = count(MIXED, "bf16", tokens=7)
    one = count(MIXED)
    assert found.ffn_params_per_layer == PER_SPARSE
    assert found.ffn_params_total == PER_DENSE + 2 * PER_SPARSE
    assert found.weight_bytes == 2 * found.ffn_params_total
    assert found.matmul_flops_total == 7 * 2 * found.ffn_params_active
    assert found.elementwise_flops_total == 7 * one.elementwise_flops_total > 0
    assert (found.tokens, found.layers, found.uniform) == (7, 3, False)
    assert [g.shared_d_ff for g in found.groups] == [0, 10]


def test_layers_are_uniform_whatever_stack_they_are_in():
    assert count(catalog.find("transformer-base")).uniform
    groups = Group("decoder", (0,), DENSE), Group("decoder", (1,), replace(DENSE, bias=True))
    same_widths = Resolved(Model("m", groups), "m")
    assert not count(same_widths).uniform


def test_norms_are_marked():
    (norm, *others) = count(MIXED).groups[0].tensors
    assert (norm.name, norm.norm, norm.shared) == ("norm.weight", True, True)
    assert not any(t.norm or t.shared for t in others)


@pytest.mark.parametrize(("stored", "name", "size"), [(None, "fp32", 4), ("bf16", "bf16", 2), ("gptq-4bit", "bf16", 2)])
def test_bytes_are_of_the_stored_dtype(stored, name, size):
    mixed = replace(MIXED, model=replace(MIXED.model, dtype=stored))
    found = count(mixed)
    assert (found.dtype, found.weight_bytes) == (name, size * found.ffn_params_total)
    assert count(mixed, "fp64").weight_bytes == 8 * found.ffn_params_total
