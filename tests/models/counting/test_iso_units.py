"""Gated units in blocks as large as a plain one: counted here from the shapes alone."""

from __future__ import annotations

import pytest

from ffncli.block.analysis.gated import UNITS
from ffncli.errors import FFNError
from ffncli.models.counting.iso_params import iso_unit


@pytest.mark.parametrize(
    ("name", "plain_operations", "gated_operations", "gated_flops"),
    [
        ("swiglu", 2, 3, 2),  # σ, ×; and the product with up
        ("geglu", 5, 6, 2),
        ("reglu", 2, 3, 2),
        ("bilinear", 0, 1, 2),
        ("swiglu_oai", 5, 11, 3),  # min is two, clip four, then + 1: the lift is a step of its own
    ],
)
def test_by_hand(name, plain_operations, gated_operations, gated_flops):
    found = iso_unit(UNITS[name], 512, 2048)
    widths = found.widths
    assert (found.d_model, widths.plain_d_ff, widths.gated_d_ff) == (512, 2048, 1365)
    assert (widths.plain_params, widths.gated_params) == (2 * 512 * 2048, 3 * 512 * 1365)
    assert widths.difference_percent == pytest.approx(100 * (3 * 1365 - 2 * 2048) / (2 * 2048))
    assert found.plain_elementwise_flops_per_token == 2048
    assert found.gated_elementwise_flops_per_token == gated_flops * 1365
    assert found.plain_operations_per_token == plain_operations * 2048
    assert found.gated_operations_per_token == gated_operations * 1365


def test_llamas_own_width():
    """Its code: two thirds of 4 × 4096, then the next multiple of 256."""
    assert iso_unit(UNITS["swiglu"], 4096, 4 * 4096, 256).widths.gated_d_ff == 11008


@pytest.mark.parametrize(("d_model", "d_ff", "multiple"), [(0, 8, 1), (8, 0, 1), (8, 2**31, 1), (8, 8, 0)])
def test_sizes_that_are_none(d_model, d_ff, multiple):
    with pytest.raises(FFNError):
        iso_unit(UNITS["swiglu"], d_model, d_ff, multiple)
