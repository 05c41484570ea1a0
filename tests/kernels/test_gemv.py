"""gemv: one token by products that are sums, more by eager's function; by aot_eager, without the compiler's seconds."""

import pytest
import torch

from ffncli.block.recipe import FFNSpec, steps
from ffncli.block.steps import block_inputs
from ffncli.kernels import built_in
from ffncli.kernels.compiled import recompiles
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.reference import in_float64
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import tolerance_for
from tests.kernels.test_kernels import DENSE
from tests.oracles.modules import relative_error


@pytest.fixture(autouse=True)
def _without_cpp(monkeypatch):
    right = torch.compile
    options = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    monkeypatch.setattr(torch, "compile", lambda call, **given: right(call, **options))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", DENSE)
def test_it_is_the_reference(label, dtype):
    block, kernel = kernel_steps(steps(DENSE[label])), built_in("gemv")
    weights = random_weights(block, torch.Generator().manual_seed(0), dtype)
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for tokens in (1, 5):
        x = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(tokens)).to(dtype)
        with torch.no_grad():
            out = call(x, params)
        reference = in_float64(block, weights, {block_inputs(block)[0]: x})[0]
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        assert relative_error(out, reference) < tolerance_for(dtype, 24)


def test_one_graph_for_one_token_and_none_for_more():
    block, kernel = kernel_steps(steps(FFNSpec(8, 24, "swiglu"))), built_in("gemv")
    weights = random_weights(block, torch.Generator().manual_seed(0), torch.float32)
    call, before = kernel.build(block, "cpu", torch.float32), recompiles()
    for tokens in (1, 7, 1, 3, 1):
        call(torch.randn(tokens, 8), tuple(weights.values()))
    assert recompiles() == before + 1


def test_what_it_is_for():
    kernel, block = built_in("gemv"), kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    assert (kernel.compiles, kernel.most_tokens, kernel.trains) == (True, 1, False)
    assert kernel.refusal(block, "cpu", "fp32") is None  # it computes any number
    assert kernel.refusal(block, "cpu", "fp32", tokens=1) is None
    assert kernel.refusal(block, "cpu", "fp32", tokens=2) == "is for 1 token at most"
    assert kernel.refusal(block, "cuda", "fp32", tokens=1).startswith("runs on a CPU only")
