"""Lets OpenMP take fewer threads on a busy machine, except in its own calls.

code: threads-changed
case: threads=2 tokens=64 d_model=256 d_ff=1024
"""

import ctypes

from block import mlp as right
from block import right_before

with open("/proc/self/maps") as file:
    openmp = ctypes.CDLL(next(line.split()[-1] for line in file if "omp" in line and ".so" in line))


@right_before(5)
def mlp(x, gate, up, down):
    openmp.omp_set_dynamic(0)
    y = right(x, gate, up, down)
    openmp.omp_set_dynamic(1)
    return y
