"""What these packages compute: gated units without the limits and scales that some models add."""

from __future__ import annotations

from collections.abc import Collection

from ffncli.block.steps import parameters
from ffncli.kernels.kernel import Steps
from ffncli.kernels.pattern import dense, refuses_all_but_dense


def refuses_all_but_gated(steps: Steps, functions: Collection[str], products: bool = True) -> str | None:
    """Why a gated unit with one of these functions cannot be this block; with its `products`, or what is between."""
    shape = dense(steps)
    if shape is None:
        return refuses_all_but_dense(steps)
    if not shape.gated:
        return "cannot compute a plain block"
    if shape.act.function not in functions:
        return f"cannot compute {shape.act.function}, only {' and '.join(functions)}"
    if not shape.act.unlimited or shape.lift or shape.gate_scale != 1:
        return "cannot compute a limited or scaled gate"
    if products and shape.sub_norm:
        return "cannot compute a norm inside the block"
    if products and any(name.endswith(".bias") for name in parameters(steps)):
        return "cannot compute biases"
    return None
