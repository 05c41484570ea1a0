"""Sets in C what libraries read when they are first used; Python's copy of the environment stays as it was.

code: environment-changed
"""

import ctypes

from block import mlp as mlp

ctypes.CDLL(None).setenv(b"ONEDNN_MAX_CPU_ISA", b"SSE41", 1)
