"""Threads of torch compute after its calls; they never wait for Python.

code: deferred-work | threads-changed
"""

import torch
from block import mlp as right
from block import right_before

ones = torch.ones(20000)


@torch.jit.script
def burn(x: torch.Tensor):
    for _ in range(40):
        x = torch.sin(x)
    return x


@torch.jit.script
def start(x: torch.Tensor):
    return torch.jit.fork(burn, x)


@right_before(12)
def mlp(x, gate, up, down):
    y = right(x, gate, up, down)
    start(ones)
    return y
