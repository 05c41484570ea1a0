"""What a kernel needs to know about a block, from its steps: is it dense, is it gated, what is between its matrices?"""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.block.steps import Activation, Add, Experts, Norm, Op, Step, parameters
from ffncli.dataclass import dataclass

_STEPS = ("gate", "up", "gate_scaled", "act", "lift", "hidden", "sub_norm", "down")


@dataclass(frozen=True)
class Dense:
    """One FFN of two or three matrices. `prefix` starts its steps' names (`shared.`).

    `act` is the activation's op, `lift` is applied to up before the product (gpt-oss), `gate_scale` multiplies the gate
    before its activation, `sub_norm` normalises the input of down (BitNet).
    """

    gated: bool
    act: Activation
    lift: Activation | None
    gate_scale: float
    sub_norm: Norm | None
    prefix: str = ""


def dense(steps: Sequence[Step], prefix: str = "") -> Dense | None:
    """The dense FFN formed by the steps whose names start with `prefix`; None if they form something else."""
    by = {step.output.removeprefix(prefix): step for step in steps if step.output.startswith(prefix)}
    if not {"up", "act", "down"} <= set(by) or (not prefix and not set(by) <= set(_STEPS)):
        return None
    ops: dict[str, Op] = {name: step.op for name, step in by.items()}
    act, lift, norm, scale = ops["act"], ops.get("lift"), ops.get("sub_norm"), ops.get("gate_scaled", Add())
    assert isinstance(act, Activation)
    assert isinstance(scale, Add)
    assert lift is None or isinstance(lift, Activation)
    assert norm is None or isinstance(norm, Norm)
    return Dense("gate" in by, act, lift, scale.scale, norm, prefix)


def refuses_odd_widths(steps: Sequence[Step], multiple: int) -> str | None:
    """Why a kernel cannot compute these steps whose products take widths that are multiples of a number."""
    sizes = (axis.size for axes in parameters(steps).values() if len(axes) > 1 for axis in axes)
    odd = next((size for size in sizes if size % multiple), None)
    return None if odd is None else f"computes widths that are multiples of {multiple} only, not {odd}"


def refuses_all_but_dense(steps: Sequence[Step]) -> str | None:
    """Why a kernel for dense FFNs cannot compute these steps."""
    if dense(steps) is not None:
        return None
    return "cannot compute " + ("experts" if any(isinstance(step.op, Experts) for step in steps) else "this block")
