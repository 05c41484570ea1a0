"""fp8: rows rounded to e4m3, the error that this makes, the bound that is declared for it, and where it cannot run."""

from __future__ import annotations

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
from ffncli.kernels.fewer_bits.fp8 import quantized
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.execute import run
from ffncli.run.engine.weights import random_weights

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
        (8, 6): "needs a GPU of compute capability 8.9, this one has 8.6", (8, 9): None, (12, 0): None,
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, c=capability: c)
        assert kernel.refusal(block, "cuda:0", "bf16") == reason
        assert kernel.refusal(block, "cpu", "bf16") is None
