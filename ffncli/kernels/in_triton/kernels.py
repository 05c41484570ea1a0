"""The kernels in Triton. They need a GPU, or Triton's interpreter (TRITON_INTERPRET=1), which runs them as Python.

triton_act: the products are the same as in eager; one Triton kernel computes all operations between them, and reads
gate and up once. Forward only.

fused_gate: one Triton kernel computes the products of gate and up and all operations before down; torch computes the
product of down. One program computes a tile of gate and a tile of up from the same tile of x, so that gate and up are
never written out. The column `fusion_saving_max` shows how much this can save at most. In training, gate and up are
kept. In the backward pass, torch computes the products, and between them one elementwise kernel computes the gradients
of gate and up, and hidden again.

decode: for 1 to 16 tokens, where reading the weights takes most of the time. Two Triton kernels and a sum: the first
streams rows of gate and up and writes hidden; the second streams down, split over several programs along d_ff; the sum
adds their partial sums in a fixed order, so that every call returns the same bits. More tokens are computed as well,
with other tiles. Forward only.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional

from ffncli.block.steps import Activation
from ffncli.kernels.dense import Body, Dense, Weights, body_of, dense, refuses_all_but_dense
from ffncli.kernels.kernel import Computes, Params, Steps, interprets_triton, register

FUNCTIONS = ("identity", "relu", "relu2", "sigmoid", "tanh", "silu", "quick_gelu", "gelu_tanh", "gelu")
BLOCK = 1024  # columns per elementwise program: 8 elements for each of its 128 threads
GROUP = 16  # tiles of tokens that programs visit for each tile of rows
Products = tuple[Tensor, Tensor]


# --- arguments fixed by a block ---------------------------------------------------------------------------------------


def refuses(steps: Steps) -> str | None:
    """Return why these kernels cannot compute a block: it must be dense, and its functions must have Triton code."""
    shape = dense(steps)
    if shape is None:
        return refuses_all_but_dense(steps)
    missing = next((op.function for op in _units(shape) if op.function not in FUNCTIONS), None)
    return missing and f"has no Triton code for {missing}"


def constants(shape: Dense) -> dict[str, Any]:
    """Return the compile-time arguments that the block determines."""
    act, lift = (tuple(getattr(op, field.name) for field in fields(op)) for op in _units(shape))
    return {"GATED": shape.gated, "SCALE": float(shape.gate_scale), "ACT": act, "LIFT": lift}


def widths(dtype: torch.dtype) -> dict[str, bool]:
    """Return the compile-time arguments that the dtype determines: 64-bit sums, 16-bit operands that must be cast."""
    return {"WIDE": dtype == torch.float64, "CAST": interprets_triton() and dtype.itemsize == 2}


def _units(shape: Dense) -> tuple[Activation, Activation]:
    return shape.act, shape.lift or Activation("identity")


class Tile(NamedTuple):
    """The tile that one program computes: `tokens` × `rows`, `columns` at a time, with `warps` of 32 threads."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int

    @property
    def options(self) -> dict[str, int]:
        """The tile as launch arguments."""
        return {
            "BM": self.tokens, "BN": self.rows, "BK": self.columns, "num_warps": self.warps, "num_stages": self.stages,
        }  # fmt: skip


def tile_for(tokens: int, dtype: torch.dtype) -> Tile:
    """Return the smallest tile for `tokens` tokens that wastes no loads. Tiles were chosen from the compiler's reports,
    not by timing.

    One token: one warp per row, whose threads load 16 bytes at a time, without tensor cores. The other tiles fit into
    the registers, and leave room for two programs in the shared memory of an H100 (227 KB).
    """
    size = dtype.itemsize
    if tokens <= 1:
        return Tile(1, 4, 512 // size, 4, 1)
    if tokens <= 16:
        return Tile(16, 32, 16, 4, 2) if size == 8 else Tile(16, 32, 256 // size, 4, 3)
    if size > 2:
        return Tile(64, 64, 32, 8, 3) if size == 4 else Tile(32, 32, 16, 4, 3)
    return Tile(64, 64, 64, 4, 4) if tokens <= 64 else Tile(128, 64, 64, 8, 3)


def launcher(body: Body, dtype: torch.dtype) -> Callable[[Tensor, Weights, Products | None], Tensor]:
    """Return f(x, weights, products) → the input of down [tokens, d_ff], before any norm; x and the weights may have
    any strides.

    `products` are two contiguous tensors of the same shape, which receive gate and up (in a plain block only the first
    is used).
    """
    from ffncli.kernels.in_triton.launched import hidden_kernel

    fixed = constants(body.shape) | widths(dtype)
    (second, second_bias), (first, first_bias) = body.up, body.gate if body.shape.gated else body.up

    def launch(x: Tensor, p: Weights, products: Products | None) -> Tensor:
        gate, up = p[first], p[second]
        hidden = x.new_empty(x.shape[0], up.shape[0])
        tile = tile_for(x.shape[0], dtype)
        grid = (-(-hidden.shape[0] // tile.tokens) * -(-hidden.shape[1] // tile.rows),)
        hidden_kernel[grid](
            x, gate, up, p[first_bias], p[second_bias], hidden, *(products or (None, None)),
            *hidden.shape, x.shape[1], *x.stride(), *gate.stride(), *up.stride(),
            **fixed, **tile.options, GROUP=GROUP,
        )  # fmt: skip
        return hidden

    return launch


# --- triton_act -------------------------------------------------------------------------------------------------------


@register(
    "triton_act",
    "with eager's matrix products, and one Triton kernel for all steps between them",
    needs=("triton",),
    refuses=refuses,
    trains=False,
    compiles=True,
)
def build_triton_act(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute down(act(gate(x)) · up(x)). Triton compiles at the first call with each dtype and each divisibility of
    the sizes by 16."""
    body, linear = body_of(steps), functional.linear
    middle = act_launcher(body.shape)
    (gate, gate_bias), (up, up_bias), (down, down_bias) = body.gate, body.up, body.down

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        lifted = linear(x, p[up], p[up_bias])
        driven = linear(x, p[gate], p[gate_bias]) if body.shape.gated else lifted
        hidden = middle(driven, lifted, torch.empty_like(lifted))
        del driven, lifted  # their memory is free for the next product
        return linear(body.norm(hidden, p), p[down], p[down_bias])

    return run


def act_launcher(shape: Dense) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return f(gate, up, out), which writes the input of down, before any norm, to the contiguous `out` [tokens, d_ff]
    and returns it.

    `gate` and `up` have the same shape and any strides; in a plain block they are the same tensor.
    """
    from ffncli.kernels.in_triton.launched import act_kernel

    fixed = constants(shape)

    def launch(gate: Tensor, up: Tensor, out: Tensor) -> Tensor:
        tokens, columns = out.shape
        grid = (tokens, -(-columns // BLOCK))
        wide = out.dtype == torch.float64
        act_kernel[grid](gate, up, out, columns, *gate.stride(), *up.stride(), **fixed, WIDE=wide, BLOCK=BLOCK)
        return out

    return launch


# --- fused_gate -------------------------------------------------------------------------------------------------------


def refuses_fused_gate(steps: Steps) -> str | None:
    """Return why fused_gate cannot compute a block: a norm before down would need its own backward pass."""
    shape = dense(steps)
    norm = "has no Triton code for a norm before down" if shape and shape.sub_norm else None
    return refuses(steps) or norm


@register(
    "fused_gate",
    "with one Triton kernel for all steps before down (gate, up, and everything after them), and torch's "
    "matrix product for down",
    needs=("triton",),
    refuses=refuses_fused_gate,
    compiles=True,
)
def build_fused_gate(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute down(act(gate(x)) · up(x)). Triton compiles at the first call, and again at the first call with
    gradients."""
    body = body_of(steps)
    block = FusedGate(body, launcher(body, dtype), backward_launcher(body.shape))

    def run(x: Tensor, params: Params) -> Tensor:
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (x, *params)):
            out: Tensor = _Trained.apply(block, x, *params)  # type: ignore[no-untyped-call]
            return out
        return block.output(x, params, None)

    return run


@dataclass(frozen=True)
class FusedGate:
    """A block, and its forward and backward launchers."""

    body: Body
    hidden: Callable[[Tensor, Weights, Products | None], Tensor]
    backward: Callable[[Products, Tensor], tuple[Tensor, Tensor, Tensor]]

    def output(self, x: Tensor, params: Params, products: Products | None) -> Tensor:
        """Return the block's output; `products`, if given, receive gate and up."""
        p: Weights = (*params, None)
        down, down_bias = self.body.down
        return functional.linear(self.hidden(x, p, products), p[down], p[down_bias])

    def gradients(self, d_out: Tensor, x: Tensor, products: Products, params: Params) -> list[Callable[[], Tensor]]:
        """Return the gradients of x and of each parameter, as functions that compute them on demand."""
        body = self.body
        d_gate, d_up, hidden = self.backward(products, d_out @ params[body.down[0]])

        def of_x() -> Tensor:
            d_x = d_up @ params[body.up[0]]
            return d_x.addmm_(d_gate, params[body.gate[0]]) if body.shape.gated else d_x

        of: list[Callable[[], Tensor]] = [of_x] * (len(params) + 1)  # the last is of what the block has not
        for (weight, bias), left, right in ((body.gate, d_gate, x), (body.up, d_up, x), (body.down, d_out, hidden)):
            of[weight], of[bias] = partial(torch.mm, left.T, right), partial(torch.sum, left, 0)
        return [of_x, *of[:-1]]


class _Trained(torch.autograd.Function):
    """The block with its backward pass, for which it keeps x, gate and up."""

    @staticmethod
    def forward(ctx: Any, block: FusedGate, x: Tensor, *params: Tensor) -> Tensor:
        gate = x.new_empty(x.shape[0], params[block.body.up[0]].shape[0])
        products = (gate, torch.empty_like(gate) if block.body.shape.gated else gate)
        ctx.block = block
        ctx.save_for_backward(x, *products, *params)
        return block.output(x, params, products)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, up, *params = ctx.saved_tensors
        _, *needed = ctx.needs_input_grad
        of = ctx.block.gradients(d_out, x, (gate, up), tuple(params))
        return (None, *(compute() if need else None for compute, need in zip(of, needed, strict=True)))


def backward_launcher(shape: Dense) -> Callable[[Products, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Return f((gate, up), d_hidden) → (gradient of gate, gradient of up, hidden), all contiguous [tokens, d_ff].

    In a plain block gate and up are the same tensor, and so are their gradients.
    """
    from ffncli.kernels.in_triton.launched import act_backward_kernel

    fixed = constants(shape)

    def launch(products: Products, d_hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        gate, up = products
        d_gate, hidden = torch.empty_like(gate), torch.empty_like(gate)
        d_up = torch.empty_like(up) if shape.gated else d_gate
        tokens, columns = gate.shape
        act_backward_kernel[(tokens, -(-columns // BLOCK))](
            gate, up, d_hidden, d_gate, d_up, hidden, columns, **fixed, WIDE=gate.dtype == torch.float64, BLOCK=BLOCK
        )
        return d_gate, d_up, hidden

    return launch


# --- decode -----------------------------------------------------------------------------------------------------------

# tokens of a tile → number of programs that fills an H100: about 16 or 4 on each of its 132 multiprocessors
ENOUGH = {1: 2048, 16: 512}
LEAST = 4  # minimum tiles of columns per part
SUMMED = 128  # columns per program of the sum


@register(
    "decode",
    "with fused_gate's kernel in narrow tiles; down is computed by partial sums over more programs, "
    "which are always added in the same order",
    needs=("triton",),
    refuses=refuses,
    trains=False,
    compiles=True,
    most_tokens=16,
)
def build_decode(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
    """Compute down(act(gate(x)) · up(x)); torch computes a norm before down, if there is one. Triton compiles at the
    first call."""
    body = body_of(steps)
    first, second, (down, down_bias) = launcher(body, dtype), split_launcher(dtype), body.down

    def run(x: Tensor, params: Params) -> Tensor:
        p: Weights = (*params, None)
        return second(body.norm(first(x, p, None), p), p[down], p[down_bias])

    return run


def splits(tokens: int, rows: int, columns: int, tile: Tile) -> tuple[int, int]:
    """Return (number of parts, columns per part) for splitting the columns. Both depend only on the sizes, so equal
    calls add in the same order."""
    programs = -(-tokens // tile.tokens) * -(-rows // tile.rows)
    wanted = max(1, min(ENOUGH.get(tile.tokens, 1) // max(1, programs), columns // (LEAST * tile.columns)))
    each = -(-columns // wanted)
    each += -each % tile.columns
    return -(-columns // each), each


def split_launcher(dtype: torch.dtype) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return f(x, weight, bias) → x · weightᵀ + bias, computed by partial sums; x and weight may have any strides."""
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
