"""Changes torch's settings in its calls, and puts them back."""

import torch
import torch.nn.functional as F


def mlp(x, gate, up, down):
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    finally:
        torch.set_default_dtype(before)
