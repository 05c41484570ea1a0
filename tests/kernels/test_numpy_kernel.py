"""numpy's products: in every dtype against float64, weights stored as [in, out], nothing copied in a call."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import parameters
from ffncli.kernels import built_in
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.weights import random_weights
from tests.kernels.test_kernels import DENSE
from tests.kernels.test_onednn import DTYPES, block_of, right, tokens

KERNEL = built_in("numpy")
SIXTEEN = [pytest.param(name, DTYPES[name], id=name) for name in ("bf16", "fp16")]


@pytest.mark.parametrize("label", DENSE)
@pytest.mark.parametrize(("name", "dtype"), SIXTEEN)
def test_sixteen_bits_are_the_reference(label, name, dtype):
    block, weights = block_of(DENSE[label], dtype)
    assert KERNEL.refusal(block, "cpu", name) is None
    call, params = KERNEL.build(block, "cpu", dtype), KERNEL.prepare(block, weights)
    assert {p.dtype for p in params} == {torch.float32}
    for count in (9, 1, 9):
        x = tokens(count, 6, dtype)
        before = x.clone()
        assert right(block, weights, x, call(x, params), 24)
        assert torch.equal(x, before)


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "mish"])
def test_widths_that_fill_no_vector_and_a_strided_x(activation):
    block, weights = block_of(FFNSpec(129, 1023, activation, gated=True, bias=True), torch.float32)
    call, params = KERNEL.build(block, "cpu", torch.float32), KERNEL.prepare(block, weights)
    for x in (tokens(1, 129, torch.float32), tokens(129, 5, torch.float32).T, tokens(10, 129, torch.float32)[::2]):
        assert right(block, weights, x, call(x, params), 1023)


def test_matrices_are_stored_turned_and_the_weights_stay():
    block, weights = block_of(FFNSpec(8, 24, "swiglu", bias=True), torch.float32)
    params = dict(zip(parameters(block), KERNEL.prepare(block, weights), strict=True))
    for name, tensor in weights.items():
        assert torch.equal(params[name], tensor.T if tensor.dim() == 2 else tensor)
        assert params[name].is_contiguous()
    assert params["up.weight"].shape == (8, 24)
    assert weights["up.weight"].shape == (24, 8)


def test_numpy_multiplies_and_copies_nothing(monkeypatch):
    block = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    generator = torch.Generator().manual_seed(0)
    params = KERNEL.prepare(block, random_weights(block, generator))
    call, x = KERNEL.build(block, "cpu", torch.float32), torch.randn(5, 8, generator=generator)
    entering: list[int] = []
    read: list[int] = []
    written: list[int] = []
    matmul = np.matmul

    def seen(a, b, out):
        entering.append(a.ctypes.data)
        read.append(b.ctypes.data)
        written.append(out.ctypes.data)
        return matmul(a, b, out=out)

    monkeypatch.setattr(np, "matmul", seen)
    out = call(x, params)
    assert sorted(read) == sorted(t.data_ptr() for t in params)
    assert entering[:2] == [x.data_ptr()] * 2
    assert written[-1] == out.data_ptr()
    assert call(x, params).data_ptr() == out.data_ptr()  # its buffers are kept


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_has_one_thread_while_numpy_multiplies(dtype, monkeypatch):
    """Others of torch's would spin beside those of numpy; another Python thread keeps its number."""
    block, weights = block_of(FFNSpec(6, 24, "swiglu"), dtype)
    call, params = KERNEL.build(block, "cpu", dtype), KERNEL.prepare(block, weights)
    x, matmul = tokens(3, 6, dtype), np.matmul
    seen: list[tuple[int, int]] = []

    def multiply(*args, **options):
        with ThreadPoolExecutor(1) as pool:
            seen.append((torch.get_num_threads(), pool.submit(torch.get_num_threads).result()))
        if len(seen) > 3:
            raise MemoryError
        return matmul(*args, **options)

    monkeypatch.setattr(np, "matmul", multiply)
    torch.set_num_threads(2)
    try:
        assert right(block, weights, x, call(x, params), 24)
        assert torch.get_num_threads() == 2
        with pytest.raises(MemoryError):
            call(x, params)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert seen == [(1, 2)] * 4


def test_infinities_are_none_of_numpys_business(recwarn):
    block, weights = block_of(FFNSpec(6, 24, "relu"), torch.float32)
    huge = {name: torch.full_like(tensor, 1e30) for name, tensor in weights.items()}
    out = KERNEL.build(block, "cpu", torch.float32)(torch.full((2, 6), 1e30), KERNEL.prepare(block, huge))
    assert torch.isinf(out).all()
    assert not recwarn.list
