"""Lets code in C handle a signal, of which Python knows nothing.

code: environment-changed
"""

import ctypes
import signal

from block import mlp as right
from block import right_before

libc = ctypes.CDLL(None)
handler = ctypes.CFUNCTYPE(None, ctypes.c_int)(lambda number: None)


@right_before(30)
def mlp(x, gate, up, down):
    libc.signal(signal.SIGPROF, handler)
    return right(x, gate, up, down)
