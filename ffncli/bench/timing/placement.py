"""Where an arm's tensors lie, and what its caches hold when it is called.

Where buffers lie changes times by a few per cent (which sets of a cache they meet in, which reads look as if they hit
a write 4096 bytes away), so every arm gets buffers of its own, anew at every placement, at random offsets.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ffncli.bench.records import Cache

Params: TypeAlias = tuple[Tensor, ...]

# Offsets are whole cache lines on a CPU: what torch's own allocator promises (vector loads need no more), so that no
# kernel meets an alignment that it would not meet in use. A GPU's allocator promises 256 (cudaMalloc).
CPU_LINE, GPU_LINE = 64, 256
_GAP = 4096  # before every tensor, less than this: all places within a page
_START = 1 << 16  # before the first one: other pages too
_MOST_COPIES = 1024  # of the weights: Python's own objects for more of them would fill the caches, and the time
_FACTOR = 3  # so many last-level caches of other data between two uses: a replaced line is gone for certain


class Arena:
    """Memory in which one arm's tensors lie. It is asked for once and used again: a placement costs one copy.

    A second copy into pages that are there is three times as fast as one into new ones (4.9 beside 1.5 GB/s measured),
    and no page fault is left for the timed part. The offsets, and with them the pages, are drawn anew each time.
    """

    def __init__(self, device: str, draw: random.Random) -> None:
        self._device, self._draw = device, draw
        self._line = CPU_LINE if torch.device(device).type == "cpu" else GPU_LINE
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)

    def place(self, sets: Sequence[Params]) -> list[Params]:
        """Copies of the tensors, in one storage, in random order at random offsets; what lay here before is gone.

        Views of one storage stay views of one storage, strides stay. Tensors must be strided (`placeable`). Raises
        RuntimeError or torch.OutOfMemoryError where memory does not suffice.
        """
        spans = [span for params in sets for span in _spans(params, self._line)]
        need = sum(self._up(size) + _GAP for _, _, size in spans) + _START
        if self._memory.numel() < need + self._line:
            self._memory = torch.empty(0, dtype=torch.uint8, device=self._device)  # before the larger one is asked for
            self._memory = torch.empty(need + self._line, dtype=torch.uint8, device=self._device)
        at = self._up(self._memory.data_ptr()) - self._memory.data_ptr() + self._some(_START)
        places: dict[int, int] = {}
        order = list(range(len(spans)))
        self._draw.shuffle(order)
        for number in order:
            storage, low, size = spans[number]
            at += self._some(_GAP)
            places[number] = at
            self._memory[at : at + size].copy_(_bytes(storage, low, size))
            at += self._up(size)
        return self._views(sets, places)

    def _views(self, sets: Sequence[Params], places: dict[int, int]) -> list[Params]:
        """The tensors again, as views of this memory; spans are numbered as `place` met them."""
        out: list[Params] = []
        number = 0
        for params in sets:
            mine = {}
            for storage, low, _ in _spans(params, self._line):
                mine[storage.data_ptr()] = places[number] - low
                number += 1
            out.append(tuple(self._view(t, mine) for t in params))
        return out

    def _view(self, like: Tensor, shift: dict[int, int]) -> Tensor:
        if like.numel() == 0:
            return torch.empty_like(like)
        start = like.storage_offset() * like.element_size() + shift[like.untyped_storage().data_ptr()]
        view = torch.empty(0, dtype=like.dtype, device=self._device)
        there = self._memory.untyped_storage()
        return view.set_(there, start // like.element_size(), like.shape, like.stride())

    def _some(self, below: int) -> int:
        return self._line * self._draw.randrange(below // self._line)

    def _up(self, size: int) -> int:
        return -(-size // self._line) * self._line


def placeable(params: Iterable[Tensor]) -> bool:
    """Whether copying their bytes copies them: plain strided tensors, nothing packed into a library's own form."""
    plain = (Tensor, torch.nn.Parameter)
    return all(
        type(t) in plain and t.layout == torch.strided and not t.is_quantized and not t.is_mkldnn for t in params
    )


def _spans(params: Params, line: int) -> list[tuple[torch.UntypedStorage, int, int]]:
    """(storage, first byte, bytes) of what the tensors cover of every storage; the first byte at a whole line."""
    found: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for t in params:
        if t.numel() == 0:
            continue
        storage, size = t.untyped_storage(), t.element_size()
        low = int(t.storage_offset()) * size
        high = low + size * int(1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)))
        low -= low % line
        before = found.get(storage.data_ptr())
        if before:
            low, high = min(low, before[1]), max(high, before[1] + before[2])
        found[storage.data_ptr()] = (storage, low, high - low)
    return list(found.values())


def _bytes(storage: torch.UntypedStorage, low: int, size: int) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, low, (size,), (1,))


def nbytes(params: Params) -> int:
    """Bytes that a copy of them takes."""
    return sum(size for _, _, size in _spans(params, 1))


# --- cache modes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caching:
    """What was possible of the cache mode that was asked for: its name, copies of the weights, why it is another."""

    mode: Cache
    copies: int = 1
    note: str = ""


def caching(asked: Cache, arms: Sequence[int], touched: int, llc: int, free: int | None) -> Caching:
    """The cache mode for arms that hold so many bytes each, weights and input, in one copy.

    `touched`: bytes of the weights that one call reads, `llc`: of the last-level cache, `free`: of memory that may be
    taken (None: unknown). warm is called shared where the arms together do not fit in the cache. cold-weights turns
    through ⌈3 · llc / touched⌉ copies, where 1024 are enough; flush writes 3 · llc bytes before every call. Where they
    are not, or memory is short of it, the mode is warm, and a note says so.
    """
    warm: Cache = "shared" if sum(arms) > llc else "warm"
    if asked in ("warm", "shared"):
        return Caching(warm)
    copies = math.ceil(_FACTOR * llc / max(1, touched)) if asked == "cold-weights" else 1
    if copies > _MOST_COPIES:
        few = f"{asked} would take {copies:,} copies of weights of {touched:,} bytes: {warm} instead"
        return Caching(warm, note=few)
    need = copies * sum(arms) + (_FACTOR * llc if asked == "flush" else 0)
    if free is None or need <= free:
        return Caching(asked, copies)
    short = f"{asked} would take {need / 1e9:,.1f} GB of memory and {free / 1e9:,.1f} GB can be had: {warm} instead"
    return Caching(warm, note=short)


def flusher(llc: int, device: str) -> Callable[[], object]:
    """Writes 3 · llc bytes; to be called before a call, outside the clock."""
    buffer = torch.empty(_FACTOR * llc // 4, dtype=torch.int32, device=device)

    def flush() -> object:
        return buffer.fill_(1)

    return flush
