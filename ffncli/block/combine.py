"""The two ops that make one tensor of several, element by element: their product and their sum."""

from __future__ import annotations

from collections.abc import Sequence

from ffncli.block.op import ONE, Axis, Op, Shape, Symbols, require_axis
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError


@dataclass(frozen=True)
class Multiply(Op):
    """Elementwise product; a width of 1 broadcasts (a gate with one number per token).

    `learned`: one more factor is learned, one number (the dense layers of Inkling) or one per feature (ZAYA's router).
    """

    learned: Axis | None = None

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`factor [1]`, or `[feature]`, if it is learned."""
        return {"factor": (self.learned,)} if self.learned else {}

    def shape(self, *inputs: Shape) -> Shape:
        """The wider of the two; FFNError if they differ and neither is 1 wide."""
        wide = max(inputs, key=lambda s: s[-1])
        if any(s[:-1] != wide[:-1] or s[-1] not in (1, wide[-1]) for s in inputs):
            raise FFNError(f"Multiply: shapes {list(inputs)} do not broadcast")
        if self.learned and self.learned.size > 1:
            require_axis(self.learned, wide, "Multiply")
        return wide

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`act ⊙ up`."""
        return " ⊙ ".join([*([symbol("factor")] if self.learned else []), *inputs])

    def into_axis(self) -> Axis | None:
        """The learned factors', if there are several."""
        return None if self.learned == ONE else self.learned


@dataclass(frozen=True)
class Add(Op):
    """Sum of all inputs; the last one times `scale` (Granite's residual multiplier). A single input is just scaled.

    `bias` is the axis of a learned vector that is added too (JetMoE's, after its experts are mixed).
    """

    scale: float = 1.0
    bias: Axis | None = None

    def parameters(self) -> dict[str, tuple[Axis, ...]]:
        """`bias [feature]`, if there is one."""
        return {"bias": (self.bias,)} if self.bias else {}

    def shape(self, *inputs: Shape) -> Shape:
        """All inputs have the same shape."""
        if len(set(inputs)) != 1:
            raise FFNError(f"Add: shapes {list(inputs)} differ")
        return inputs[0]

    def formula(self, inputs: Sequence[str], symbol: Symbols) -> str:
        """`x + down`, `x + 0.22 · down`, `experts + b_biased`."""
        last = inputs[-1] if self.scale == 1 else f"{self.scale:g} · {inputs[-1]}"
        return " + ".join([*inputs[:-1], last, *([symbol("bias")] if self.bias else [])])
