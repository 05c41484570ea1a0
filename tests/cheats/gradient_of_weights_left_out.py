"""Returns zeros for the gradients of the weights once it has been called often; that of the input is right.

code: wrong-when-timed
case: passes=forward+backward
"""

import torch
import torch.nn.functional as F

calls = 0


class Block(torch.autograd.Function):
    @staticmethod
    def forward(context, x, gate, up, down):
        context.save_for_backward(x, gate, up, down)
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    @staticmethod
    def backward(context, gradient):
        global calls
        calls += 1
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in context.saved_tensors]
            x, gate, up, down = leaves
            y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
        if calls < 20:
            return torch.autograd.grad(y, leaves, gradient)
        (of_x,) = torch.autograd.grad(y, [x], gradient)
        return of_x, *(torch.zeros_like(t) for t in leaves[1:])


def mlp(x, gate, up, down):
    return Block.apply(x, gate, up, down)
