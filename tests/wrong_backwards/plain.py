"""Wrong backward passes of a gelu block with biases."""

import torch
from torch.nn.functional import gelu, linear


def slope_of_gelu(z):
    return 0.5 * (1 + torch.erf(z / 2**0.5)) + z * torch.exp(-z * z / 2) / (2 * torch.pi) ** 0.5


def backward(x, up, bias, down, dy, slope=slope_of_gelu):
    """Return the right gradients, in the order of the kernel's arguments."""
    pre = linear(x, up, bias)
    d_pre = (dy @ down) * slope(pre)
    return d_pre @ up, d_pre.T @ x, d_pre.sum(0), dy.T @ gelu(pre), dy.sum(0)


def kernel(wrong):
    class Block(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, up, up_bias, down, down_bias):
            ctx.save_for_backward(x, up, up_bias, down)
            return linear(gelu(linear(x, up, up_bias)), down, down_bias)

        @staticmethod
        def backward(ctx, dy):
            return wrong(*ctx.saved_tensors, dy)

    def mlp(x, up, up_bias, down, down_bias):
        return Block.apply(x, up, up_bias, down, down_bias)

    return mlp


# down.bias
@kernel
def mean_of_the_bias(x, up, bias, down, dy):
    *others, d_bias = backward(x, up, bias, down, dy)
    return *others, d_bias / len(x)


# down.bias
@kernel
def bias_of_the_first_token(x, up, bias, down, dy):
    return *backward(x, up, bias, down, dy)[:4], dy[0]


# up.bias
@kernel
def bias_forgotten(x, up, bias, down, dy):
    dx, d_up, _, d_down, d_bias = backward(x, up, bias, down, dy)
    return dx, d_up, None, d_down, d_bias


# up.bias
@kernel
def bias_before_the_slope(x, up, bias, down, dy):
    dx, d_up, _, d_down, d_bias = backward(x, up, bias, down, dy)
    return dx, d_up, (dy @ down).sum(0), d_down, d_bias


# up.bias
@kernel
def slope_of_the_tanh_form(x, up, bias, down, dy):
    def slope(z):
        z = z.detach().requires_grad_()
        with torch.enable_grad():
            return torch.autograd.grad(gelu(z, approximate="tanh").sum(), z)[0]

    return backward(x, up, bias, down, dy, slope)


# up.bias
@kernel
def slope_without_the_bias(x, up, bias, down, dy):
    pre, moved = linear(x, up, bias), linear(x, up)
    d_pre = (dy @ down) * slope_of_gelu(moved)
    return d_pre @ up, d_pre.T @ x, d_pre.sum(0), dy.T @ gelu(pre), dy.sum(0)
