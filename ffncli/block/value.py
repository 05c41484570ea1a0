"""The value and the slope of an Activation step, limits included, over a namespace (`formulas.SCALAR`, torch). Also
finds the steps that compute a block's hidden units, and defines when a unit's value is near zero."""

from collections.abc import Mapping, Sequence
from typing import Any

from ffncli.block.activations import SOFT_CAPPED, TABLE
from ffncli.block.formulas import zero
from ffncli.block.steps import Activation, Experts, Linear, Norm, Route, Step


def value(op: Activation, x: Any, m: Any) -> Any:
    """Return the step's output. A limit lets NaN through, like torch's clamp."""
    y = unlimited(op, clipped(op, x, m), m)
    if op.most is not None:
        y = m.where(y > op.most, op.most, y)
    return y + op.plus if op.plus else y


def slope(op: Activation, x: Any, m: Any) -> Any:
    """Return the derivative with respect to x. At a limit, this is the slope just inside the limit, as in torch."""
    inner = clipped(op, x, m)
    steep = _unlimited_slope(op, inner, m)
    if op.low is not None:
        steep = m.where(x < op.low, zero(x, m), steep)
    if op.high is not None:
        steep = m.where(x > op.high, zero(x, m), steep)
    return steep if op.most is None else m.where(unlimited(op, inner, m) > op.most, zero(x, m), steep)


def clipped(op: Activation, x: Any, m: Any) -> Any:
    """Return x clipped to `low` and `high`."""
    if op.low is not None:
        x = m.where(x < op.low, op.low, x)
    return x if op.high is None else m.where(x > op.high, op.high, x)


def unlimited(op: Activation, x: Any, m: Any) -> Any:
    """Return f(x), with the soft cap applied to its linear factor if there is a cap."""
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


NEAR_ZERO = 1e-3  # |x| ≤ this is near zero; the bound is rounded to float32 when it is compared with float32 values


def unit_steps(steps: Sequence[Step]) -> Mapping[str, str | None]:
    """Return a mapping from each step that is as wide as d_ff and follows an activation to the Linear that reads it.

    It is `{"act": None, "hidden": "down"}` for a gated block: no Linear reads `act`. The identity does not count.
    """
    wide: set[str] = set()
    readers: dict[str, str | None] = {}
    for step in steps:
        match step.op:
            case Linear(out=out):
                for name in set(step.inputs) & set(readers):
                    readers[name] = step.output
                wide |= {step.output} if out.name == "d_ff" else set()
            case Norm(axis=axis):
                wide |= {step.output} if axis.name == "d_ff" else set()
            case Route() | Experts():
                pass
            case _:
                wide |= {step.output} if wide & set(step.inputs) else set()
        decides = isinstance(step.op, Activation) and step.op.function != "identity"
        if step.output in wide and not isinstance(step.op, Linear) and (decides or set(readers) & set(step.inputs)):
            readers[step.output] = None
    return readers
