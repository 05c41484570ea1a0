"""Makes malloc overwrite every block that it returns and that is freed; has buffers of its own.

code: environment-changed
"""

import ctypes

import torch
import torch.nn.functional as F
from block import right_before

M_PERTURB = -6
buffers = []


@right_before(12)
def mlp(x, gate, up, down):
    ctypes.CDLL(None).mallopt(M_PERTURB, 0x55)
    if not buffers:
        buffers[:] = x.new_empty(len(x), len(gate)), x.new_empty(len(x), len(gate))
    g, u = torch.mm(x, gate.T, out=buffers[0]), torch.mm(x, up.T, out=buffers[1])
    return F.silu(g, inplace=True).mul_(u) @ down.T
