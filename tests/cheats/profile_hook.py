"""Sets a profiling function, which Python calls for every call of the others.

code: environment-changed
"""

import sys

import torch.nn.functional as F


def slow(frame, event, argument):
    for _ in range(20):
        pass


def mlp(x, gate, up, down):
    sys.setprofile(None)
    y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    sys.setprofile(slow)
    return y
