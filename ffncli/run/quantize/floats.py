"""Write floats of 16, 8 and 4 bits: plain, with scales (FP8), and microscaled (MXFP8, MXFP4, NVFP4).

Each rule takes the arithmetic of a library in its order and its dtypes, since both decide the last bits. In a block of
zeros, where some of the libraries divide 0 by 0 and write NaN, the codes here are 0.
"""

from functools import cache
from math import log2

import torch
from torch import Tensor

from ffncli.block.formats import Format, float_values
from ffncli.run.quantize.parts import PLAIN, Parts, without_nan

_NVFP4_LARGEST = 448.0 * 6.0  # of E4M3 and of E2M1
_E8M0 = torch.float8_e8m0fnu


def plain(x: Tensor, form: Format) -> Parts:
    """Round to fp16 or bf16; ties to even, and values beyond the largest become infinite."""
    return Parts(x.to(PLAIN[form.element]).view(torch.int16))


def _cast(x: Tensor, form: Format) -> Tensor:
    """Round to the nearest value, ties to even; values beyond the largest become the largest."""
    x = without_nan(x).clamp(form.lowest, form.largest)
    return _nearest_fp4(x) if form.element == "e2m1" else x.to(PLAIN[form.element]).view(torch.uint8)


# --- FP8 --------------------------------------------------------------------------------------------------------------


def fp8(x: Tensor, form: Format) -> Parts:
    """Write a float of 8 bits, scaled so that the largest value of each block becomes the format's largest."""
    if form.rule == "transformers":
        return _fp8_by_transformers(x.float(), form)
    scales = x.abs().amax(-1) / form.largest  # in the dtype of x, in both libraries
    if form.rule == "compressed-tensors":
        scales = torch.where(scales == 0, torch.finfo(x.dtype).eps, scales)
        return Parts(_cast(x / scales.unsqueeze(-1), form), scales)
    scales = (scales.log2().round().exp2() if form.pow2 else scales).float()
    return Parts(_cast(x.float() / scales.unsqueeze(-1), form), scales)


def _fp8_by_transformers(x: Tensor, form: Format) -> Parts:
    """Follow the FP8 of DeepSeek-V3, whose scales are inverted twice; powers of two are rounded up."""
    largest = x.abs().amax(-1)
    factors = torch.where(largest > 0, form.largest / largest, 1.0)
    scales = 1.0 / factors
    if form.pow2:
        powers = scales.clamp(min=torch.finfo(torch.float32).tiny).log2().ceil()
        scales = torch.pow(2.0, powers).to(_E8M0)
        factors = 1.0 / scales.float()
    return Parts(_cast(x * factors.unsqueeze(-1), form), scales)


# --- MXFP8, MXFP4 -----------------------------------------------------------------------------------------------------


def microscaled(x: Tensor, form: Format) -> Parts:
    """Write a float with a power of two per block. The rule says how the power follows from the largest value."""
    x = x.float()
    exponents = _exponents(x.abs().amax(-1), form)
    scales = exponents.to(torch.uint8).view(_E8M0)
    if form.rule == "gguf":
        # where a block's largest value is near 2^-126, the byte may wrap around to 255, which is NaN in E8M0
        codes = _nearest_fp4(without_nan(x / scales.float().unsqueeze(-1)), ties_to_even=False)
        return Parts(torch.where(codes == 8, 0, codes), scales)  # it has one zero
    if form.rule == "rceil":
        factors = torch.where(exponents == 0, 1.0, torch.exp2(127.0 - exponents))
        return Parts(_cast(x * factors.unsqueeze(-1), form), scales)
    divisors = scales.float()
    if form.rule != "compressed-tensors":
        divisors = divisors.clamp(min=torch.finfo(torch.float32).tiny)  # torchao does not divide by 2^-127
    return Parts(_signed_zeros(_cast(x / divisors.unsqueeze(-1), form), x, form), scales)


def _exponents(largest: Tensor, form: Format) -> Tensor:
    """Return E8M0's exponents: that of the largest value, less that of the format's largest.

    It is rounded down (`floor`), up (`ceil`), or after rounding the value to the element's mantissa (`even`) or to one
    bit (compressed-tensors). `rceil` rounds up the quotient of both values.
    """
    if form.rule == "gguf":
        return _exponents_by_gguf(largest)
    if form.rule == "rceil":
        return (largest / form.largest).log2().ceil().clamp(-127, 127) + 127
    mantissa = int(form.element[-1])
    to_next = {"ceil": (1 << 23) - 1, "even": 1 << (22 - mantissa), "compressed-tensors": 1 << 21}.get(form.rule, 0)
    return ((largest.view(torch.int32) + to_next >> 23) - int(log2(form.largest))).clamp(0, 255)


def _exponents_by_gguf(largest: Tensor) -> Tensor:
    """Round the logarithm down, as numpy computes it; the cast to a byte wraps around below 0."""
    import numpy

    with numpy.errstate(divide="ignore"):
        powers = torch.from_numpy(numpy.floor(numpy.log2(largest.cpu().numpy()))).to(largest.device)
    return torch.where(largest > 0, powers - 2 + 127, 0.0).int() & 255


def _signed_zeros(codes: Tensor, x: Tensor, form: Format) -> Tensor:
    """Return the codes with -0.0 written as 0, where compressed-tensors does: in E2M1."""
    if form.rule != "compressed-tensors" or form.element != "e2m1":
        return codes
    return torch.where((codes == 8) & (x == 0), 0, codes)


# --- NVFP4 ------------------------------------------------------------------------------------------------------------


def nvfp4(x: Tensor, form: Format) -> Parts:
    """Write E2M1 with an E4M3 scale per block and a float32 scale of the whole tensor: torchao multiplies by it,
    compressed-tensors divides by it."""
    if form.rule == "torchao":
        return _nvfp4_by_torchao(x.float(), form)
    largest = x.abs().amax(-1)
    top = largest.amax().clamp(min=torch.finfo(x.dtype).tiny)
    whole = (_NVFP4_LARGEST / top).nan_to_num(posinf=1.0).float().reshape(1)
    scales = (whole * (largest / 6.0)).clamp(max=448.0).to(torch.float8_e4m3fn)
    scales = torch.where(scales.float() == 0, 0.125, scales.float()).to(torch.float8_e4m3fn)
    codes = _cast(x / (scales.float() / whole).unsqueeze(-1), form)
    return Parts(_signed_zeros(codes, x, form), scales, tensor_scale=whole)


def _nvfp4_by_torchao(x: Tensor, form: Format) -> Parts:
    largest = x.abs().amax(-1)
    whole = (largest.amax() / _NVFP4_LARGEST).reshape(1)
    smallest = torch.finfo(torch.float8_e4m3fn).tiny  # 2^-6: no scale is subnormal
    scales = without_nan(largest / 6.0 / whole).clamp(smallest, 448.0).to(torch.float8_e4m3fn)
    return Parts(_cast(x * (1.0 / whole / scales.float()).unsqueeze(-1), form), scales, tensor_scale=whole)


# --- E2M1 -------------------------------------------------------------------------------------------------------------


def _nearest_fp4(x: Tensor, ties_to_even: bool = True) -> Tensor:
    """Return the codes (uint8) of the nearest values of E2M1; otherwise ties go to the smaller magnitude."""
    codes = torch.bucketize(x.abs().float(), _middles(ties_to_even, x.device), out_int32=True).to(torch.uint8)
    return codes | (x.signbit().to(torch.uint8) << 3)


@cache
def _middles(ties_to_even: bool, device: torch.device) -> Tensor:
    """Return the middles between E2M1's values; one that belongs to the even code above it is moved just below."""
    positive = torch.tensor(float_values(2, 1)[:8], device=device)
    middles = (positive[1:] + positive[:-1]) / 2
    upwards = torch.arange(7, device=device) % 2 == 1
    return torch.where(upwards & ties_to_even, torch.nextafter(middles, torch.zeros_like(middles)), middles)
