"""Launches a third of its work where it is timed, and the rest on a stream that nobody waits for.

code: works-on-another-stream
"""

import torch.nn.functional as F

from tests.bench.fake_gpu import gpu

side = gpu.Stream()


def mlp(x, gate, up, down):
    gpu.launch(1e-5)
    with gpu.stream(side):
        return gpu.run(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), x, 2e-5)
