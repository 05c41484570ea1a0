"""Right backward passes of a swiglu block without biases, of many styles; none may be accused."""

import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import linear, silu
from torch.utils.checkpoint import checkpoint


def plain(x, gate, up, down):
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def slope_of_silu(z):
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))


class Explicit(torch.autograd.Function):
    """Everything is saved, and every gradient is computed."""

    @staticmethod
    def forward(ctx, x, gate, up, down):
        left, right = linear(x, gate), linear(x, up)
        ctx.save_for_backward(x, gate, up, down, left, right)
        return linear(silu(left) * right, down)

    @staticmethod
    def backward(ctx, dy):
        x, gate, up, down, left, right = ctx.saved_tensors
        act = silu(left)
        d_hidden = dy @ down
        d_left, d_right = d_hidden * right * slope_of_silu(left), d_hidden * act
        return d_left @ gate + d_right @ up, d_left.T @ x, d_right.T @ x, dy.T @ (act * right)


class Recomputed(torch.autograd.Function):
    """Only the inputs are saved, in the new style, and only what is needed is computed."""

    @staticmethod
    def forward(x, gate, up, down):
        return plain(x, gate, up, down)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, gate, up, down = ctx.saved_tensors
        left, right = linear(x, gate), linear(x, up)
        act = silu(left)
        of_x, of_gate, of_up, of_down = ctx.needs_input_grad
        d_down = dy.T @ (act * right) if of_down else None
        d_hidden = dy @ down
        d_left, d_right = d_hidden * right * slope_of_silu(left), d_hidden * act
        return (
            d_left @ gate + d_right @ up if of_x else None,
            d_left.T @ x if of_gate else None,
            d_right.T @ x if of_up else None,
            d_down,
        )


class OwnBuffers(torch.autograd.Function):
    """Its temporaries are reused in place, those that nobody else sees."""

    @staticmethod
    def forward(ctx, x, gate, up, down):
        ctx.save_for_backward(x, gate, up, down)
        return plain(x, gate, up, down)

    @staticmethod
    def backward(ctx, dy):
        x, gate, up, down = ctx.saved_tensors
        left, right = linear(x, gate), linear(x, up)
        act, slope = silu(left), slope_of_silu(left)
        d_hidden = dy @ down
        d_down = dy.T @ (act * right)
        d_left = right.mul_(d_hidden).mul_(slope)
        d_right = d_hidden.mul_(act)
        dx = torch.addmm(d_left @ gate, d_right, up)
        return dx, d_left.T @ x, d_right.T @ x, d_down


class FusedGateUp(torch.autograd.Function):
    """One product for gate and up, forward and backward."""

    @staticmethod
    def forward(ctx, x, both, down):
        ctx.save_for_backward(x, both, down)
        left, right = linear(x, both).chunk(2, -1)
        return linear(silu(left) * right, down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, dy):
        x, both, down = ctx.saved_tensors
        left, right = linear(x, both).chunk(2, -1)
        act = silu(left)
        d_hidden = dy @ down
        d_both = torch.cat([d_hidden * right * slope_of_silu(left), d_hidden * act], -1)
        return d_both @ both, d_both.T @ x, dy.T @ (act * right)


class SumsInFloat64(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, gate, up, down):
        ctx.save_for_backward(x, gate, up, down)
        return plain(x, gate, up, down)

    @staticmethod
    def backward(ctx, dy):
        leaves = [t.detach().double().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            y = plain(*leaves)
        return tuple(g.to(dy.dtype) for g in torch.autograd.grad(y, leaves, dy.double()))


class SiluTimes(torch.autograd.Function):
    """Only the element-wise part is a Function, as in libraries of fused kernels."""

    @staticmethod
    def forward(ctx, left, right):
        ctx.save_for_backward(left, right)
        return silu(left) * right

    @staticmethod
    def backward(ctx, d_hidden):
        left, right = ctx.saved_tensors
        return d_hidden * right * slope_of_silu(left), d_hidden * silu(left)


class Products(torch.autograd.Function):
    """Only the product is a Function; dW is added up in blocks of 16 tokens."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dw = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        for start in range(0, len(x), 16):
            part = slice(start, start + 16)
            dw += (dy[part].T.to(dw.dtype)) @ x[part].to(dw.dtype)
        return dy @ weight, dw.to(weight.dtype)


class Once(torch.autograd.Function):
    """Its saved tensors are freed by the first pass; a second one is refused aloud."""

    @staticmethod
    def forward(ctx, x, gate, up, down):
        ctx.kept = [x, gate, up, down]
        return plain(x, gate, up, down)

    @staticmethod
    def backward(ctx, dy):
        if not ctx.kept:
            raise RuntimeError("its tensors are gone after the first pass")
        leaves = [t.detach().requires_grad_() for t in ctx.kept]
        ctx.kept.clear()
        with torch.enable_grad():
            return torch.autograd.grad(plain(*leaves), leaves, dy)


def explicit(x, gate, up, down):
    return Explicit.apply(x, gate, up, down)


def recomputed(x, gate, up, down):
    return Recomputed.apply(x, gate, up, down)


def own_buffers(x, gate, up, down):
    return OwnBuffers.apply(x, gate, up, down)


def fused_gate_up(x, gate, up, down):
    return FusedGateUp.apply(x, torch.cat([gate, up]), down)


def sums_in_float64(x, gate, up, down):
    return SumsInFloat64.apply(x, gate, up, down)


def silu_times(x, gate, up, down):
    return linear(SiluTimes.apply(linear(x, gate), linear(x, up)), down)


def products(x, gate, up, down):
    return Products.apply(silu(Products.apply(x, gate)) * Products.apply(x, up), down)


def once(x, gate, up, down):
    return Once.apply(x, gate, up, down)


def checkpointed(x, gate, up, down):
    return checkpoint(plain, x, gate, up, down, use_reentrant=False)


def chunked(x, gate, up, down):
    return torch.cat([explicit(part, gate, up, down) for part in x.split(5)])


def halves(x, gate, up, down):
    """The hidden units in two halves, whose outputs are added."""
    parts = zip(gate.chunk(2), up.chunk(2), down.chunk(2, 1), strict=True)
    return sum(explicit(x, g, u, d) for g, u, d in parts)


def einsums(x, gate, up, down):
    left, right = torch.einsum("td,fd->tf", x, gate), torch.einsum("td,fd->tf", x, up)
    return torch.einsum("tf,df->td", left * left.sigmoid() * right, down)


class FeedForward(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        return self.down(silu(self.gate(x)) * self.up(x))


def by_functional_call(x, gate, up, down):
    block = nn.Module()
    block.forward = lambda t: plain(t, block.gate, block.up, block.down)
    for name in ("gate", "up", "down"):
        block.register_parameter(name, nn.Parameter(torch.empty(0)))
    return functional_call(block, {"gate": gate, "up": up, "down": down}, (x,))


HONEST = (
    plain, explicit, recomputed, own_buffers, fused_gate_up, sums_in_float64, silu_times, products, once, checkpointed,
    chunked, halves, einsums, FeedForward, by_functional_call,
)  # fmt: skip
