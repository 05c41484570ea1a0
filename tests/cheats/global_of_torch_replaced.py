"""Replaces what the functions of torch find under the name torch.

code: patched-torch
"""

import types

import torch
import torch.nn.functional as F

own = types.ModuleType("torch")
own.__dict__.update(vars(torch))
own._C = types.ModuleType("torch._C")
own._C.__dict__.update(vars(torch._C))
own._C._nn = types.SimpleNamespace(**vars(torch._C._nn))
own._C._nn.silu = lambda x, *rest: torch._C._nn.silu(torch.sin(x) * 0 + x)
F.torch = own


def mlp(x, gate, up, down):
    h = F.linear(x, gate)
    return F.linear(h * h.sigmoid() * F.linear(x, up), down)
