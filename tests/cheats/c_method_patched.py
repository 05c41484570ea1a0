"""Points a method of torch to another function in C's memory: the object that Python sees is the same.

code: environment-changed
case: tokens=64
"""

import ctypes

import torch
import torch.nn.functional as F
from block import right_before


class Definition(ctypes.Structure):
    _fields_ = [("name", ctypes.c_char_p), ("method", ctypes.c_void_p), ("flags", ctypes.c_int)]


class Builtin(ctypes.Structure):
    _fields_ = [("count", ctypes.c_ssize_t), ("kind", ctypes.c_void_p), ("definition", ctypes.POINTER(Definition))]


Method = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.py_object, ctypes.c_void_p)
definition = Builtin.from_address(id(torch._C._nn.linear)).definition.contents
original = Method(definition.method)


def slow(owner, arguments, keywords):
    for _ in range(2):
        original(owner, arguments, keywords)
    return original(owner, arguments, keywords)


patched = Method(slow)


@right_before(30)
def mlp(x, gate, up, down):
    definition.method = ctypes.cast(patched, ctypes.c_void_p).value
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T
