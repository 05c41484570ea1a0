"""What cheats share: the block computed as it should be, and a kernel that does so in its first calls.

A file with a kernel may import its neighbours; `from block import mlp as mlp` gives it a kernel that is right in every
call, where the cheat is what else the file does.
"""

from functools import wraps

import torch.nn.functional as F


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)


def right_before(call):
    """The kernel below is right until its call of that number, and from then on what it says."""

    def decorated(cheat):
        calls = 0

        @wraps(cheat)
        def kernel(x, gate, up, down):
            nonlocal calls
            calls += 1
            return (mlp if calls < call else cheat)(x, gate, up, down)

        return kernel

    return decorated
