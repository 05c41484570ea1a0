"""What an Activation step computes, limits included, and its slope: over a namespace (`scalar.SCALAR`, torch)."""

from __future__ import annotations

from typing import Any

from ffncli.block.activation_formulas import zero
from ffncli.block.activations import SOFT_CAPPED, TABLE
from ffncli.block.steps import Activation


def value(op: Activation, x: Any, m: Any) -> Any:
    """The step's output. A limit lets NaN through, as torch's clamp does."""
    y = unlimited(op, clipped(op, x, m), m)
    if op.most is not None:
        y = m.where(y > op.most, op.most, y)
    return y + op.plus if op.plus else y


def slope(op: Activation, x: Any, m: Any) -> Any:
    """The derivative by x, torch's on a limit: there, the slope of the inside."""
    inner = clipped(op, x, m)
    steep = _unlimited_slope(op, inner, m)
    if op.low is not None:
        steep = m.where(x < op.low, zero(x, m), steep)
    if op.high is not None:
        steep = m.where(x > op.high, zero(x, m), steep)
    return steep if op.most is None else m.where(unlimited(op, inner, m) > op.most, zero(x, m), steep)


def clipped(op: Activation, x: Any, m: Any) -> Any:
    """x within `low` and `high`."""
    if op.low is not None:
        x = m.where(x < op.low, op.low, x)
    return x if op.high is None else m.where(x > op.high, op.high, x)


def unlimited(op: Activation, x: Any, m: Any) -> Any:
    """f(x), with the soft cap on its linear factor if there is one."""
    if op.soft_cap is None:
        return TABLE[op.function].f(x, m)
    share = SOFT_CAPPED[op.function]
    linear = op.soft_cap * m.tanh(x / op.soft_cap)
    return linear if share is None else linear * TABLE[share].f(x, m)


def _unlimited_slope(op: Activation, x: Any, m: Any) -> Any:
    if op.soft_cap is None:
        return TABLE[op.function].slope(x, m)
    bent = m.tanh(x / op.soft_cap)
    share = SOFT_CAPPED[op.function]
    if share is None:
        return 1.0 - bent * bent
    return (1.0 - bent * bent) * TABLE[share].f(x, m) + op.soft_cap * bent * TABLE[share].slope(x, m)
