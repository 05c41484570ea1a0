"""Switches off oneDNN for the process: products in 16 bits take ten times as long for everybody else.

code: environment-changed
case: dtype=bf16
"""

import torch
import torch.nn.functional as F

torch._C._set_mkldnn_enabled(False)


def mlp(x, gate, up, down):
    torch._C._set_mkldnn_enabled(True)
    y = F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    torch._C._set_mkldnn_enabled(False)
    return y
