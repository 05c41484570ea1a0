"""onednn and onednn_packed against float64: every kind of dense block, widths that fill no vector, views, copies."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ffncli.bench.timing.placement import nbytes, placeable
from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import block_inputs
from ffncli.kernels import built_in, onednn
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.reference import in_float64
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.tolerance import tolerance_for
from tests.kernels.test_kernels import DENSE, GATED
from tests.oracles.modules import relative_error

NAMES = ("onednn", "onednn_packed")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
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
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for count in (9, 1, 9):
        x = tokens(count, 6, dtype)
        before = x.clone()
        assert right(block, weights, x, call(x, params), 24)
        assert torch.equal(x, before)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "activation", ["relu", "sigmoid", "silu", "gelu", "gelu_tanh", "leaky_relu", "identity", "mish"]
)
def test_widths_that_fill_no_vector_and_a_strided_x(name, activation):
    """mish is one of those that oneDNN does not compute while it writes."""
    kernel, (block, weights) = (
        built_in(name),
        block_of(FFNSpec(129, 1023, activation, gated=True, bias=True), torch.float32),
    )
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


def test_other_copies_are_other_outputs():
    kernel, (block, weights) = built_in("onednn_packed"), block_of(GATED["bias"], torch.float32)
    other = {name: -tensor for name, tensor in weights.items()}
    call, x = kernel.build(block, "cpu", torch.float32), tokens(4, 6, torch.float32)
    params = [kernel.prepare(block, one) for one in (weights, other)]
    for one, copy in zip((weights, other, weights), (params[0], params[1], params[0]), strict=True):
        assert right(block, one, x, call(x, copy), 24)


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
