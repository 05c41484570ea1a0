"""What a kernel in Triton takes from a block: why it refuses one, and what is fixed when it compiles."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from ffncli.block.steps import Activation
from ffncli.kernels.kernel import Steps, interprets_triton
from ffncli.kernels.pattern import Dense, dense, refuses_all_but_dense

FUNCTIONS = ("identity", "relu", "relu2", "sigmoid", "tanh", "silu", "quick_gelu", "gelu_tanh", "gelu")
BLOCK = 1024  # columns of one elementwise program: 8 elements for each of its 128 threads
_UNCHANGED = Activation("identity")


def refuses(steps: Steps) -> str | None:
    """Why it cannot compute a block: it needs a dense one whose functions are written in Triton."""
    shape = dense(steps)
    if shape is None:
        return refuses_all_but_dense(steps)
    missing = next((op.function for op in _units(shape) if op.function not in FUNCTIONS), None)
    return missing and f"{missing} is not written in Triton here"


def constants(shape: Dense) -> dict[str, Any]:
    """The compile-time arguments that a block fixes."""
    act, lift = (tuple(getattr(op, field.name) for field in fields(op)) for op in _units(shape))
    return {"GATED": shape.gated, "SCALE": float(shape.gate_scale), "ACT": act, "LIFT": lift}


def widths(dtype: torch.dtype) -> dict[str, bool]:
    """The compile-time arguments that a dtype fixes: sums of 64 bits, and 16-bit operands that must be cast."""
    return {"WIDE": dtype == torch.float64, "CAST": interprets_triton() and dtype.itemsize == 2}


def _units(shape: Dense) -> tuple[Activation, Activation]:
    return shape.act, shape.lift or _UNCHANGED
