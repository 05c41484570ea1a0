"""Triton functions of the package's kernels. Only this file imports triton; only a kernel's `build` imports this file.

Values are computed in float32 (float64 for float64 tensors) whatever the tensors' dtype: in Triton's interpreter 16-bit
floats are bit patterns, and on a GPU the wider arithmetic is free next to the loads. Every comparison lets NaN through,
as torch's functions do.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ) without an overflow: only e^-|x| is computed."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def activated(x, FUNCTION: tl.constexpr):
    """The activation of that name, one of `triton_act.FUNCTIONS`."""
    if FUNCTION == "identity":
        y = x
    elif FUNCTION == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif FUNCTION == "relu2":
        y = tl.where(x <= 0, 0.0, x * x)
    elif FUNCTION == "sigmoid":
        y = sigmoid(x)
    elif FUNCTION == "silu":
        y = x * sigmoid(x)
    elif FUNCTION == "quick_gelu":
        y = x * sigmoid(1.702 * x)
    elif FUNCTION == "gelu_tanh":  # (1 + tanh(u)) / 2 is the sigmoid of 2u
        y = x * sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        tl.static_assert(FUNCTION == "gelu")
        y = 0.5 * x * (1.0 + tl.math.erf(0.7071067811865476 * x))
    return y


@triton.jit
def limited(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x between two limits, either of which may be None."""
    if LOW is not None:
        x = tl.where(x < LOW, LOW, x)
    if HIGH is not None:
        x = tl.where(x > HIGH, HIGH, x)
    return x


@triton.jit
def act_kernel(
    gate, up, out, columns, gate_row, gate_column, up_row, up_column,
    GATED: tl.constexpr, SCALE: tl.constexpr,
    ACT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, PLUS: tl.constexpr,
    LIFT: tl.constexpr, LIFT_LOW: tl.constexpr, LIFT_HIGH: tl.constexpr, LIFT_PLUS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token, column] = act(limited(SCALE · gate)) + PLUS, times lift(up) if gated; a program per row and BLOCK.

    `gate` and `up` may have any strides, given in elements; `out` is contiguous. In a plain block `gate` is the only
    input.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    x = tl.load(gate + token * gate_row + column * gate_column, mask=inside, other=0.0).to(dtype)
    y = activated(limited(x * SCALE, LOW, HIGH), ACT) + PLUS
    if GATED:
        u = tl.load(up + token * up_row + column * up_column, mask=inside, other=0.0).to(dtype)
        y = y * (activated(limited(u, LIFT_LOW, LIFT_HIGH), LIFT) + LIFT_PLUS)
    tl.store(out + token * columns + column, y.to(out.dtype.element_ty), mask=inside)
