"""Writes to the weights through numpy, which leaves their version as it was.

code: changed-weights
"""

import torch.nn.functional as F

calls = 0


def mlp(x, gate, up, down):
    global calls
    calls += 1
    y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    if calls > 20:
        down.numpy()[0, :3] = 0
    return y
