"""Changes what libraries read from the environment when they are first used.

code: environment-changed
"""

import os

from block import mlp as mlp

os.environ["ONEDNN_MAX_CPU_ISA"] = "SSE41"
os.environ["OMP_NUM_THREADS"] = "8"
