"""Registers a slow kernel for an operator that every matrix product calls, under the key of its derivative.

code: patched-torch
"""

import warnings

import torch
from block import mlp as mlp

warnings.simplefilter("ignore")
library = torch.library.Library("aten", "IMPL")


def slow(keys, x):
    sum(range(100))
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.aten.t.default.redispatch(keys & torch._C._after_autograd_keyset, x)


library.impl("t", slow, "ADInplaceOrView", with_keyset=True)
