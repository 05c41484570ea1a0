"""The machine anchor of a case on a GPU: work of that GPU that is the same in every case and every version.

The host's anchor says nothing of a GPU, and a GPU's events cannot time it. There is no way to a GPU here but torch's;
its version stands in every row, and the shapes are so plain that a version hardly changes them.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from ffncli.bench.timing.clock import Call

_SIDE = 2048  # of a square product in fp16: 17 GFLOP
_COPIED = 32 << 20  # bytes, read and written


@cache
def gpu_anchor(device: str) -> Call:
    """A call that multiplies two [2048, 2048] in fp16 and copies 32 MiB; its buffers stay for the process."""
    with torch.inference_mode(False), torch.no_grad():  # to be written to in a backward pass too
        generator = torch.Generator().manual_seed(0)

        def drawn() -> Any:
            return torch.randn(_SIDE, _SIDE, generator=generator).to(device, torch.float16)

        left, right, product = drawn(), drawn(), drawn()
        source = torch.zeros(_COPIED, dtype=torch.uint8, device=device)
        target = torch.zeros_like(source)

    def run() -> object:
        torch.mm(left, right, out=product)
        target.copy_(source)
        return product

    return run
