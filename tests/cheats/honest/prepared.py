"""A Kernel whose prepare packs gate and up into one matrix."""

import torch
import torch.nn.functional as F

from ffncli.kernels.kernel import Kernel


def prepare(steps, weights):
    return torch.cat([weights["gate.weight"], weights["up.weight"]]), weights["down.weight"].contiguous()


def build(steps, device, dtype):
    def compute(x, params):
        both, down = params
        gate, up = F.linear(x, both).chunk(2, -1)
        return F.linear(F.silu(gate) * up, down)

    return compute


mlp = Kernel("prepared", build, prepare)
