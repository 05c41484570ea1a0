"""A GPU's memory, simulated: the bytes of every tensor that torch makes on the CPU, counted as its allocator would.

Unkind as a real device is: what is freed stays reserved, in the allocator's hands, and the driver calls it used, until
`empty_cache`; a full device raises torch.OutOfMemoryError, after it has given up its cache; other processes (`others`)
have a part of it.
"""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class FakeMemory(TorchDispatchMode):
    """Inside `with`, a stand-in for the functions of torch.cuda that are about memory. Tensors made before count 0."""

    def __init__(self, total: int = 1 << 60, others: int = 0) -> None:
        super().__init__()
        self.total, self.others = total, others
        self.allocated = self.peak = self.reserved = 0
        self.largest = 0  # bytes of the largest tensor so far
        self._alive: dict[int, object] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        given = {storage._cdata for storage in _storages((args, kwargs))}  # a view of what was there is nothing new
        out = func(*args, **(kwargs or {}))
        for storage in _storages(out):
            if storage._cdata not in given:
                self._count(storage)
        return out

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._alive or not size:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self.allocated -= size

        if self.allocated + size > self.reserved:
            self._reserve(size)
        self._alive[key] = weakref.ref(storage, freed)
        self.allocated += size
        self.peak, self.largest = max(self.peak, self.allocated), max(self.largest, size)

    def _reserve(self, size: int) -> None:
        if self.allocated + size > self.total - self.others:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {size} bytes.")
        self.reserved = self.allocated + size

    # --- of torch.cuda
    def memory_allocated(self, device: object = None) -> int:
        return self.allocated

    def memory_reserved(self, device: object = None) -> int:
        return self.reserved

    def max_memory_allocated(self, device: object = None) -> int:
        return self.peak

    def reset_peak_memory_stats(self, device: object = None) -> None:
        self.peak = self.allocated

    def mem_get_info(self, device: object = None) -> tuple[int, int]:
        """(free, total) as the driver sees it: what torch has cached is not free."""
        return self.total - self.others - self.reserved, self.total

    def empty_cache(self) -> None:
        self.reserved = self.allocated

    def synchronize(self, device: object = None) -> None:
        pass


def _storages(tree: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]
