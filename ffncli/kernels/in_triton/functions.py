"""The operations between the products, and their derivatives, in Triton's language. Imported only inside a kernel's
`build`.

Values are computed in float32 (float64 for float64 tensors) whatever the tensors' dtype: in Triton's interpreter 16-bit
floats are bit patterns, and on a GPU the wider arithmetic takes no extra time, because the loads take longer. Every
comparison lets NaN through, as torch's functions do. `OP` is a tuple of the fields of `block.steps.Activation` in
order: 0 function, 1 low, 2 high, 3 plus, 4 soft_cap, 5 most.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sigmoid(x):
    """1 / (1 + e⁻ˣ) without overflow: only e^-|x| is computed."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x >= 0, 1.0, e) / (1.0 + e)


@triton.jit
def tanh(x):
    """(1 - e^-2|x|) / (1 + e^-2|x|) with x's sign; near 0, where that difference loses digits, the first six terms of
    the series."""
    e = tl.exp(-2.0 * tl.abs(x))
    far = (1.0 - e) / (1.0 + e)
    s = x * x
    near = 62 / 2835 - s * (1382 / 155925)
    near = 1.0 - s * (1 / 3 - s * (2 / 15 - s * (17 / 315 - s * near)))
    return tl.where(tl.abs(x) < 0.1, x * near, tl.where(x >= 0, far, -far))


@triton.jit
def activated(x, FUNCTION: tl.constexpr, CAP: tl.constexpr):
    """The activation of that name, one of `kernels.FUNCTIONS`; its linear factor is within ± CAP unless CAP is None."""
    if CAP is not None:
        y = CAP * tanh(x / CAP)
        if FUNCTION == "silu":
            y = y * sigmoid(x)
        else:
            tl.static_assert(FUNCTION == "identity")
    elif FUNCTION == "identity":
        y = x
    elif FUNCTION == "relu":
        y = tl.where(x <= 0, 0.0, x)
    elif FUNCTION == "relu2":
        y = tl.where(x <= 0, 0.0, x * x)
    elif FUNCTION == "sigmoid":
        y = sigmoid(x)
    elif FUNCTION == "tanh":
        y = tanh(x)
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
def activated_slope(x, FUNCTION: tl.constexpr, CAP: tl.constexpr):
    """The derivative of `activated` with respect to x; at a kink, the same as torch's."""
    if CAP is not None:
        t = tanh(x / CAP)
        d = 1.0 - t * t
        if FUNCTION == "silu":
            s = sigmoid(x)
            d = s * (d + CAP * t * (1.0 - s))
    elif FUNCTION == "identity":
        d = tl.where(x == x, 1.0, x)
    elif FUNCTION == "relu":
        d = tl.where(x <= 0, 0.0, 1.0)
    elif FUNCTION == "relu2":
        d = tl.where(x <= 0, 0.0, 2.0 * x)
    elif FUNCTION == "sigmoid":
        s = sigmoid(x)
        d = s * (1.0 - s)
    elif FUNCTION == "tanh":
        t = tanh(x)
        d = 1.0 - t * t
    elif FUNCTION == "silu":
        s = sigmoid(x)
        d = s * (1.0 + x * (1.0 - s))
    elif FUNCTION == "quick_gelu":
        s = sigmoid(1.702 * x)
        d = s * (1.0 + 1.702 * x * (1.0 - s))
    elif FUNCTION == "gelu_tanh":
        s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
        d = s * (1.0 + 1.5957691216057308 * x * (1.0 + 0.134145 * x * x) * (1.0 - s))
    else:
        tl.static_assert(FUNCTION == "gelu")
        density = 0.3989422804014327 * tl.exp(-0.5 * x * x)
        d = 0.5 * (1.0 + tl.math.erf(0.7071067811865476 * x)) + x * density
    return d


@triton.jit
def limited(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x between two limits, either of which may be None."""
    if LOW is not None:
        x = tl.where(x < LOW, LOW, x)
    if HIGH is not None:
        x = tl.where(x > HIGH, HIGH, x)
    return x


@triton.jit
def unit(x, OP: tl.constexpr):
    """min(f(clip(x, low, high)), most) + plus."""
    # named, because Triton before 3.7 cannot pass a string from a tuple as an argument
    FUNCTION: tl.constexpr = OP[0]
    return limited(activated(limited(x, OP[1], OP[2]), FUNCTION, OP[4]), None, OP[5]) + OP[3]


@triton.jit
def slope(x, OP: tl.constexpr):
    """The derivative of `unit` with respect to x: 0 beyond a limit, the function's slope on it, like torch's clamp."""
    FUNCTION: tl.constexpr = OP[0]
    y = limited(x, OP[1], OP[2])
    d = activated_slope(y, FUNCTION, OP[4])
    if OP[1] is not None:
        d = tl.where(x < OP[1], 0.0, d)
    if OP[2] is not None:
        d = tl.where(x > OP[2], 0.0, d)
    if OP[5] is not None:
        d = tl.where(activated(y, FUNCTION, OP[4]) > OP[5], 0.0, d)
    return d


@triton.jit
def joined(gate, up, GATED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, LIFT: tl.constexpr):
    """act(SCALE · gate), times lift(up) if gated; in a plain block `gate` is the only input."""
    y = unit(gate * SCALE, ACT)
    if GATED:
        y = y * unit(up, LIFT)
    return y
