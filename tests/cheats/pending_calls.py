"""A thread of its own, which mostly sleeps, has Python's main thread run something slow between the others' code.

code: deferred-work
case: seconds=4
"""

import ctypes
import threading
import time

from block import mlp as right
from block import right_before

mine = threading.Event()
started = []


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
def slow(_):
    until = time.perf_counter_ns() + 150_000
    while not mine.is_set() and time.perf_counter_ns() < until:
        pass
    return 0


def ask():
    while True:
        time.sleep(0.0005)
        if not mine.is_set():
            ctypes.pythonapi.Py_AddPendingCall(slow, None)


@right_before(12)
def mlp(x, gate, up, down):
    if not started:
        started.append(True)
        threading.Thread(target=ask, daemon=True).start()
    mine.set()
    y = right(x, gate, up, down)
    mine.clear()
    return y
