"""Counts its calls and prints now and then; the numbers play no part."""

import sys

import torch.nn.functional as F

calls = 0


def mlp(x, gate, up, down):
    global calls
    calls += 1
    if calls & (calls - 1) == 0:
        print(calls, file=sys.stderr, end=" ")
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
