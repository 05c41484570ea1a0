"""torch.compile: needs a compiler, and what it did can be seen. Without the compiler's own seconds."""

import sys
from types import SimpleNamespace

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.errors import FFNError
from ffncli.kernels import built_in, eager
from ffncli.kernels.compiled import _FREEZING, CompileCache, cache, recompiles
from ffncli.kernels.kernel import cxx, kernel_steps
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights
from tests.kernels.test_cpu_libraries import block_of, right, tokens
from tests.kernels.test_kernels import DENSE, GATED

BLOCK = kernel_steps(steps(FFNSpec(8, 24, "swiglu")))


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A PATH on which there is what a test puts there."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    return tmp_path


def program(path, name: str) -> str:
    (path / name).write_text("#!/bin/sh\n")
    (path / name).chmod(0o755)
    return str(path / name)


def test_a_compiler_is_looked_for(path, monkeypatch):
    kernel = built_in("compiled")
    assert cxx() is None
    assert kernel.missing("cpu") == "no C++ compiler: install g++, or name one in CXX"
    assert kernel.refusal(BLOCK, "cpu", "fp32").startswith("no C++ compiler")
    clang = program(path, "clang++")
    assert (cxx(), kernel.missing("cpu")) == (clang, None)
    gcc = program(path, "g++")
    assert cxx() == gcc
    monkeypatch.setenv("CXX", "mine++")
    assert cxx() is None  # whoever names one wants that one
    own = program(path, "mine++")
    assert cxx() == own


def test_on_a_gpu_it_is_triton_that_is_needed(path, monkeypatch):
    monkeypatch.setattr("ffncli.kernels.kernel.find_spec", lambda name: None)
    assert built_in("compiled").missing("cuda:0") == "needs the module triton"
    monkeypatch.setattr("ffncli.kernels.kernel.find_spec", lambda name: name if name == "triton" else None)
    assert built_in("compiled").missing("cuda:0") is None


def test_what_it_can_do():
    kernel = built_in("compiled")
    assert (kernel.compiles, kernel.trains, kernel.dtypes) == (True, True, None)
    experts = kernel_steps(steps(FFNSpec(8, 24, "swiglu", moe=MoE(4, 2))))
    assert kernel.refuses(experts) == "cannot compute experts"
    assert [name for name in ("eager", "module", "numpy", "inplace") if built_in(name).compiles] == []


def test_tuning_is_for_a_gpu():
    assert built_in("max_autotune").missing("cpu") == "runs on a GPU only"


@pytest.mark.parametrize(("name", "mode"), [("compiled", None), ("max_autotune", "max-autotune-no-cudagraphs")])
def test_every_build_asks_for_one_graph_of_one_shape(monkeypatch, name, mode):
    said: list[object] = []
    monkeypatch.setattr(torch, "compile", lambda call, **options: said.append(options) or call)
    call = built_in(name).build(BLOCK, "cpu", torch.float64)
    assert said == [{"fullgraph": True, "dynamic": False, "mode": mode}]
    assert torch._inductor.config.cpp.cxx[1] == cxx()
    weights = random_weights(BLOCK, torch.Generator().manual_seed(0), torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = run(BLOCK, weights, {block_inputs(BLOCK)[0]: x})
    assert torch.allclose(call(x, tuple(weights.values())), expected, rtol=1e-13)


def test_many_builds_have_graphs_side_by_side(monkeypatch):
    """More than torch keeps for one function's code (8), each called again after all were built: none is made twice."""
    right = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: right(call, backend="aot_eager", fullgraph=True))
    blocks = [kernel_steps(steps(FFNSpec(4, 8 + n, "swiglu"))) for n in range(9)]
    weights = [random_weights(block, torch.Generator().manual_seed(0), torch.float64) for block in blocks]
    calls = [built_in("compiled").build(block, "cpu", torch.float64) for block in blocks]
    x, before = torch.randn(3, 4, dtype=torch.float64), recompiles()
    for _ in range(2):
        for block, call, params in zip(blocks, calls, weights, strict=True):
            expected = run(block, params, {block_inputs(block)[0]: x})
            assert torch.allclose(call(x, tuple(params.values())), expected, rtol=1e-12)
    assert recompiles() == before + 9


def test_a_graph_break_is_one_line(monkeypatch):
    def build(steps, device, dtype):
        def breaks(x, params):
            torch._dynamo.graph_break()
            return x

        return breaks

    monkeypatch.setattr(eager, "build", build)
    call = built_in("compiled").build(BLOCK, "cpu", torch.float32)
    with pytest.raises(FFNError) as caught:
        call(torch.zeros(2, 8), ())
    assert str(caught.value).startswith("torch.compile: ")
    assert len(str(caught.value).splitlines()) == 1


def test_counters(monkeypatch):
    counters = {"stats": {"unique_graphs": 3}, "inductor": {"fxgraph_cache_hit": 2, "fxgraph_cache_miss": 1}}
    monkeypatch.setitem(sys.modules, "torch._dynamo.utils", SimpleNamespace(counters=counters))
    assert (recompiles(), cache()) == (3, CompileCache(2, 1))
    before = cache()
    assert before.since(before) == ""
    counters["inductor"]["fxgraph_cache_hit"] = 3
    assert cache().since(before) == "cached"
    counters["inductor"]["fxgraph_cache_miss"] = 2
    assert cache().since(before) == "cold"
    monkeypatch.delitem(sys.modules, "torch._dynamo.utils")
    assert (recompiles(), cache()) == (0, CompileCache(0, 0))


def test_compiled_is_the_reference_and_its_gradients(monkeypatch):
    """By aot_eager, which is all of torch.compile but the C++; another shape shows in the counter."""
    right = torch.compile
    monkeypatch.setattr(torch, "compile", lambda call, **options: right(call, backend="aot_eager", **options))
    kernel, before = built_in("compiled"), recompiles()
    weights = random_weights(BLOCK, torch.Generator().manual_seed(0), torch.float64)
    call = kernel.build(BLOCK, "cpu", torch.float64)
    x, g = torch.randn(2, 5, 8, dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (x, *weights.values())]
    found = call(leaves[0], tuple(leaves[1:]))
    expected = run(BLOCK, dict(zip(weights, leaves[1:], strict=True)), {block_inputs(BLOCK)[0]: leaves[0]})
    assert torch.allclose(found, expected, rtol=1e-13)
    pairs = zip(torch.autograd.grad(found, leaves, g), torch.autograd.grad(expected, leaves, g), strict=True)
    assert all(torch.allclose(a, b, rtol=1e-12) for a, b in pairs)
    one = recompiles()
    assert one > before
    call(leaves[0], tuple(leaves[1:]))
    assert recompiles() == one
    call(leaves[0][:3], tuple(leaves[1:]))
    assert recompiles() == one + 1


@pytest.mark.parametrize(
    ("dtype", "label", "tuned", "cases"),
    [
        (torch.float32, "gated", False, [(9, 1), (9, -1)]),
        (torch.float32, "gated", True, [(1, 1)]),
        (torch.bfloat16, "bias", True, [(1, 1)]),
    ],
)
def test_frozen_weights_are_constants_of_the_graph(dtype, label, tuned, cases, monkeypatch):
    """Right for several token counts, sets of weights and modes; what was compiled once is not compiled again. Most of
    the time goes into tuning, which does not depend on these."""
    import torch._inductor.freezing as freezing

    frozen, freeze = [], freezing.freeze
    monkeypatch.setattr(freezing, "freeze", lambda *given: frozen.append(given) or freeze(*given))
    monkeypatch.setitem(_FREEZING, "max_autotune", tuned)
    kernel, (block, weights) = built_in("frozen"), block_of(GATED[label], dtype)
    call, sets = kernel.build(block, "cpu", dtype), {1: weights, -1: {name: -one for name, one in weights.items()}}
    params, inputs = {}, {}
    for count, sign in cases:
        params.setdefault(sign, kernel.prepare(block, sets[sign]))
        x = inputs.setdefault(count, tokens(count, 6, dtype))
        assert right(block, sets[sign], x, call(x, params[sign]), 24)
    before = recompiles()
    for count, sign in cases:
        with torch.inference_mode():
            out = call(inputs[count], params[sign])
        assert right(block, sets[sign], inputs[count], out, 24)
    assert recompiles() == before
    assert len(frozen) == len(cases)


def test_frozen_weights_cannot_be_cold():
    block, _ = block_of(GATED["gated"], torch.float32)
    refusal = built_in("frozen").refusal(block, "cpu", "fp32", "forward", 1, True)
    assert (
        refusal == "its weights are part of compiled code, so copies of them cannot keep them cold: use --cache flush"
    )
    assert "runs on a CPU only" in (built_in("frozen").refusal(block, "cuda", "fp32") or "")


# --- gemv -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def without_cpp(monkeypatch):
    right = torch.compile
    options = {"backend": "aot_eager", "fullgraph": True, "dynamic": False}
    monkeypatch.setattr(torch, "compile", lambda call, **given: right(call, **options))


@pytest.mark.usefixtures("without_cpp")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("label", DENSE)
def test_one_token_is_the_reference(label, dtype):
    block, kernel = kernel_steps(steps(DENSE[label])), built_in("gemv")
    weights = random_weights(block, torch.Generator().manual_seed(0), dtype)
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for count in (1, 5):
        x = tokens(count, 6, dtype)
        with torch.no_grad():
            assert right(block, weights, x, call(x, params), 24)


@pytest.mark.usefixtures("without_cpp")
def test_one_graph_for_one_token_and_none_for_more():
    block, kernel = kernel_steps(steps(FFNSpec(8, 24, "swiglu"))), built_in("gemv")
    weights = random_weights(block, torch.Generator().manual_seed(0), torch.float32)
    call, before = kernel.build(block, "cpu", torch.float32), recompiles()
    for count in (1, 7, 1, 3, 1):
        call(torch.randn(count, 8), tuple(weights.values()))
    assert recompiles() == before + 1


def test_what_gemv_is_for():
    kernel, block = built_in("gemv"), kernel_steps(steps(FFNSpec(8, 24, "swiglu")))
    assert (kernel.compiles, kernel.most_tokens, kernel.trains) == (True, 1, False)
    assert kernel.refusal(block, "cpu", "fp32") is None  # it computes any number
    assert kernel.refusal(block, "cpu", "fp32", tokens=1) is None
    assert kernel.refusal(block, "cpu", "fp32", tokens=2) == "is meant for at most 1 token"
    assert kernel.refusal(block, "cuda", "fp32", tokens=1).startswith("runs on a CPU only")
