"""Leaves the process in the class of those that compute only where no other process does; in its calls it is not.

code: environment-changed
"""

import os

from block import mlp as right


def mlp(x, gate, up, down):
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    y = right(x, gate, up, down)
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    return y
