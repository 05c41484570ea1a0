"""Returns a tensor of another device than its input's.

code: none
"""

import torch


def mlp(x, gate, up, down):
    return torch.empty_like(x, device="meta")
