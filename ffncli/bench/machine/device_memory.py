"""Memory of a GPU as torch's allocator counts it: what is free, what a kernel keeps, and the peak of a call."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch

from ffncli.system.host import return_freed_memory

Cuda: TypeAlias = Any


def free_memory(device: str, cuda: Cuda = torch.cuda) -> int:
    """Bytes that tensors can still get: what the driver calls free, and what torch has cached of freed tensors.

    What a graph's private pool has cached counts too, though only that graph could use it: graphs are freed first.
    """
    free, _ = cuda.mem_get_info(torch.device(device))
    return int(free + cuda.memory_reserved(device) - cuda.memory_allocated(device))


def release(device: str, cuda: Cuda = torch.cuda) -> None:
    """Free tensors in reference cycles, in some 0.1 s, and give a GPU's memory back to its driver, a CPU's where it is
    much to the system.
    """
    gc.collect()
    if not device.startswith("cuda"):
        return_freed_memory()
        return
    with suppress(RuntimeError):  # after a fault every call raises; the next case reports it
        cuda.empty_cache()


class KernelMemory:
    """The memory that one kernel needs besides its weights and x, in bytes; nothing is measured on a CPU."""

    def __init__(self, device: str, cuda: Cuda = torch.cuda) -> None:
        self.kept = 0
        self._device, self._cuda = device, cuda
        self._counted = device.startswith("cuda")

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """What is allocated inside and not freed there is what the kernel keeps: buffers, say."""
        before = self._allocated()
        yield
        self.kept += self._allocated() - before

    def peak(self, call: Callable[[], object], forget: Callable[[], object]) -> int | None:
        """The peak of bytes allocated by a call, its output and what the kernel keeps included; None on a CPU.

        `forget` frees the output of the last call, wherever the caller has it. For a plain call, not a graph's replay,
        whose memory was allocated at capture. The call is made once before: a library's permanent workspace is not a
        cost of this call.
        """
        if not self._counted:
            return None
        call()
        forget()
        before = self._allocated()
        self._cuda.reset_peak_memory_stats(self._device)
        call()
        self._cuda.synchronize(self._device)
        peak = int(self._cuda.max_memory_allocated(self._device))
        forget()
        return peak - before + self.kept

    def _allocated(self) -> int:
        if not self._counted:
            return 0
        self._cuda.synchronize(self._device)
        return int(self._cuda.memory_allocated(self._device))
