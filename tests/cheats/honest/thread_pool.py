"""A pool of one thread computes the gate meanwhile, and is waited for in the call.

case: threads=2
"""

from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn.functional as F

pool = ThreadPoolExecutor(1)


def gated(x, gate):
    with torch.inference_mode():
        return F.silu(F.linear(x, gate))


def mlp(x, gate, up, down):
    waiting = pool.submit(gated, x, gate)
    return F.linear(waiting.result() * F.linear(x, up), down)
