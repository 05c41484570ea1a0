"""The kernels that are launched, in Triton's language. Imported only inside a kernel's `build`.

Strides are in elements. The index of a program's first element has 64 bits, because 2³¹ elements are only 4 GB of bf16;
within its tile 32 bits are enough for strides below 2²⁴.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ffncli.kernels.in_triton.functions import joined, slope, unit

# --- between the products ---------------------------------------------------------------------------------------------


@triton.jit
def act_kernel(
    gate, up, out, columns, gate_row, gate_column, up_row, up_column,
    GATED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, LIFT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[token, column] = act(SCALE · gate), times lift(up) if gated; one program per row and BLOCK of columns.

    `gate` and `up` may have any strides; `out` is contiguous. In a plain block `gate` is the only input.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    x = tl.load(gate + token * gate_row + column * gate_column, mask=inside, other=0.0).to(dtype)
    u = x
    if GATED:
        u = tl.load(up + token * up_row + column * up_column, mask=inside, other=0.0).to(dtype)
    y = joined(x, u, GATED, SCALE, ACT, LIFT)
    tl.store(out + token * columns + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def act_backward_kernel(
    gate, up, d_hidden, d_gate, d_up, hidden, columns,
    GATED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, LIFT: tl.constexpr, WIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """From gate, up and the gradient of hidden, compute the gradients of gate and up, and hidden again. All are
    contiguous.

    In a plain block `gate` is the only input; `up` and `d_up` are neither read nor written.
    """
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    at = tl.program_id(0).to(tl.int64) * columns + column
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    x = SCALE * tl.load(gate + at, mask=inside, other=0.0).to(dtype)
    d = tl.load(d_hidden + at, mask=inside, other=0.0).to(dtype)
    y = unit(x, ACT)
    d_x = d * slope(x, ACT) * SCALE
    if GATED:
        u = tl.load(up + at, mask=inside, other=0.0).to(dtype)
        lift = unit(u, LIFT)
        tl.store(d_up + at, (d * y * slope(u, LIFT)).to(d_up.dtype.element_ty), mask=inside)
        d_x = d_x * lift
        y = y * lift
    tl.store(d_gate + at, d_x.to(d_gate.dtype.element_ty), mask=inside)
    tl.store(hidden + at, y.to(hidden.dtype.element_ty), mask=inside)


# --- products ---------------------------------------------------------------------------------------------------------


@triton.jit
def added(total, x, w, ONE: tl.constexpr, CAST: tl.constexpr):
    """total + x · wᵀ; if x is a single row, the products of x and w are added unsummed. CAST: in Triton's interpreter,
    16-bit floats are bit patterns and must be cast first."""
    if ONE:
        total += x.to(total.dtype) * w.to(total.dtype)
    else:
        if CAST:
            x, w = x.to(total.dtype), w.to(total.dtype)
        total = tl.dot(x, tl.trans(w), total, input_precision="ieee", out_dtype=total.dtype)
    return total


@triton.jit
def products(
    x, x_row, x_column, a, a_row, a_column, b, b_row, b_column, tokens, rows, columns,
    PAIR: tl.constexpr, CAST: tl.constexpr, WIDE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """(x · aᵀ, x · bᵀ), each [BM, BN]; x is read only once. Without PAIR, (x · aᵀ, x · aᵀ).

    The pointers are at the tile's first token, row and column. `tokens`, `rows` and `columns` are counted from there;
    nothing beyond them is read.
    """
    dtype: tl.constexpr = tl.float64 if WIDE else tl.float32
    ONE: tl.constexpr = BM == 1
    by_a = tl.zeros([BN, BK] if ONE else [BM, BN], dtype)
    by_b = by_a
    token, row, column = tl.arange(0, BM)[:, None], tl.arange(0, BN)[:, None], tl.arange(0, BK)[None, :]
    for first in tl.range(0, columns, BK, loop_unroll_factor=4 if ONE else 1):
        inside = (row < rows) & (column < columns - first)
        if ONE:  # a copy of x per row, in the layout of the weights; otherwise threads would exchange x at every step
            part = tl.load(x + (0 * row + column * x_column), mask=inside, other=0.0)
        else:
            mask = (token < tokens) & (column < columns - first)
            part = tl.load(x + (token * x_row + column * x_column), mask=mask, other=0.0)
        weight = tl.load(a + (row * a_row + column * a_column), mask=inside, other=0.0)
        by_a = added(by_a, part, weight, ONE, CAST)
        if PAIR:
            weight = tl.load(b + (row * b_row + column * b_column), mask=inside, other=0.0)
            by_b = added(by_b, part, weight, ONE, CAST)
            b += BK * b_column
        x += BK * x_column
        a += BK * a_column
    if ONE:
        by_a = tl.sum(by_a, 1)[None, :]
        by_b = tl.sum(by_b, 1)[None, :]
    return by_a, by_b if PAIR else by_a


@triton.jit
def hidden_kernel(
    x, gate, up, gate_bias, up_bias, hidden, gates, ups, tokens, rows, columns,
    x_row, x_column, gate_row, gate_column, up_row, up_column,
    GATED: tl.constexpr, SCALE: tl.constexpr, ACT: tl.constexpr, LIFT: tl.constexpr, WIDE: tl.constexpr,
    CAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Compute a [BM, BN] tile of hidden [tokens, rows]: the products of gate and up in two accumulators, then the steps
    up to hidden.

    `gates` and `ups` receive the products, biases included, for a backward pass, or are None. They and `hidden` are
    contiguous. Programs visit GROUP tiles of tokens for each tile of rows, so that both stay in the L2 cache.
    """
    tiles, each = tl.cdiv(tokens, BM), GROUP * tl.cdiv(rows, BN)
    tile = tl.program_id(0)
    above = tile // each * GROUP
    width = tl.minimum(tiles - above, GROUP)
    token = (above + tile % each % width).to(tl.int64) * BM
    row = (tile % each // width).to(tl.int64) * BN
    g, u = products(
        x + token * x_row, x_row, x_column, gate + row * gate_row, gate_row, gate_column, up + row * up_row, up_row,
        up_column, tokens - token, rows - row, columns, GATED, CAST, WIDE, BM, BN, BK,
    )  # fmt: skip
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    inside = (m < tokens - token) & (n < rows - row)
    at = token * rows + row
    if gate_bias is not None:
        g += tl.load(gate_bias + row + n, mask=n < rows - row, other=0.0).to(g.dtype)
    if GATED and up_bias is not None:
        u += tl.load(up_bias + row + n, mask=n < rows - row, other=0.0).to(u.dtype)
    if gates is not None:
        tl.store(gates + at + (m * rows + n), g.to(gates.dtype.element_ty), mask=inside)
        if GATED:
            tl.store(ups + at + (m * rows + n), u.to(ups.dtype.element_ty), mask=inside)
    y = joined(g, u, GATED, SCALE, ACT, LIFT)
    tl.store(hidden + at + (m * rows + n), y.to(hidden.dtype.element_ty), mask=inside)


@triton.jit
def split_kernel(
    x, weight, partial, tokens, rows, columns, per_split, x_row, x_column, weight_row, weight_column,
    WIDE: tl.constexpr, CAST: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """partial[split] = x · weightᵀ [tokens, rows] over `per_split` of the columns; contiguous, float32 or wider."""
    token, row = tl.program_id(0).to(tl.int64) * BM, tl.program_id(1).to(tl.int64) * BN
    split = tl.program_id(2).to(tl.int64)
    x += token * x_row + split * per_split * x_column
    weight += row * weight_row + split * per_split * weight_column
    y, _ = products(
        x, x_row, x_column, weight, weight_row, weight_column, weight, weight_row, weight_column,
        tokens - token, rows - row, tl.minimum(per_split, columns - split * per_split), False, CAST, WIDE, BM, BN, BK,
    )  # fmt: skip
    m, n = tl.arange(0, BM)[:, None], tl.arange(0, BN)[None, :]
    at = (split * tokens + token) * rows + row
    tl.store(partial + at + (m * rows + n), y, mask=(m < tokens - token) & (n < rows - row))


@triton.jit
def sum_kernel(partial, bias, out, tokens, columns, parts, BLOCK: tl.constexpr):
    """out[token, column] = the sum of the partial products, always in the same order, plus the bias."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    total = tl.zeros([BLOCK], partial.dtype.element_ty)
    for part in range(parts):
        total += tl.load(partial + (part * tokens + token) * columns + column, mask=inside, other=0.0)
    if bias is not None:
        total += tl.load(bias + column, mask=inside, other=0.0).to(total.dtype)
    tl.store(out + token * columns + column, total.to(out.dtype.element_ty), mask=inside)
