"""Makes malloc give every freed block back to the system, and ask for it again: page by page, for every output.

code: environment-changed
"""

import ctypes

from block import mlp as right
from block import right_before

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD = -1, -2, -3


@right_before(12)
def mlp(x, gate, up, down):
    libc = ctypes.CDLL(None)
    libc.mallopt(M_TRIM_THRESHOLD, 0), libc.mallopt(M_TOP_PAD, 0), libc.mallopt(M_MMAP_THRESHOLD, 4096)
    return right(x, gate, up, down)
