"""Which steps hold a block's hidden units (read off the axes, for any block, experts included),

and which values count as near zero there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ffncli.block.steps import Activation, Experts, Linear, Norm, Route, Step

NEAR_ZERO = 1e-3  # |x| up to this is near zero; rounded to float32 where the values are


def unit_steps(steps: Sequence[Step]) -> Mapping[str, str | None]:
    """Steps as wide as d_ff that come after an activation → the Linear that reads them, if one does.

    `{"act": None, "hidden": "down"}` for a gated block. An identity activation does not count.
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
