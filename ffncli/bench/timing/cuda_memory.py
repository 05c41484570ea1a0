"""The most of a GPU's memory that a call takes."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from ffncli.bench.timing.clock import Call

Cuda: TypeAlias = Any


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
