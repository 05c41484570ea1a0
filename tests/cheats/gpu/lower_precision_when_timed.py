"""Rounds its factors to bf16 once it is timed, as a GPU does when TF32 is switched on for the length of a call.

code: wrong-when-timed
"""

import torch
import torch.nn.functional as F

from tests.bench.fake_gpu import gpu

calls = 0


def mlp(x, gate, up, down):
    global calls
    calls += 1

    def work():
        a, g, u, d = (t if calls < 10 else t.to(torch.bfloat16).float() for t in (x, gate, up, down))
        return F.linear(F.silu(F.linear(a, g)) * F.linear(a, u), d)

    return gpu.run(work, x)
