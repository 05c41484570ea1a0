"""Starts processes in its first call, as a kernel does that compiles then: one ends, the other one stays and waits."""

import subprocess
import sys

import torch.nn.functional as F

waiting = []


def mlp(x, gate, up, down):
    if not waiting:
        subprocess.run([sys.executable, "-c", "sum(range(10**6))"], check=True)
        later = "sum(range(10**7)); input()"
        waiting.append(subprocess.Popen([sys.executable, "-c", later], stdin=subprocess.PIPE))
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
