"""Binds the process to another core, the last one.

code: environment-changed
"""

import os

import torch.nn.functional as F

os.sched_setaffinity(0, {os.cpu_count() - 1})


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
