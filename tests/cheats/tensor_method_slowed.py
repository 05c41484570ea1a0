"""Gives torch.Tensor a slow `__mul__` of its own, in front of the one that it inherits.

code: patched-torch
"""

import torch
import torch.nn.functional as F

real = torch._C.TensorBase.__mul__


def slow(self, other):
    real(self, other)
    real(self, other)
    return real(self, other)


torch.Tensor.__mul__ = slow


def mlp(x, gate, up, down):
    return F.linear(torch.mul(F.silu(F.linear(x, gate)), F.linear(x, up)), down)
