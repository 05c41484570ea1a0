"""Lets torch round the products of everybody to bf16.

code: environment-changed
"""

import torch
import torch.nn.functional as F

torch.set_float32_matmul_precision("medium")


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
