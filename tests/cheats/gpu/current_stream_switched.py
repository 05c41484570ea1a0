"""Makes another stream the current one for its launches alone, and switches back before it returns.

code: works-on-another-stream
"""

import torch.nn.functional as F

from tests.bench.fake_gpu import gpu

side = gpu.Stream()


def mlp(x, gate, up, down):
    before, gpu.current = gpu.current, side.name  # as torch.cuda.set_stream does
    out = gpu.run(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), x)
    gpu.current = before
    return out
