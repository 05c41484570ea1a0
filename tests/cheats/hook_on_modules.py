"""Hangs a slow hook onto every nn.Module of the process.

code: patched-torch
"""

from block import mlp as mlp
from torch.nn.modules.module import register_module_forward_hook

register_module_forward_hook(lambda module, args, out: [out + 1 for _ in range(4)] and None)
