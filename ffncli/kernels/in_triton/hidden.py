"""What a kernel in Triton takes from a block: why it refuses one, and what is fixed when it compiles. `hidden` launches
gate's product, up's and all between them as one kernel, with tiles by tokens and dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ffncli.block.steps import Activation
from ffncli.kernels.dense import Dense, Weights, dense, refuses_all_but_dense
from ffncli.kernels.kernel import Steps, interprets_triton

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


Products = tuple[Tensor, Tensor]
GROUP = 16  # tiles of tokens for each tile of rows


class Tile(NamedTuple):
    """What one program computes: `tokens` × `rows`, `columns` at a time, with `warps` of 32 threads."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """As arguments of a launch."""
        return {
            "BM": self.tokens, "BN": self.rows, "BK": self.columns, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


def tile_for(tokens: int, dtype: torch.dtype) -> Tile:
    """The tile for so many tokens: the fewest that waste no loads. Chosen by what the compiler reports, never timed.

    One token: a warp for each row, whose threads load 16 bytes at a time, and no tensor core. The others keep within
    the registers, and leave the shared memory of an H100 (227 KB) to two programs.
    """
    size = dtype.itemsize
    if tokens <= 1:
        return Tile(1, 4, 512 // size, 4, 1)
    if tokens <= 16:
        return Tile(16, 32, 16, 4, 2) if size == 8 else Tile(16, 32, 256 // size, 4, 3)
    if size > 2:
        return Tile(64, 64, 32, 8, 3) if size == 4 else Tile(32, 32, 16, 4, 3)
    return Tile(64, 64, 64, 4, 4) if tokens <= 64 else Tile(128, 64, 64, 8, 3)


def launcher(shape: Dense, dtype: torch.dtype) -> Callable[[Tensor, Weights, Products | None], Tensor]:
    """f(x, weights, products) → the input of down [tokens, d_ff], before any norm; x and the weights have any strides.

    `products`, two contiguous tensors of that shape (in a plain block the first is used), take gate and up.
    """
    from ffncli.kernels.in_triton.launched import hidden_kernel

    fixed = constants(shape) | widths(dtype)
    first = "gate" if shape.gated else "up"

    def launch(x: Tensor, w: Weights, products: Products | None) -> Tensor:
        gate, up = w[f"{first}.weight"], w["up.weight"]
        hidden = x.new_empty(x.shape[0], up.shape[0])
        tile = tile_for(x.shape[0], dtype)
        grid = (-(-hidden.shape[0] // tile.tokens) * -(-hidden.shape[1] // tile.rows),)
        hidden_kernel[grid](
            x, gate, up, w.get(f"{first}.bias"), w.get("up.bias"), hidden, *(products or (None, None)),
            *hidden.shape, x.shape[1], *x.stride(), *gate.stride(), *up.stride(),
            **fixed, **tile.options, GROUP=GROUP,
        )  # fmt: skip
        return hidden

    return launch
