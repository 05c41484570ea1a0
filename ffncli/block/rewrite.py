"""A block as it would be otherwise: the same steps without a non-linearity, with biases everywhere or nowhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ffncli.block.steps import Activation, Experts, Linear, Op, Step


def without_nonlinearity(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with identity in place of every activation and of its limits, outside of experts."""
    return tuple(replace(s, op=Activation("identity")) if isinstance(s.op, Activation) else s for s in steps)


def with_biases(steps: Sequence[Step], bias: bool) -> tuple[Step, ...]:
    """The steps with a bias in every Linear, or in none, inside experts too."""

    def changed(op: Op) -> Op:
        if isinstance(op, Experts):
            return replace(op, program=with_biases(op.program, bias))
        return replace(op, bias=bias) if isinstance(op, Linear) else op

    return tuple(replace(step, op=changed(step.op)) for step in steps)
