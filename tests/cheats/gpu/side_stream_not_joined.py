"""Launches its work on a stream of its own, which the stream that is timed does not wait for.

code: works-on-another-stream
"""

import torch.nn.functional as F

from tests.bench.fake_gpu import gpu

side = gpu.Stream()


def mlp(x, gate, up, down):
    with gpu.stream(side):
        return gpu.run(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), x)
