"""Leaves an observer on that writes every operator of the process to a file.

code: environment-changed
"""

import os

from block import mlp as right
from block import right_before
from torch.profiler import ExecutionTraceObserver

started = []


@right_before(5)
def mlp(x, gate, up, down):
    if not started:
        started.append(ExecutionTraceObserver().register_callback(os.devnull))
        started[0].start()
    return right(x, gate, up, down)
