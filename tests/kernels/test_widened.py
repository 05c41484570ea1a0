"""Kernels of 16-bit blocks in float32: what their prepare and their build are given, and what comes out."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.recipe import FFNSpec, steps
from ffncli.kernels.kernel import canonical, kernel_steps
from ffncli.kernels.per_weights import widened, widened_weights

BLOCK = kernel_steps(steps(FFNSpec(2, 3, "relu", bias=False)))
WEIGHTS = {"up.weight": torch.ones(3, 2, dtype=torch.bfloat16), "down.weight": torch.ones(2, 3, dtype=torch.bfloat16)}


@pytest.mark.parametrize(("multiplied", "inside"), [(True, torch.bfloat16), (False, torch.float32)])
def test_a_dtype_that_is_not_multiplied_is_widened(multiplied, inside):
    def multiplies(dtype):
        return multiplied or dtype != torch.bfloat16

    seen = []

    @widened(multiplies)
    def build(steps, device, dtype):
        seen.append(dtype)
        return lambda x, params: seen.append(x.dtype) or x + params[0].sum()

    params = widened_weights(canonical, multiplies)(BLOCK, WEIGHTS)
    assert [p.dtype for p in params] == [inside, inside]
    assert (params[0] is WEIGHTS["up.weight"]) == multiplied
    out = build(BLOCK, "cpu", torch.bfloat16)(torch.zeros(4, 2, dtype=torch.bfloat16), params)
    assert seen == [inside, inside]
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.full((4, 2), 6.0, dtype=torch.bfloat16))
