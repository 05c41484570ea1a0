"""Launches gate's product, up's and all between them as one Triton kernel, with tiles by tokens and dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ffncli.kernels.between import Weights
from ffncli.kernels.in_triton.unit import constants, widths
from ffncli.kernels.pattern import Dense

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
