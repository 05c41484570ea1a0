"""An nn.Module whose gate and up are one matrix.

case: kernel=MLP
"""

import torch
import torch.nn.functional as F
from torch import nn


class MLP(nn.Module):
    def __init__(self, d_model, d_ff):
        super().__init__()
        self.w12 = nn.Linear(d_model, 2 * d_ff, bias=False)
        self.w3 = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x):
        gate, up = torch.chunk(self.w12(x), 2, dim=-1)
        return self.w3(F.silu(gate) * up)
