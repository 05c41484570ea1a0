"""Computes every call with the first copy of the weights that it saw: those stay in the cache.

code: stale-weights
case: cache=cold-weights
"""

import torch.nn.functional as F

kept = []


def mlp(x, gate, up, down):
    if not kept:
        kept.extend(weight.clone() for weight in (gate, up, down))
    gate, up, down = kept
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
