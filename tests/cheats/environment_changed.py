"""Changes what libraries read from the environment when they are first used.

code: environment-changed
"""

import os

import torch.nn.functional as F

os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
os.environ["OMP_NUM_THREADS"] = "8"


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
