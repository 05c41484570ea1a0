"""The precision of a kernel: its rms error, compared with the errors of fp32, TF32 and bf16 on the same input."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from ffncli.run.engine.prepare import dtype_name
from ffncli.run.engine.reference import in_float64, output_and_experts, same_experts
from ffncli.run.measure.gap import declared_tolerance
from ffncli.run.verify.checks.case import CheckRow
from ffncli.run.verify.checks.trial import KernelTrial

LOWER = "lower"
_TOKENS = 64
_ROOM = 2.0  # times the expected error, because a kernel has its own order of sums and its own functions
_SAME_STEPS = 1.5  # times the error of the steps in a 16-bit dtype; rounding a weight to 8 bits would double that error
_SUMS = {torch.float64: 53, torch.float32: 24}  # bits of a significand, with the hidden bit
_TF32, _BF16 = 11, 8


def precision(trial: KernelTrial) -> Iterator[CheckRow]:
    """Measure the rms error and report which arithmetic has an error of that size; fail if the kernel is less precise
    than the dtype's own arithmetic.

    If the user allows an error (`tolerance`), lower precision is reported but passes. A kernel that declares a format
    with fewer bits must meet that format's limit.
    """
    x = trial.draw(min(_TOKENS, trial.most_tokens))
    reference = trial.reference(x)
    error = rms_error(trial.call(x), reference)
    yield classified(trial, "precision", error, {} if trial.block.computes else error_bounds(trial, x))


def classified(trial: KernelTrial, check: str, error: float, bounds: Mapping[str, float], tensor: str = "") -> CheckRow:
    """Return the row of an rms error: the class of arithmetic that has such an error, and whether it is precise enough.

    `bounds` are the largest errors of the classes, the most precise class first; for a kernel that declares its format,
    that format's limit counts. `tensor` is what has the error, if it is not the output.
    """
    subject = f"{tensor}: " if tensor else ""
    if computes := trial.block.computes:
        limit = declared_tolerance(computes)[1]
        note = "rms error; the kernel declares its arithmetic"
        return CheckRow(check, f"{subject}{computes}", None, error, None, limit, error <= limit, note)
    name = next((name for name, bound in bounds.items() if error <= bound), LOWER)
    first, limit = next(iter(bounds.items()))
    note = "rms error; at most " + ", ".join(f"{bound:.2g} is {of}" for of, bound in bounds.items())
    allowed = name == first or trial.block.tolerance is not None
    return CheckRow(check, f"{subject}{name}", None, error, None, limit, allowed, note)


def rms_error(output: Tensor, reference: Tensor) -> float:
    """Return ‖output − reference‖ / ‖reference‖, infinite if a norm is not finite."""
    size = float(reference.norm())
    error = float((output.double() - reference).norm())
    if not math.isfinite(error) or not math.isfinite(size):
        return math.inf
    return error / size if size else (math.inf if error else 0.0)


def error_bounds(trial: KernelTrial, x: Tensor) -> Mapping[str, float]:
    """Return the largest rms error allowed for each class, the most precise class first: `fp32-true`, `tf32-like`, ...

    `emulated` measures the error of matrix products whose factors are rounded to 11 bits; with p bits the error is
    2¹¹⁻ᵖ times as large. A sum of n products that is rounded to p bits after every addition has √(n/2) times the error
    of one rounding, in the worst order (the k-th partial sum is √(k/n) of the total). Factors in a 16-bit dtype need no
    rounding, so the bound of these dtypes is based on the error of the steps, each rounded to the dtype.
    """
    dtype, name = trial.block.dtype, dtype_name(trial.block.dtype)
    if dtype in _SUMS:
        return sum_bounds(trial, emulated(trial, x, _TF32), emulated(trial, x, _BF16))
    steps, went = output_and_experts(trial.block.ffn, trial.block.ffn_weights, {trial.block.entry: x})
    reference, there = in_float64(trial.block.ffn, trial.block.ffn_weights, {trial.block.entry: x})
    same, _ = same_experts(went, there, len(x))
    bound = _SAME_STEPS * rms_error(steps[same], reference[same])
    coarser = {"bf16-like": bound * 2.0 ** (_TF32 - _BF16)} if dtype == torch.float16 else {}
    return {f"{name}-true": bound} | coarser


def sum_bounds(trial: KernelTrial, by_11: float, by_8: float, tokens: int = 1) -> dict[str, float]:
    """Return the bounds for fp32 and fp64, given the rms errors of factors of 11 and of 8 bits. `tokens` is the number
    of tokens over which a weight's gradient is summed."""
    dtype, name = trial.block.dtype, dtype_name(trial.block.dtype)
    longest = max(trial.spec.d_model, trial.spec.d_ff, trial.spec.shared_width, tokens)
    sums = {bits: by_11 * 2.0 ** (_TF32 - bits) * (2 + math.sqrt(longest / 2)) for bits in _SUMS.values()}
    mine = {f"{name}-true": _ROOM * sums[_SUMS[dtype]]}
    mine |= {"fp32-like": _ROOM * sums[_SUMS[torch.float32]]} if dtype == torch.float64 else {}
    return mine | {"tf32-like": _ROOM * by_11, "bf16-like": _ROOM * by_8}


def emulated(trial: KernelTrial, x: Tensor, bits: int) -> float:
    """Return the rms error of matrix products with factors rounded to `bits` bits, computed otherwise in float64."""
    block = trial.block
    with RoundedProducts(bits):
        output, went = in_float64(block.ffn, block.ffn_weights, {block.entry: x})
    reference, there = in_float64(block.ffn, block.ffn_weights, {block.entry: x})
    same, _ = same_experts(went, there, len(x))
    return rms_error(output[same], reference[same])


class RoundedProducts(TorchFunctionMode):
    """A context in which torch's `linear` first rounds its input and weight to `bits` bits, as tensor cores do, and its
    backward pass rounds the factors of its products."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.bits = bits

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, with rounded factors if it is `linear`."""
        if func is functional.linear:
            x, weight, *rest = args
            if torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad):
                return _RoundedLinear.apply(x, weight, *(rest or [None]), self.bits)  # type: ignore[no-untyped-call]
            args = (rounded(x, self.bits), rounded(weight, self.bits), *rest)
        return func(*args, **(kwargs or {}))


class _RoundedLinear(torch.autograd.Function):
    """`linear` whose three products, forward and backward, have factors rounded to `bits` bits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bits: int) -> Tensor:
        ctx.save_for_backward(rounded(x, bits), rounded(weight, bits))
        ctx.bits, ctx.biased = bits, bias is not None
        return functional.linear(rounded(x, bits), rounded(weight, bits), bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, Tensor | None, None]:
        (x, weight), g = ctx.saved_tensors, rounded(upstream, ctx.bits)
        rows = g.flatten(0, -2)
        return g @ weight, rows.T @ x.flatten(0, -2), rows.sum(0) if ctx.biased else None, None


def rounded(tensor: Tensor, bits: int) -> Tensor:
    """Round every value to `bits` significant bits, the leading bit included, halves to even."""
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)
