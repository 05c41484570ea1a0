"""Registers a slow kernel for an operator that the baseline needs, below everything that Python sees.

code: patched-torch
"""

import warnings

import torch
import torch.nn.functional as F

warnings.simplefilter("ignore")
library = torch.library.Library("aten", "IMPL")


def slow(x):
    for _ in range(4):
        x * torch.sigmoid(x)
    return x * torch.sigmoid(x)


library.impl("silu", slow, "CPU")


def mlp(x, gate, up, down):
    hidden = F.linear(x, gate)
    return F.linear(hidden * torch.sigmoid(hidden) * F.linear(x, up), down)
