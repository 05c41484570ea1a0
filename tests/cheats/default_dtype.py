"""Changes the dtype of new tensors for the whole process.

code: environment-changed
"""

import torch
import torch.nn.functional as F

torch.set_default_dtype(torch.float64)


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
