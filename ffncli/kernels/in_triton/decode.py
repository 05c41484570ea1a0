"""decode: for 1 to 16 tokens, where the time is that of reading the weights. Two Triton kernels and a sum.

The first streams rows of gate and up and writes hidden; the second streams down, split over more programs along d_ff,
whose partial sums the third adds in a fixed order: the same bits in every call. More tokens are computed as well, with
other tiles. Forward only. Its speed has not been measured on any GPU.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ffncli.block.steps import parameters
from ffncli.kernels.dense import dense, normed
from ffncli.kernels.in_triton import hidden
from ffncli.kernels.in_triton.hidden import Tile, refuses, tile_for, widths
from ffncli.kernels.kernel import Computes, Params, Steps, register

ENOUGH = {1: 2048, 16: 512}  # tokens of a tile → programs that fill an H100: 16 or 4 on each of 132 multiprocessors
LEAST = 4  # tiles of columns that a part has at least
SUMMED = 128  # columns of one program of the sum


@register("decode", needs=("triton",), refuses=refuses, trains=False, compiles=True, most_tokens=16)
def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """down(act(gate(x)) · up(x)), a norm before down by torch; Triton compiles at the first call."""
    shape, names = dense(steps), tuple(parameters(steps))
    assert shape is not None
    first, second = hidden.launcher(shape, dtype), launcher(dtype)

    def run(x: Tensor, params: Params) -> Tensor:
        w = dict(zip(names, params, strict=True))
        return second(normed(shape, first(x, w, None), w), w["down.weight"], w.get("down.bias"))

    return run


def splits(tokens: int, rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """(parts into which the columns are split, columns of each part): by sizes alone, so that they never change."""
    programs = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    wanted = max(1, min(ENOUGH.get(tile.tokens, 1) // max(1, programs), columns // (LEAST * tile.columns)))
    each = -(-columns // wanted)
    each += -each % tile.columns
    return -(-columns // each), each


def launcher(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """f(x, weight, bias) → x · weightᵀ + bias, by partial sums; x and weight have any strides."""
    from ffncli.kernels.in_triton.launched import split_kernel, sum_kernel

    fixed, wide = widths(dtype), torch.float64 if dtype == torch.float64 else torch.float32

    def launch(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        (tokens, columns), rows = x.shape, weight.shape[0]
        tile = tile_for(tokens, dtype)
        parts, each = splits(tokens, rows, columns, tile)
        partial, out = x.new_empty(parts, tokens, rows, dtype=wide), x.new_empty(tokens, rows)
        split_kernel[(-(-tokens // tile.tokens), -(-rows // tile.rows), parts)](
            x, weight, partial, tokens, rows, columns, each, *x.stride(), *weight.stride(),
            **fixed, **tile.options,
        )  # fmt: skip
        sum_kernel[(tokens, -(-rows // SUMMED))](partial, bias, out, tokens, rows, parts, BLOCK=SUMMED)
        return out

    return launch
