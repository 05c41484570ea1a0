"""fp8, int8 and int4: products against float64 of the rounded weights, the rounding, its bound, what cannot run."""

import random

import pytest
import torch

from ffncli.bench.records import Case
from ffncli.bench.referee.problem import Problem
from ffncli.bench.referee.rulings import refereed
from ffncli.bench.timing import correctness as correct
from ffncli.bench.timing.placed_kernel import PlacedKernel, build_kernel
from ffncli.bench.verdict import WrongResult
from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.kernels import built_in
from ffncli.kernels.fewer_bits import GROUP, quantized, to_int4, to_int8
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from ffncli.run.engine.reference import in_float64
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.gap import declared_tolerance, tolerance_for
from tests.oracles.modules import relative_error

SPECS = {
    "gated": FFNSpec(64, 96, "swiglu"),
    "biases": FFNSpec(64, 96, "geglu", bias=True),
    "plain": FFNSpec(64, 96, "gelu"),
    "norm inside": FFNSpec(64, 96, "relu2", gated=True, norm="rmsnorm", sub_norm=True),
}


def by_hand(x):
    """Rows scaled so that their largest number is 448, rounded to 3 bits after the point, 2⁻⁹ at least; float64."""
    scale = (x.float().abs().amax(-1, keepdim=True) / 448).double()
    scaled = (x.float() / scale.float()).double()
    step = 2.0 ** (scaled.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return (scaled / step).round() * step * scale


def test_rows_are_rounded_to_e4m3():
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1, 7, 1e4, 0])[:, None]
    x[:, ::7] *= 1e-4  # below the smallest normal number
    eight, scale = quantized(x)
    assert eight.dtype == torch.float8_e4m3fn
    assert torch.equal(eight.double() * scale.double(), by_hand(x).nan_to_num())
    tiny = torch.full((1, 16), 1e-45)
    assert torch.isfinite(quantized(tiny)[0].float()).all()


@pytest.mark.parametrize("label", SPECS)
def test_its_error_is_that_of_8_bits(label, monkeypatch):
    """Larger than bf16's, below the declared bound, and the same as where torch.linear rounds both factors by hand."""
    block, kernel = kernel_steps(steps(SPECS[label])), built_in("fp8")
    generator = torch.Generator().manual_seed(0)
    weights = {n: t.float() for n, t in random_weights(block, generator, torch.float64).items()}
    x = torch.randn(17, 64, generator=generator)
    out = kernel.build(block, "cpu", x.dtype)(x, kernel.prepare(block, weights)).double()
    wide = {n: t.double() for n, t in weights.items()}
    expected = run(block, wide, {block_inputs(block)[0]: x.double()})
    linear = torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w, b=None: linear(by_hand(x), by_hand(w), b))
    emulated = run(block, wide, {block_inputs(block)[0]: x.double()})
    error = (out - expected).norm() / expected.norm()
    assert 0.02 < error < 0.125
    assert (out - emulated).norm() / expected.norm() < 0.1 * error


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_it_is_right_as_it_is_declared_and_wrong_if_it_were_not(dtype):
    case, kernel = Case("s", "s", SPECS["gated"], 16, dtype=dtype), built_in("fp8")
    for computes in (kernel.computes, ""):
        problem = refereed(Problem.of(case, 7))
        problem.rules.declare("fp8", computes)
        placed = PlacedKernel("fp8", build_kernel(kernel, problem), problem, random.Random(0))
        placed.place(2)
        if computes:
            assert 0.02 < correct.before(placed, problem).rel < 0.125
        else:
            with pytest.raises(WrongResult):
                correct.before(placed, problem)


def test_what_is_refused(monkeypatch):
    kernel = built_in("fp8")
    assert kernel.computes == "fp8-rowwise"
    odd = kernel_steps(steps(FFNSpec(64, 1023, "swiglu")))
    assert kernel.refuses(odd) == "computes widths that are multiples of 16 only, not 1023"
    assert kernel.refuses(kernel_steps(steps(FFNSpec(64, 96, "swiglu", moe=MoE(4, 2))))) == "cannot compute experts"
    block = kernel_steps(steps(SPECS["plain"]))
    assert kernel.refusal(block, "cpu", "fp64", "forward+backward") == (
        "computes in fp32, bf16 and fp16 only, not in fp64; computes forward only"
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in {
        (8, 6): "needs a GPU of compute capability 8.9, but this one has 8.6", (8, 9): None, (12, 0): None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert kernel.refusal(block, "cuda:0", "bf16") == reason
        assert kernel.refusal(block, "cpu", "bf16") is None


BLOCKS = {
    "gated": FFNSpec(64, 160, "swiglu"),
    "plain, bias": FFNSpec(64, 160, "gelu"),
    "gated, bias": FFNSpec(32, 96, "geglu", bias=True),
    "learned": FFNSpec(32, 96, "xielu"),
    "norm inside": FFNSpec(32, 96, "relu2", gated=True, norm="rmsnorm", sub_norm=True),
}


def rounded(weight: torch.Tensor, bits: str) -> torch.Tensor:
    """The weight as the kernel has it, in float64, by the definitions of its two roundings."""
    if bits == "int8":
        scale = (weight.float().abs().amax(1) / 127).to(weight.dtype)
        return to_int8(weight)[0].double() * scale.double()[:, None]
    groups = weight.float().reshape(len(weight), -1, GROUP)
    scale = (groups.amax(-1) - groups.amin(-1)) / 15
    integers = ((groups - groups.amin(-1)[..., None]) / scale[..., None]).round()
    zero = (groups.amin(-1) + 8 * scale).to(weight.dtype).double()
    return ((integers.double() - 8) * scale.to(weight.dtype).double()[..., None] + zero[..., None]).flatten(1)


@pytest.mark.parametrize("bits", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("label", BLOCKS)
def test_its_products_are_those_of_the_rounded_weights(bits, dtype, label):
    block, kernel = kernel_steps(steps(BLOCKS[label])), built_in(bits)
    weights = random_weights(block, torch.Generator().manual_seed(0), dtype)
    coarse = {n: rounded(t, bits) if t.dim() == 2 else t.double() for n, t in weights.items()}
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for tokens in (1, 9):
        x = torch.randn(tokens, BLOCKS[label].d_model, generator=torch.Generator().manual_seed(1)).to(dtype)
        exact = in_float64(block, weights, {block_inputs(block)[0]: x})[0]
        near = in_float64(block, coarse, {block_inputs(block)[0]: x.double()})[0]
        out = call(x, params)
        assert (out.shape, out.dtype) == (x.shape, x.dtype)
        assert relative_error(out, near) < tolerance_for(dtype, 160)
        largest, rms = declared_tolerance(kernel.computes)
        assert relative_error(out, exact) < largest
        assert 1e-4 < float((out.double() - exact).norm() / exact.norm()) < rms  # it is coarse, as it declares


def test_rounding_is_within_half_a_step():
    weight = torch.randn(48, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0.0
    step = weight.abs().amax(1, keepdim=True) / 127
    assert bool(((rounded(weight, "int8") - weight).abs() <= 0.501 * step + 1e-12).all())
    groups = weight.reshape(48, -1, GROUP)
    step = ((groups.amax(-1) - groups.amin(-1)) / 15).repeat_interleave(GROUP, 1)
    kept = rounded(weight[1:], "int4")
    assert bool(((kept - weight[1:]).abs() <= 0.501 * step[1:] + 1e-12).all())
    integers, scales = to_int8(weight)
    assert int(integers[0].abs().max()) == 0
    assert scales.isfinite().all()
    assert to_int4(weight)[1].isfinite().all()


def test_their_bytes():
    weight = torch.randn(64, 128).bfloat16()
    assert [sum(t.nbytes for t in quantize(weight)) for quantize in (to_int8, to_int4)] == [
        64 * 128 + 64 * 2,
        64 * 128 // 2 + 64 * 128 // GROUP * 2 * 2,
    ]


def test_what_they_refuse():
    for name in ("int8", "int4"):
        kernel = built_in(name)
        assert kernel.computes == f"{name}-weights"
        odd = kernel_steps(steps(FFNSpec(64, 1023, "swiglu")))
        assert kernel.refusal(odd, "cpu", "bf16") == ("computes widths that are multiples of 32 only, not 1023")
        experts = kernel_steps(steps(FFNSpec(64, 64, "swiglu", moe=MoE(4, 2))))
        assert kernel.refusal(experts, "cpu", "bf16") == "cannot compute experts"
        plain = kernel_steps(steps(FFNSpec(64, 64, "gelu")))
        assert kernel.refusal(plain, "cpu", "fp64") == "computes in bf16, fp16 and fp32 only, not in fp64"
