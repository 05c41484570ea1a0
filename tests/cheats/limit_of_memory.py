"""Lowers the limits of the process, in its first calls; allocates nothing itself then.

code: environment-changed
"""

import resource

from block import mlp as right
from block import right_before


@right_before(2)
def mlp(x, gate, up, down):
    for kind in (resource.RLIMIT_STACK, resource.RLIMIT_NPROC):
        resource.setrlimit(kind, (1 << 20, resource.getrlimit(kind)[1]))
    return right(x, gate, up, down)
