"""A plain function on a bf16 block.

case: dtype=bf16
"""

import torch.nn.functional as F


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
