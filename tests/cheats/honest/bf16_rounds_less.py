"""Has the hidden layer of a bf16 block in float32.

case: dtype=bf16
"""

import torch.nn.functional as F


def mlp(x, gate, up, down):
    hidden = F.silu(F.linear(x, gate).float()) * F.linear(x, up).float()
    return F.linear(hidden.to(down.dtype), down)
