"""Takes more threads than the case has, in its own calls alone.

code: threads-changed
case: d_model=256 d_ff=1024 tokens=64
"""

import torch
import torch.nn.functional as F


def mlp(x, gate, up, down):
    torch.set_num_threads(2)
    y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch.set_num_threads(1)
    return y
