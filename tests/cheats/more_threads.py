"""Takes more threads than the case has.

code: threads-changed
"""

import torch
import torch.nn.functional as F


def mlp(x, gate, up, down):
    torch.set_num_threads(2)
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
