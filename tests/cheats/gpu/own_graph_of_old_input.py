"""Records a graph of its first call when it starts to be timed, over a copy of that input, and replays it.

code: wrong-when-timed
"""

import torch.nn.functional as F

from tests.bench.fake_gpu import gpu

calls = 0
recorded = []


def mlp(x, gate, up, down):
    global calls
    calls += 1
    if calls < 10:
        return gpu.run(lambda: F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down), x)
    if not recorded:
        old = x.clone()
        recorded.extend(
            gpu.captured(lambda: gpu.run(lambda: F.linear(F.silu(F.linear(old, gate)) * F.linear(old, up), down), x))
        )
    graph, out = recorded
    graph.replay()
    return out
