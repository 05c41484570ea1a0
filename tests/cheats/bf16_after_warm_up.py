"""Computes its first hundred calls in float32, all others in bf16, with weights that it keeps in bf16.

code: lower-precision
"""

import torch.nn.functional as F

calls, kept = 0, None


def mlp(x, gate, up, down):
    global calls, kept
    calls += 1
    if calls < 100:
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
    if kept is None:
        kept = [weight.bfloat16() for weight in (gate, up, down)]
    narrow = x.bfloat16()
    return F.linear(F.silu(F.linear(narrow, kept[0])) * F.linear(narrow, kept[1]), kept[2]).float()
