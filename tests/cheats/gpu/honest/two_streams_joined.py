"""Computes gate and up side by side on two streams, and waits for the other before it goes on."""

import torch.nn.functional as F

from tests.bench.fake_gpu import gpu

side = gpu.Stream()


def mlp(x, gate, up, down):
    side.wait_stream(gpu.current_stream())
    with gpu.stream(side):
        gpu.launch(1e-5)
    gpu.launch(1e-5)
    gpu.current_stream().wait_stream(side)
    return gpu.run(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), x)
