"""What is written in place is the activation that the table means, and no memory is asked for twice."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation
from ffncli.kernels import built_in
from ffncli.kernels.inplace import changed
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.weights import random_weights
from tests.oracles.activations import ORACLES

NEW = {"softplus", "sqrtsoftplus", "laplace", "prelu", "xielu"}  # torch has none of these in place


@pytest.mark.parametrize("name", TABLE)
def test_activations_in_place(name):
    x = torch.linspace(-12, 12, 97, dtype=torch.float64)
    learned = {n: torch.tensor([v], dtype=torch.float64) for n, v in TABLE[name].learned.items()}
    given = x.clone()
    found = changed(Activation(name))(given, learned)
    with torch.no_grad():
        assert torch.allclose(found, ORACLES[name](x), rtol=1e-12, atol=1e-12)
        limited = changed(Activation(name, -1.0, 0.5, 2.0))(x.clone(), learned)
        assert torch.allclose(limited, ORACLES[name](x.clamp(-1.0, 0.5)) + 2.0, rtol=1e-12, atol=1e-12)
    assert (found.data_ptr() == given.data_ptr()) == (name not in NEW)


def test_a_call_writes_over_the_last_one():
    block = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    kernel, generator = built_in("inplace"), torch.Generator().manual_seed(0)
    params = kernel.prepare(block, random_weights(block, generator))
    one, two = (kernel.build(block, "cpu", torch.float32) for _ in range(2))
    x, y = torch.randn(2, 5, 8, generator=generator)
    first = one(x, params)
    kept = first.clone()
    assert two(y, params).data_ptr() != first.data_ptr()  # what another build writes is its own
    assert torch.equal(first, kept)
    assert one(y, params).data_ptr() == first.data_ptr()
    assert not torch.equal(first, kept)
