"""Packs the weights of every address once and keeps them, and the weights with them, so that no address comes twice."""

import torch
import torch.nn.functional as F

packed = {}


def mlp(x, gate, up, down):
    key = gate.data_ptr(), up.data_ptr()
    if key not in packed:
        packed[key] = torch.cat([gate, up]), gate, up
    left, right = F.linear(x, packed[key][0]).chunk(2, -1)
    return F.linear(F.silu(left) * right, down)
