"""Enters a mode that sees every operator of the process, and never leaves it.

code: patched-torch
"""

from block import mlp as mlp
from torch.utils._python_dispatch import TorchDispatchMode


class Slow(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


Slow().__enter__()
