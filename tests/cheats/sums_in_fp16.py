"""Lets a GPU keep the sums of fp16 products in fp16, for all kernels of the process.

code: environment-changed
"""

import torch
import torch.nn.functional as F

torch.backends.cuda.matmul.allow_fp16_accumulation = True


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
