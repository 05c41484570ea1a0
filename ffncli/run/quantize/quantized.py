"""Quantize a tensor to a format: what every format shares. The rules of each are in the files next to this one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ffncli.block.formats import Format, float_values, format_of
from ffncli.errors import FFNError, shown
from ffncli.run.quantize import floats, ggml, integers
from ffncli.run.quantize.blocks import Blocks
from ffncli.run.quantize.parts import PLAIN, Parts, without_nan
from ffncli.system.notebook import Shown


@dataclass(frozen=True)
class Quantized(Shown):
    """A quantized tensor. `codes` has the tensor's shape: bit patterns of floats (uint8, int16), or the integers that
    the format stores.

    `scales` has one scale per block, [*blocks.counts], in the dtype that the format stores (None: the format has none);
    so have `zeros`, the integers that stand for 0, and `minimums`, which are added to the scaled codes. NVFP4's
    `tensor_scale` [1] holds for all blocks. `blocks.at(index)` is the position in these of the block of a value.
    """

    format: Format
    blocks: Blocks
    codes: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    minimums: Tensor | None = None
    tensor_scale: Tensor | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.blocks.shape

    @property
    def factors(self) -> Tensor | None:
        """The number that multiplies the values of each block, float32 [*blocks.counts]: the scale, in NVFP4 combined
        with the tensor's."""
        if self.scales is None:
            return None
        scales, whole = without_nan(self.scales.float()), self.tensor_scale  # NaN: gguf-py's, of blocks of codes 0
        if whole is None:
            return scales
        return scales * whole if self.format.rule == "torchao" else scales / whole

    @property
    def bits(self) -> int:
        """Stored bits, including scales, zeros and minimums."""
        codes = self.codes.numel() + (0 if self.zeros is None else self.zeros.numel())
        others = sum(8 * t.nbytes for t in (self.scales, self.minimums, self.tensor_scale) if t is not None)
        return round(codes * self.format.bits) + others

    @property
    def bits_per_weight(self) -> float:
        """Stored bits per value."""
        return self.bits / self.codes.numel()

    def values(self) -> Tensor:
        """Return the value of each code before scaling, float32, in the tensor's shape."""
        element = self.format.element
        if element == "e2m1":
            return _fp4(self.codes.device)[self.codes.int()]
        if element in PLAIN:
            return self.codes.view(PLAIN[element]).float()
        return self.codes.float() - self.format.zero

    def dequantize(self) -> Tensor:
        """Return the tensor that the codes and scales stand for, float32."""
        values, factors = self.values(), self.factors
        if factors is None:
            return values
        scaled = self.blocks.split(values)
        if self.zeros is not None:
            scaled = scaled - self.zeros.unsqueeze(-1)
        scaled = scaled * factors.unsqueeze(-1)
        return self.blocks.join(scaled if self.minimums is None else scaled + self.minimums.float().unsqueeze(-1))


@torch.no_grad()
def quantize(tensor: Tensor, to: str | Format) -> Quantized:
    """Quantize a tensor [..., columns] to a format, with the codes and scales of the format's own library on a CPU.

    `to` is a name such as `nvfp4`, `fp8:block128` or `int4:g64:asymmetric`. Blocks lie along the last axis. float64 is
    rounded to float32 first. Raises FFNError for an unknown name, a width that is not a whole number of blocks, and
    values that are NaN or infinite.

    >>> import ffncli, torch
    >>> quantized = ffncli.quantize(torch.tensor([[0.0, 1.0, -2.0, 6.0] * 8]), "mxfp4")
    >>> quantized.codes[0, :4].tolist(), quantized.scales.float().tolist(), quantized.bits_per_weight
    ([0, 2, 12, 7], [[1.0]], 4.25)
    """
    if not isinstance(to, str | Format):
        raise FFNError(f"a format has a name such as 'nvfp4', got {shown(type(to).__name__)}")
    form = format_of(to) if isinstance(to, str) else to
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point() or tensor.is_meta:
        kind = f"{tensor.device.type} {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise FFNError(f"only a tensor of floats with values can be quantized, got {shown(kind)}")
    x = tensor.detach().contiguous()
    x = x.float() if x.dtype not in (torch.float16, torch.bfloat16) else x
    blocks = Blocks(tuple(x.shape), form.block(tuple(x.shape)))
    if not bool(torch.isfinite(x).all()):
        raise FFNError(f"{_first_not_finite(x)}, which {form.name} cannot store", "quantize finite values")
    parts = _WRITERS.get(form.name, floats.plain)(blocks.split(x), form)
    return Quantized(form, blocks, blocks.join(parts.codes), *parts[1:])


def _first_not_finite(x: Tensor) -> str:
    bad = (~torch.isfinite(x)).nonzero()
    return f"{len(bad)} of {x.numel()} values are NaN or infinite, the first at {bad[0].tolist()}"


_WRITERS: dict[str, Callable[[Tensor, Format], Parts]] = {
    "fp8": floats.fp8, "fp8_e5m2": floats.fp8, "mxfp8": floats.microscaled, "mxfp4": floats.microscaled,
    "nvfp4": floats.nvfp4, "int8": integers.integers, "int4": integers.integers,
    **dict.fromkeys(("q8_0", "q4_0", "q4_1", "q5_0", "q5_1", "tq1_0", "tq2_0"), ggml.ggml),
}  # fmt: skip


@cache
def _fp4(device: torch.device) -> Tensor:
    return torch.tensor(float_values(2, 1), device=device)
