"""A GPU's memory: the most that a call takes, and a buffer that empties the cache."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ffncli.bench.clock import Call
from ffncli.bench.machine import llc_bytes

Cuda: TypeAlias = Any

_TIMES = 3  # the cache; what is written last pushes out all else


def peak_memory(call: Call, device: str, cuda: Cuda = torch.cuda) -> int | None:
    """Bytes that a call holds at most beyond what was held before it, its output among them; None on a CPU.

    Of a plain call, not of a graph's replay, whose memory was taken when it was captured. The call is made once before:
    a library's workspace, kept for good, is no cost of this call.
    """
    if not device.startswith("cuda"):
        return None
    call()
    cuda.synchronize(device)
    before = int(cuda.memory_allocated(device))
    cuda.reset_peak_memory_stats(device)
    out = call()
    cuda.synchronize(device)
    del out
    return int(cuda.max_memory_allocated(device)) - before


def flush_bytes(device: str) -> int:
    """What is to be written so that nothing else is left in the cache: 3 times its size."""
    return _TIMES * llc_bytes(device)


def flush(device: str) -> Call:
    """A call that writes 3 times the last-level cache; its buffer stays for as long as the call is held."""
    buffer = torch.empty(flush_bytes(device), dtype=torch.uint8, device=device)

    def write() -> object:
        return buffer.zero_()

    return write
