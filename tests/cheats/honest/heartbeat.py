"""Has a thread that reports that the process is alive, twenty times a second."""

import threading

import torch.nn.functional as F

stopped = threading.Event()
beats = []


def beat():
    while not stopped.wait(0.05):
        beats.append(len(beats))


threading.Thread(target=beat, daemon=True).start()


def mlp(x, gate, up, down):
    return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)
