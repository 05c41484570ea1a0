"""A plain function on many copies of its weights.

case: cache=cold-weights
"""

import torch.nn.functional as F


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
