"""grouped and batched: any number of experts, empty ones, any width, against float64; nothing that a GPU waits for."""

from importlib import import_module

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode

from ffncli.block.activations import hard_limits
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs, parameters
from ffncli.kernels import built_in, experts
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from tests.kernels.test_kernels import MIXED, drawn, gradients
from tests.oracles.modules import relative_error

OSS = {"activation": "quick_gelu", "gated": True, "bias": True, "limits": hard_limits(0.4, 1.0)}
SPECS = {
    "8 of 8": FFNSpec(6, 9, "swiglu", moe=MoE(8, 8)),
    "1 of 32": FFNSpec(6, 9, "gelu", bias=True, moe=MoE(32, 1)),
    "8 of 128": FFNSpec(6, 9, "swiglu", moe=MoE(128, 8, 1)),
    "gpt-oss": FFNSpec(7, 5, **OSS, moe=MoE(32, 4, order="choose_first", renormalise=False, router_bias=True)),
    "weighed input": FFNSpec(6, 9, "swiglu", bias=True, moe=MoE(16, 2, weigh="input")),
}
TOGETHER = ["grouped", "batched"]


def single(spec, tokens=9, seed=0):
    """(steps, weights, x) in float32; their float64 versions are the same numbers."""
    block, generator = kernel_steps(steps(spec)), torch.Generator().manual_seed(seed)
    weights = {name: tensor.float() for name, tensor in drawn(block, generator).items()}
    return block, weights, torch.randn(tokens, spec.d_model, generator=generator)


def reference(block, weights, x):
    return run(block, {n: t.double() for n, t in weights.items()}, {block_inputs(block)[0]: x.double()})


@pytest.mark.parametrize("device", ["cpu", "cuda"])  # on a GPU it adds in another way, which a CPU can do too
@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize("label", SPECS)
def test_any_number_of_experts(name, device, label):
    block, weights, x = single(SPECS[label])
    kernel = built_in(name)
    call, params = kernel.build(block, device, x.dtype), kernel.prepare(block, weights)
    for tokens in (9, 1):
        out = call(x[:tokens], params)
        assert relative_error(out.double(), reference(block, weights, x[:tokens])) < 1e-6


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("label", SPECS)
def test_gradients_of_any_number_of_experts(label, device):
    """Those of experts without tokens are 0."""
    block, weights, x = single(SPECS[label])
    g, kernel = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)), built_in("grouped")

    def compute(x, w):
        return kernel.build(block, device, x.dtype)(x, kernel.prepare(block, w))

    computed = gradients(compute, weights, x, g)
    wide = {n: t.double() for n, t in weights.items()}
    expected = gradients(lambda x, w: run(block, w, {block_inputs(block)[0]: x}), wide, x.double(), g.double())
    least = 0.01 * max(b.abs().max() for b in expected)  # with one expert the router's are 0, but for rounding
    for of, a, b in zip(["x", *weights], computed, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * max(b.abs().max(), least), of


@pytest.mark.parametrize("name", TOGETHER)
def test_all_tokens_on_one_expert(name):
    spec = FFNSpec(6, 9, "swiglu", moe=MoE(16, 1, router_bias=True, order="choose_first"))
    for expert in (0, 7, 15):
        block, weights, x = single(spec)
        weights["router.bias"] = torch.zeros(16).index_fill(0, torch.tensor([expert]), 100.0)
        kernel = built_in(name)
        out = kernel.build(block, "cpu", x.dtype)(x, kernel.prepare(block, weights))
        assert relative_error(out.double(), reference(block, weights, x)) < 1e-6


@pytest.mark.parametrize("name", TOGETHER)
@pytest.mark.parametrize(("d_model", "d_ff"), [(1023, 16), (16, 1023), (1, 1)])
def test_odd_widths_in_16_bits(name, d_model, d_ff):
    """torch refuses strides that are no multiples of 16 bytes."""
    block, weights, x = single(FFNSpec(d_model, d_ff, "swiglu", moe=MoE(4, 2, score_dtype="input")), 5)
    weights = {n: 0.2 * t for n, t in weights.items()}
    narrow = {n: t.bfloat16() for n, t in weights.items()}
    narrow["router.weight"] = torch.arange(4)[:, None].expand(4, d_model).bfloat16()  # all scores differ by far
    kernel = built_in(name)
    out = kernel.build(block, "cpu", torch.bfloat16)(x.bfloat16(), kernel.prepare(block, narrow))
    assert out.shape == x.shape
    assert relative_error(out.double(), reference(block, narrow, x.bfloat16())) < 0.03


def test_batched_copies_so_many_bytes_at_a_time(monkeypatch):
    block, weights, x = single(SPECS["weighed input"])
    kernel = built_in("batched")
    call, params = kernel.build(block, "cpu", x.dtype), kernel.prepare(block, weights)
    whole, most = call(x, params), []
    monkeypatch.setattr(experts, "MOST_BYTES", 3 * 2 * params[0][0].nbytes)  # 3 tokens of 2 experts
    bmm = torch.bmm
    monkeypatch.setattr(torch, "bmm", lambda a, b: most.append(len(a)) or bmm(a, b))
    assert torch.equal(call(x, params), whole)
    assert set(most) == {6}


@pytest.mark.parametrize("name", ["eager", *TOGETHER])
@pytest.mark.parametrize("label", MIXED)
def test_what_reads_the_routing_keeps_a_gpu_waiting(name, label):
    """Tensors without numbers: whatever reads one raises. Without such reads a mixture can be a CUDA graph."""
    block, kernel = kernel_steps(steps(MIXED[label])), built_in(name)
    with FakeTensorMode():
        sizes = {n: [axis.size for axis in axes] for n, axes in parameters(block).items()}
        weights = {n: torch.randn(size, dtype=torch.bfloat16) for n, size in sizes.items()}
        call, params = kernel.build(block, "cuda", torch.bfloat16), kernel.prepare(block, weights)
        x = torch.randn(9, 6, dtype=torch.bfloat16)
        if name != "eager":
            assert call(x, params).shape == x.shape
            return
        with pytest.raises((DataDependentOutputException, DynamicOutputShapeException)):
            call(x, params)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_transformers_mixture_as_a_kernel(implementation):
    """What `make bench-grouped` compares with; a block that Qwen3-MoE is not is refused."""
    kernel = getattr(import_module("benchmarks.transformers_experts"), implementation)
    block, weights, x = single(FFNSpec(8, 16, "swiglu", moe=MoE(8, 2)))
    assert kernel.refuses(block) is None
    out = kernel.build(block, "cpu", x.dtype)(x, kernel.prepare(block, weights))
    assert relative_error(out.double(), reference(block, weights, x)) < 1e-6
    for label in set(MIXED) - {"mixtral"}:
        assert kernel.refuses(kernel_steps(steps(MIXED[label]))) == "is not Qwen3-MoE's", label


def test_what_is_refused():
    dense = kernel_steps(steps(FFNSpec(6, 24, "swiglu")))
    own = kernel_steps(steps(FFNSpec(6, 24, "swiglu", sub_norm=True, moe=MoE(4, 2))))
    mixed = kernel_steps(steps(MIXED["mixtral"]))
    for name in TOGETHER:
        assert built_in(name).refuses(dense) == "a dense block has no experts"
        assert built_in(name).refuses(own) == "cannot compute experts that each have a sub_norm.weight"
    assert built_in("grouped").refusal(mixed, "cpu", "fp64") == "computes in fp32, bf16 and fp16 only, not in fp64"
    assert built_in("batched").refusal(mixed, "cpu", "fp32", "forward+backward") == "computes forward only"
