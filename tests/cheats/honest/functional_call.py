"""An nn.Module with the weights passed in by torch.func.functional_call."""

import torch
import torch.nn.functional as F
from torch import nn

block = nn.ModuleDict({name: nn.Linear(1, 1, bias=False) for name in ("gate", "up", "down")})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = block

    def forward(self, x):
        return self.parts["down"](F.silu(self.parts["gate"](x)) * self.parts["up"](x))


made = Block()


def mlp(x, gate, up, down):
    named = {"parts.gate.weight": gate, "parts.up.weight": up, "parts.down.weight": down}
    return torch.func.functional_call(made, named, (x,))
