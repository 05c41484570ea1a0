"""numpy's activations against torch's, and what is copied on the way: nothing."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ffncli.block.activations import TABLE
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import Activation
from ffncli.kernels import built_in
from ffncli.kernels.kernel import kernel_steps
from ffncli.kernels.numpy_kernel import FUNCTIONS, LEARNED, _activation
from ffncli.run.engine.weights import random_weights
from tests.oracles.activations import ORACLES

ERF = {"gelu", "gelu_10", "laplace"}


def test_only_those_with_an_error_function_are_missing():
    assert set(TABLE) - set(FUNCTIONS) - set(LEARNED) == ERF
    for name in ERF:
        block = kernel_steps(steps(FFNSpec(8, 24, name)))
        assert built_in("numpy").refuses(block) == f"numpy has no erf, which {name} needs"


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", sorted({*FUNCTIONS, *LEARNED}))
def test_activations(name, dtype):
    x = torch.linspace(-12, 12, 97, dtype=dtype)
    learned = {f"act.{n}": np.array([v], x.numpy().dtype) for n, v in TABLE[name].learned.items()}
    off = 40 * torch.finfo(dtype).eps
    found = torch.from_numpy(_activation(Activation(name))(x.numpy(), learned))
    assert found.dtype == dtype
    with torch.no_grad():
        exact = ORACLES[name](x.double())
        assert torch.allclose(found.double(), exact, rtol=off, atol=off)
        limited = torch.from_numpy(_activation(Activation(name, -1.0, 0.5, 2.0))(x.numpy(), learned))
        assert torch.allclose(limited.double(), ORACLES[name](x.double().clamp(-1.0, 0.5)) + 2.0, rtol=off, atol=off)


@pytest.mark.parametrize("name", ["silu", "sigmoid", "quick_gelu", "softplus", "mish"])
def test_far_out_nothing_is_nan_and_nothing_is_said(name, recwarn):
    block = kernel_steps(steps(FFNSpec(1, 1, name, bias=False)))
    kernel, x = built_in("numpy"), torch.tensor([[-1e4], [1e4]])
    out = kernel.build(block, "cpu", torch.float32)(x, (torch.ones(1, 1), torch.ones(1, 1)))
    assert torch.allclose(out, getattr(torch.nn.functional, name, ORACLES[name])(x))
    assert not recwarn.list


def test_views_alone_go_in_and_out(monkeypatch):
    block = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    kernel, generator = built_in("numpy"), torch.Generator().manual_seed(0)
    params = kernel.prepare(block, random_weights(block, generator))
    call, x = kernel.build(block, "cpu", torch.float32), torch.randn(5, 8, generator=generator)
    made: list[int] = []
    read: list[int] = []
    from_numpy, to_numpy = torch.from_numpy, torch.Tensor.numpy

    def seen(tensor):
        array = to_numpy(tensor)
        read.append(array.ctypes.data)
        return array

    monkeypatch.setattr(torch, "from_numpy", lambda array: made.append(array.ctypes.data) or from_numpy(array))
    monkeypatch.setattr(torch.Tensor, "numpy", seen)
    out = call(x, params)
    assert made == [out.data_ptr()]
    assert sorted(read) == sorted(t.data_ptr() for t in (x, *params))
