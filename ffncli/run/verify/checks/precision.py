"""How precisely a kernel computes: its error, next to those that fp32, TF32 and bf16 would make on the same numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ffncli.run.engine.reference import in_float64, output_and_experts, same_experts
from ffncli.run.measure.tolerance import declared_tolerance
from ffncli.run.verify.checks.row import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial, dtype_name

LOWER = "lower"
_TOKENS = 64
_ROOM = 2.0  # times the expected error: a kernel's own order of sums and functions
_SAME_STEPS = 1.5  # times the error of the steps in a 16-bit dtype: rounding a weight to 8 bits doubles it
_SUMS = {torch.float64: 53, torch.float32: 24}  # bits of a number, its hidden one included
_TF32, _BF16 = 11, 8


def precision(trial: KernelTrial) -> Iterator[CheckRow]:
    """Its rms error and the arithmetic that makes one as large; it fails below the dtype's own.

    Where the user allows an error (--tolerance), a lower one is reported. A kernel that declares fewer bits is held to
    these.
    """
    x = trial.draw(min(_TOKENS, trial.most_tokens))
    reference = trial.reference(x)
    error = rms_error(trial.call(x), reference)
    if computes := trial.block.computes:
        limit = declared_tolerance(computes)[1]
        yield CheckRow("precision", computes, relative_error=error, tolerance=limit, passed=error <= limit,
                       note="rms error; the kernel declares its arithmetic")  # fmt: skip
        return
    bounds = error_bounds(trial, x)
    name = next((name for name, bound in bounds.items() if error <= bound), LOWER)
    allowed = name == next(iter(bounds)) or trial.block.tolerance is not None
    note = "rms error; at most " + ", ".join(f"{bound:.2g} is {of}" for of, bound in bounds.items())
    yield CheckRow("precision", name, relative_error=error, tolerance=next(iter(bounds.values())), passed=allowed,
                   note=note)  # fmt: skip


def rms_error(output: Tensor, reference: Tensor) -> float:
    """‖a − b‖ / ‖b‖, infinite where either is not finite."""
    size = float(reference.norm())
    error = float((output.double() - reference).norm())
    if not math.isfinite(error) or not math.isfinite(size):
        return math.inf
    return error / size if size else (math.inf if error else 0.0)


def error_bounds(trial: KernelTrial, x: Tensor) -> Mapping[str, float]:
    """The largest rms error of each class, the best first: `fp32-true`, `tf32-like`, ...

    A product whose factors are rounded to p bits is off by about 2⁻ᵖ times what the emulation with 11 bits is by 2⁻¹¹;
    a sum of n products that is rounded to p bits after each is off by √(n/2) times the rounding of one number, in the
    worst order (the k-th partial sum is √(k/n) of the last). Factors of 16-bit dtypes need no rounding: their error is
    that of the steps, each rounded.
    """
    dtype, name = trial.block.dtype, dtype_name(trial.block.dtype)
    if dtype in _SUMS:
        by_11, by_8 = emulated(trial, x, _TF32), emulated(trial, x, _BF16)
        longest = max(trial.spec.d_model, trial.spec.d_ff, trial.spec.shared_width)
        sums = {bits: by_11 * 2.0 ** (_TF32 - bits) * (2 + math.sqrt(longest / 2)) for bits in _SUMS.values()}
        mine = {f"{name}-true": _ROOM * sums[_SUMS[dtype]]}
        mine |= {"fp32-like": _ROOM * sums[_SUMS[torch.float32]]} if dtype == torch.float64 else {}
        return mine | {"tf32-like": _ROOM * by_11, "bf16-like": _ROOM * by_8}
    steps, went = output_and_experts(trial.block.ffn, trial.block.ffn_weights, {trial.block.entry: x})
    reference, there = in_float64(trial.block.ffn, trial.block.ffn_weights, {trial.block.entry: x})
    same, _ = same_experts(went, there, len(x))
    own = _SAME_STEPS * rms_error(steps[same], reference[same])
    coarser = {"bf16-like": own * 2.0 ** (_TF32 - _BF16)} if dtype == torch.float16 else {}
    return {f"{name}-true": own} | coarser


def emulated(trial: KernelTrial, x: Tensor, bits: int) -> float:
    """The rms error where the factors of every product have so many bits, and all else is exact."""
    block = trial.block
    with RoundedProducts(bits):
        output, went = in_float64(block.ffn, block.ffn_weights, {block.entry: x})
    reference, there = in_float64(block.ffn, block.ffn_weights, {block.entry: x})
    same, _ = same_experts(went, there, len(x))
    return rms_error(output[same], reference[same])


class RoundedProducts(TorchFunctionMode):
    """Within, torch's `linear` rounds its input and its weight to so many bits first, as tensor cores do."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """The call, its factors rounded where it is `linear`."""
        if func is functional.linear:
            x, weight, *rest = args
            args = (rounded(x, self.bits), rounded(weight, self.bits), *rest)
        return func(*args, **(kwargs or {}))


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """Every number rounded to so many bits, the leading one included, halves to even."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)
