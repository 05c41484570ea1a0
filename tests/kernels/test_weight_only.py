"""int8 and int4: the products against float64 of the rounded weights, the rounding against its closed form."""

from __future__ import annotations

import pytest
import torch

from ffncli.block.recipe import FFNSpec, MoE, steps
from ffncli.block.steps import block_inputs
from ffncli.kernels import built_in
from ffncli.kernels.fewer_bits.weight_only import GROUP, to_int4, to_int8
from ffncli.kernels.kernel import kernel_steps
from ffncli.run.engine.reference import in_float64
from ffncli.run.engine.weights import random_weights
from ffncli.run.measure.tolerance import declared_tolerance, tolerance_for
from tests.oracles.modules import relative_error

SPECS = {
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
@pytest.mark.parametrize("label", SPECS)
def test_its_products_are_those_of_the_rounded_weights(bits, dtype, label):
    block, kernel = kernel_steps(steps(SPECS[label])), built_in(bits)
    weights = random_weights(block, torch.Generator().manual_seed(0), dtype)
    coarse = {n: rounded(t, bits) if t.dim() == 2 else t.double() for n, t in weights.items()}
    call, params = kernel.build(block, "cpu", dtype), kernel.prepare(block, weights)
    for tokens in (1, 9):
        x = torch.randn(tokens, SPECS[label].d_model, generator=torch.Generator().manual_seed(1)).to(dtype)
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
