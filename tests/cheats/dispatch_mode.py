"""Enters a mode that sees every operator of the process, and never leaves it.

code: patched-torch
"""

import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Slow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


Slow().__enter__()


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
