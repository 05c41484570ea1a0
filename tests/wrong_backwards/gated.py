"""Wrong backward passes of a swiglu block without biases."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, silu


class Saved(NamedTuple):
    """The tensors of a forward pass: x and y [tokens, d_model], left, right, act and hidden [tokens, d_ff]."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    left: Tensor
    right: Tensor
    act: Tensor
    hidden: Tensor


class Gradients(NamedTuple):
    """The gradients in the order of the kernel's arguments."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor


def forward(x, gate, up, down):
    left, right = linear(x, gate), linear(x, up)
    act = silu(left)
    hidden = act * right
    return linear(hidden, down), Saved(x, gate, up, down, left, right, act, hidden)


def slope_of_silu(z):
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


def backward(saved, dy, slope=slope_of_silu):
    """Return the right gradients."""
    d_hidden = dy @ saved.down
    return below(saved, dy, d_hidden * saved.right * slope(saved.left), d_hidden * saved.act)


def below(saved, dy, d_left, d_right):
    """Return the gradients, given those of `left` and `right` [tokens, d_ff]."""
    dx = d_left @ saved.gate + d_right @ saved.up
    return Gradients(dx, d_left.T @ saved.x, d_right.T @ saved.x, dy.T @ saved.hidden)


def kernel(wrong):
    """Return a kernel whose backward pass is `wrong(saved, dy, needs)`; `needs` says which inputs need a gradient."""

    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, gate, up, down):
            y, saved = forward(x, gate, up, down)
            ctx.save_for_backward(*saved)
            return y

        @staticmethod
        def backward(ctx, dy):
            return tuple(wrong(Saved(*ctx.saved_tensors), dy, ctx.needs_input_grad))

    def mlp(x, gate, up, down):
        return Block.apply(x, gate, up, down)

    return mlp


# x
@kernel
def every_row_in_row_0(saved, dy, needs):
    right = backward(saved, dy)
    dx = torch.zeros_like(right.x)
    dx[0] = right.x.sum(0)
    return right._replace(x=dx)


# x
@kernel
def up_half_of_dx_lost(saved, dy, needs):
    d_left = (dy @ saved.down) * saved.right * slope_of_silu(saved.left)
    return backward(saved, dy)._replace(x=d_left @ saved.gate)


# x
@kernel
def gate_half_of_dx_lost(saved, dy, needs):
    return backward(saved, dy)._replace(x=((dy @ saved.down) * saved.act) @ saved.up)


# x
@kernel
def dx_counted_twice(saved, dy, needs):
    """As from an all-reduce of a gradient that every rank already has."""
    right = backward(saved, dy)
    return right._replace(x=2 * right.x)


# x
@kernel
def residual_added_to_dx(saved, dy, needs):
    right = backward(saved, dy)
    return right._replace(x=right.x + dy)


# x
@kernel
def last_tile_of_tokens_dropped(saved, dy, needs):
    right = backward(saved, dy)
    dx = right.x.clone()
    dx[len(dx) // 16 * 16 :] = 0
    return right._replace(x=dx)


# down.weight
@kernel
def transposed_dw(saved, dy, needs):
    right = backward(saved, dy)
    return right._replace(down=(saved.hidden.T @ dy).reshape(right.down.shape))


# gate.weight
@kernel
def last_tile_of_units_dropped(saved, dy, needs):
    right = backward(saved, dy)
    gate = right.gate.clone()
    gate[len(gate) // 16 * 16 :] = 0
    return right._replace(gate=gate)


# down.weight
@kernel
def last_tile_of_the_sum_dropped(saved, dy, needs):
    full = len(dy) // 16 * 16
    return backward(saved, dy)._replace(down=dy[:full].T @ saved.hidden[:full])


# up.weight
@kernel
def mean_over_tokens(saved, dy, needs):
    right = backward(saved, dy)
    return right._replace(up=right.up / len(dy))


# down.weight
@kernel
def sums_in_bf16(saved, dy, needs):
    total = torch.zeros_like(saved.down, dtype=torch.bfloat16)
    for dy_of_token, hidden in zip(dy, saved.hidden, strict=True):
        total += torch.outer(dy_of_token, hidden).bfloat16()
    return backward(saved, dy)._replace(down=total.to(saved.down.dtype))


def rounded(tensor, bits):
    mantissa, exponent = torch.frexp(tensor)
    return torch.ldexp((mantissa * 2.0**bits).round(), exponent - bits)


# down.weight
@kernel
def factors_in_tf32(saved, dy, needs):
    return backward(Saved(*(rounded(t, 11) for t in saved)), rounded(dy, 11))


# up.weight
@kernel
def d_hidden_in_fp16(saved, dy, needs):
    d_hidden = (dy @ saved.down).half().to(dy.dtype)
    return below(saved, dy, d_hidden * saved.right * slope_of_silu(saved.left), d_hidden * saved.act)


# gate.weight
@kernel
def slope_of_gelu(saved, dy, needs):
    def slope(z):
        return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5

    return backward(saved, dy, slope)


# gate.weight
@kernel
def slope_of_swish_1_702(saved, dy, needs):
    def slope(z):
        s = torch.sigmoid(1.702 * z)
        return s * (1 + 1.702 * z * (1 - s))

    return backward(saved, dy, slope)


# gate.weight
@kernel
def slope_at_the_output(saved, dy, needs):
    d_hidden = dy @ saved.down
    return below(saved, dy, d_hidden * saved.right * slope_of_silu(saved.act), d_hidden * saved.act)


# gate.weight
@kernel
def slope_left_out(saved, dy, needs):
    return backward(saved, dy, torch.ones_like)


# gate.weight
@kernel
def slope_without_its_second_term(saved, dy, needs):
    return backward(saved, dy, torch.sigmoid)


# up.weight
@kernel
def left_instead_of_act(saved, dy, needs):
    d_hidden = dy @ saved.down
    d_left = d_hidden * saved.right * slope_of_silu(saved.left)
    return below(saved, dy, d_left, d_hidden * saved.left)


# up.weight
@kernel
def gate_and_up_swapped(saved, dy, needs):
    right = backward(saved, dy)
    return right._replace(gate=right.up, up=right.gate)


# down.weight
@kernel
def dy_of_a_sum_assumed(saved, dy, needs):
    return backward(saved, torch.ones_like(dy))


# dy as a transposed matrix
@kernel
def contiguous_dy_assumed(saved, dy, needs):
    return backward(saved, dy.as_strided(dy.shape, (dy.shape[1], 1)))


_KEPT = {}


# 1 token
@kernel
def kept_by_the_address_of_x(saved, dy, needs):
    key = saved.x.data_ptr(), tuple(dy.shape), dy.stride(), tuple(needs)
    if key not in _KEPT:
        _KEPT[key] = backward(saved, dy)
    return _KEPT[key]


# a second pass with retain_graph
@kernel
def written_over_saved_tensors(saved, dy, needs):
    right = backward(saved, dy)
    saved.hidden.data.mul_(0.5)
    return right


# a second pass with retain_graph
@kernel
def written_over_dy(saved, dy, needs):
    right = backward(saved, dy)
    if dy.is_contiguous():
        dy.data.mul_(0.5)
    return right


# x frozen
@kernel
def weights_only_with_x(saved, dy, needs):
    right = backward(saved, dy)
    return right if needs[0] else (None, torch.zeros_like(right.gate), *right[2:])


# all weights frozen
@kernel
def dx_only_with_weights(saved, dy, needs):
    right = backward(saved, dy)
    d_right = (dy @ saved.down) * saved.act
    return right if any(needs[1:]) else (d_right @ saved.up, None, None, None)


# the same numbers again
@kernel
def noise_in_every_pass(saved, dy, needs):
    right = backward(saved, dy)
    return right._replace(x=right.x * (1 + 1e-7 * torch.randn_like(right.x)))


class OwnAccumulation(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        y, saved = forward(x, gate, up, down)
        ctx.save_for_backward(*saved)
        ctx.leaves = gate, up, down
        return y

    @staticmethod
    def backward(ctx, dy):
        right = backward(Saved(*ctx.saved_tensors), dy)
        for leaf, gradient in zip(ctx.leaves, right[1:], strict=True):
            if leaf.requires_grad:
                leaf.grad = gradient
        return right.x if ctx.needs_input_grad[0] else None, None, None, None


# accumulated over two inputs
def overwrites_what_was_accumulated(x, gate, up, down):
    return OwnAccumulation.apply(x, gate, up, down)


# gate.weight
def gate_detached(x, gate, up, down):
    return linear(silu(linear(x, gate)).detach() * linear(x, up), down)


# down.weight
def down_as_data(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down.data)


# x
def x_detached_before_up(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x.detach(), up), down)
