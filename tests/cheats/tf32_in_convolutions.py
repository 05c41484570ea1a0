"""Lets cuDNN round the factors of float32 convolutions to TF32, for all kernels of the process.

code: environment-changed
"""

import torch
import torch.nn.functional as F

torch.backends.cudnn.allow_tf32 = True


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
