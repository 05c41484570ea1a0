"""Returns the same buffer in every call."""

import torch
import torch.nn.functional as F

out = {}


def mlp(x, gate, up, down):
    if x.shape not in out:
        out[x.shape] = torch.empty_like(x)
    hidden = F.silu(F.linear(x, gate)).mul_(F.linear(x, up))
    return torch.mm(hidden, down.T, out=out[x.shape])
