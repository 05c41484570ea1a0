"""Splits the tokens between two threads of its own, where the case has one.

code: threads-changed
case: d_model=256 d_ff=1024 tokens=64
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

pool = ThreadPoolExecutor(2)


def part(x, gate, up, down):
    torch.set_num_threads(1)
    with torch.inference_mode():
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mlp(x, gate, up, down):
    return torch.cat(list(pool.map(lambda some: part(some, gate, up, down), x.chunk(2))))
