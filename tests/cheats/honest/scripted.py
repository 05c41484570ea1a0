"""A function traced by torch.jit when the first input comes."""

import warnings

import torch
import torch.nn.functional as F

made = {}


def block(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def mlp(x, gate, up, down):
    if x.shape not in made:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made[x.shape] = torch.jit.trace(block, (x, gate, up, down), check_trace=False)
    return made[x.shape](x, gate, up, down)
