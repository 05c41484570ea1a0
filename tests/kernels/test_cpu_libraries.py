"""onednn, onednn_packed, mkl and numpy against float64: every kind of block, odd widths, views; what they keep."""

import gc
import itertools
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ffncli.bench.timing.placement import nbytes, placeable
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import block_inputs, parameters
from ffncli.kernels import blas, built_in, onednn
from ffncli.kernels.kernel import Kernel, Steps, kernel_steps
from ffncli.kernels.per_weights import PerWeights
from ffncli.run.engine.reference import in_float64
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import tolerance_for
from tests.kernels.test_kernels import DENSE, GATED
from tests.oracles.modules import relative_error

NAMES = ("onednn", "onednn_packed")
FEW = ("relu", "gelu", "silu", "mish")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MKL = built_in("mkl")
needs_mkl = pytest.mark.skipif(MKL.missing("cpu") is not None, reason="this build of torch has no MKL")
HERE = [pytest.param(name, DTYPES[name], id=name) for name in onednn.DTYPES]  # some in float32, by the processor


def block_of(spec: FFNSpec, dtype: torch.dtype):
    block = kernel_steps(steps(spec))
    return block, random_weights(block, torch.Generator().manual_seed(0), dtype)


def tokens(count: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(count)).to(dtype)


def right(block, weights, x, out, width: int) -> bool:
    reference = in_float64(block, weights, {block_inputs(block)[0]: x})[0]
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    return relative_error(out, reference) < tolerance_for(x.dtype, width)


def check(kernel: Kernel, block: Steps, weights: Mapping[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Few tokens, one and few again are the reference, and x stays."""
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for count in (9, 1, 9):
        x = tokens(count, 6, dtype)
        before = x.clone()
        assert right(block, weights, x, call(x, params), 24)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("label", DENSE)
@pytest.mark.parametrize(("dtype_name", "dtype"), HERE)
def test_it_is_the_reference(name, label, dtype_name, dtype):
    kernel, (block, weights) = built_in(name), block_of(DENSE[label], dtype)
    refused = kernel.refusal(block, "cpu", dtype_name)
    assert (refused is None) == (name == "onednn" or label in GATED)
    if refused:
        assert refused == "a plain block has no gate to pack"
        return
    check(kernel, block, weights, dtype)


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        *itertools.product(NAMES, "relu sigmoid silu gelu gelu_tanh leaky_relu identity mish".split()),
        *itertools.product(["numpy"], FEW),
        *(pytest.param("mkl", activation, marks=needs_mkl) for activation in FEW),
    ],
)
def test_widths_that_fill_no_vector_and_a_strided_x(name, activation):
    """mish is one of those that oneDNN does not compute while it writes."""
    kernel, spec = built_in(name), FFNSpec(129, 1023, activation, gated=True, bias=True)
    block, weights = block_of(spec, torch.float32)
    call, params = kernel.build(block, "cpu", torch.float32), kernel.prepare(block, weights)
    for x in (tokens(1, 129, torch.float32), tokens(129, 5, torch.float32).T, tokens(10, 129, torch.float32)[::2]):
        assert right(block, weights, x, call(x, params), 1023)


class Ops(TorchDispatchMode):
    """The names of all that torch computes inside."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func._schema.name.rpartition("::")[2])
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("label", "others"), [("gated", set()), ("clamped", {"sigmoid", "clamp", "mul", "add"})])
def test_the_activation_is_applied_as_a_product_is_written(label, others):
    """Where oneDNN has the activation, nothing lies between the three products; with limits, torch's functions do."""
    kernel, (block, weights) = built_in("onednn"), block_of(DENSE[label], torch.float32)
    call, params = kernel.build(block, "cpu", torch.float32), kernel.prepare(block, weights)
    x = tokens(3, 6, torch.float32)
    with Ops() as ops:
        call(x, params)
    assert ops.names.count("_linear_pointwise") == 3
    assert {*ops.names} - {"_linear_pointwise"} == others


@pytest.mark.parametrize(("name", "label"), [("onednn_packed", "bias"), pytest.param("mkl", "gated", marks=needs_mkl)])
def test_other_copies_are_other_outputs(name, label):
    kernel, (block, weights) = built_in(name), block_of(DENSE[label], torch.float32)
    other = {name: -tensor for name, tensor in weights.items()}
    call, x = kernel.build(block, "cpu", torch.float32), tokens(4, 6, torch.float32)
    params = [kernel.prepare(block, one) for one in (weights, other)]
    for one, copy in zip((weights, other, weights), (params[0], params[1], params[0]), strict=True):
        assert right(block, one, x, call(x, copy), 24)
    if name == "mkl":  # which keeps what it makes of weights: new ones in the same memory are other ones
        for tensor in weights.values():
            tensor.mul_(2)
        assert right(block, weights, x, call(x, kernel.prepare(block, weights)), 24)


def test_its_weights_are_opaque_and_their_bytes_are_counted():
    block, weights = block_of(FFNSpec(64, 256, "swiglu"), torch.float32)
    params = built_in("onednn").prepare(block, weights)
    assert not placeable(params)
    assert nbytes(params) == nbytes(tuple(weights.values())) == 3 * 64 * 256 * 4
    wider = built_in("onednn").prepare(*block_of(FFNSpec(65, 257, "swiglu"), torch.float32))
    assert nbytes(wider) > 3 * 65 * 257 * 4  # oneDNN fills its blocks up
    assert all(torch.equal(a.to_dense(), b) for a, b in zip(params, weights.values(), strict=True))


def test_what_it_refuses(monkeypatch):
    block, _ = block_of(DENSE["gated"], torch.float32)
    kernel = built_in("onednn")
    assert kernel.refusal(block, "cuda", "fp32").startswith("runs on a CPU only")
    assert kernel.refusal(block, "cpu", "fp64") == "computes in fp32, bf16 and fp16 only, not in fp64"
    assert kernel.refusal(block, "cpu", "fp32", "forward+backward") == "computes forward only"
    assert onednn.multiplies(torch.float32)
    assert not onednn.multiplies(torch.float64)
    assert onednn.available("cpu")
    assert not onednn.available("cuda")
    monkeypatch.setattr("ffncli.kernels.kernel._has_onednn", lambda: False)
    assert kernel.refusal(block, "cpu", "fp32") == "this build of torch has no oneDNN"
    assert not onednn.available("cpu")


@needs_mkl
@pytest.mark.parametrize("label", DENSE)
def test_mkl_is_the_reference(label):
    block, weights = block_of(DENSE[label], torch.float32)
    check(MKL, block, weights, torch.float32)


def test_what_mkl_refuses(monkeypatch):
    block, _ = block_of(DENSE["gated"], torch.float32)
    assert MKL.refusal(block, "cuda", "fp32").startswith("runs on a CPU only")
    assert MKL.refusal(block, "cpu", "fp32", "forward+backward").endswith("computes forward only")
    monkeypatch.setattr("ffncli.kernels.kernel._has_mkl", lambda: True)
    assert MKL.refusal(block, "cpu", "bf16") == "computes in fp32 only, not in bf16"
    assert MKL.refusal(block, "cpu", "fp32", cold=True) is None
    assert blas.mkl_multiplies("cpu", torch.float32)
    assert not blas.mkl_multiplies("cpu", torch.bfloat16)
    monkeypatch.setattr("ffncli.kernels.kernel._has_mkl", lambda: False)
    assert MKL.refusal(block, "cpu", "fp32") == "this build of torch has no MKL"
    assert not blas.mkl_multiplies("cpu", torch.float32)


def test_what_is_made_is_kept_as_long_as_the_weights():
    made: list[tuple[int, int]] = []

    def make(x, params):
        made.append((len(x), int(params[0])))
        return len(made)

    kept, one, two = PerWeights(make), (torch.tensor(1),), (torch.tensor(2),)
    x = torch.zeros(3, 1)
    assert [kept.get(x, params) for params in (one, two, one, two)] == [1, 2, 1, 2]
    assert kept.get(x[:2], one) == 3
    assert kept.get(x, one) == 1
    with torch.inference_mode():
        assert kept.get(torch.zeros(3, 1), one) == 4  # torch.compile's graphs tell such an x apart
    assert made == [(3, 1), (3, 2), (2, 1), (3, 1)]
    del one
    gc.collect()
    assert len(kept._made) == 1
    assert kept.get(x, two) == 2
    for count in range(4, 12):
        kept.get(torch.zeros(count, 1), two)
    assert kept.get(x, two) == 13  # the latest eight of each
    assert kept.get(torch.zeros(11, 1), two) == 12


NUMPY = built_in("numpy")
SIXTEEN = [pytest.param(name, DTYPES[name], id=name) for name in ("bf16", "fp16")]


@pytest.mark.parametrize("label", DENSE)
@pytest.mark.parametrize(("name", "dtype"), SIXTEEN)
def test_numpy_in_sixteen_bits_is_the_reference(label, name, dtype):
    block, weights = block_of(DENSE[label], dtype)
    assert NUMPY.refusal(block, "cpu", name) is None
    assert {p.dtype for p in NUMPY.prepare(block, weights)} == {torch.float32}
    check(NUMPY, block, weights, dtype)


def test_matrices_are_stored_turned_and_the_weights_stay():
    block, weights = block_of(FFNSpec(8, 24, "swiglu", bias=True), torch.float32)
    params = dict(zip(parameters(block), NUMPY.prepare(block, weights), strict=True))
    for name, tensor in weights.items():
        assert torch.equal(params[name], tensor.T if tensor.dim() == 2 else tensor)
        assert params[name].is_contiguous()
    assert params["up.weight"].shape == (8, 24)
    assert weights["up.weight"].shape == (24, 8)


def test_numpy_multiplies_and_copies_nothing(monkeypatch):
    block = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    generator = torch.Generator().manual_seed(0)
    params = NUMPY.prepare(block, random_weights(block, generator))
    call, x = NUMPY.build(block, "cpu", torch.float32), torch.randn(5, 8, generator=generator)
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
    call, params = NUMPY.build(block, "cpu", dtype), NUMPY.prepare(block, weights)
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
    assert right(block, weights, x, call(x, params), 24)
    assert torch.get_num_threads() == 2
    with pytest.raises(MemoryError):
        call(x, params)
    assert torch.get_num_threads() == 2
    assert seen == [(1, 2)] * 4


def test_infinities_are_none_of_numpys_business(recwarn):
    block, weights = block_of(FFNSpec(6, 24, "relu"), torch.float32)
    huge = {name: torch.full_like(tensor, 1e30) for name, tensor in weights.items()}
    out = NUMPY.build(block, "cpu", torch.float32)(torch.full((2, 6), 1e30), NUMPY.prepare(block, huge))
    assert torch.isinf(out).all()
    assert not recwarn.list
