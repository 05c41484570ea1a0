"""The addresses of an arm's tensors in memory, and the state of the caches when the arm is called.

The addresses of buffers change times by a few per cent (through shared cache sets, and through reads that alias a write
4096 bytes away). So every arm gets its own buffers, and new ones at every placement, at random offsets.
"""

import math
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import cycle
from typing import TypeAlias

import torch
from torch import Tensor

from ffncli.bench.records import Cache
from ffncli.errors import FFNError, shown
from ffncli.kernels import onednn

Params: TypeAlias = tuple[Tensor, ...]

# On a CPU, offsets are whole cache lines, the alignment of torch's own allocator (vector loads need no more), so that
# no kernel gets an alignment that it would not get in normal use. A GPU's allocator aligns to 256 bytes (cudaMalloc).
CPU_LINE, GPU_LINE = 64, 256
_GAP = 4096  # upper limit of the gap before every tensor: any position within a page
_START = 1 << 16  # upper limit of the first offset: any page
# From this many copies of the weights on, an arm's time is an average over as many addresses, so later placements keep
# the copies, in another order: copying them again would take most of a process's time.
MANY_COPIES = 8
_MOST_COPIES = 1024  # maximum copies of the weights; with more, Python's objects would fill the caches
_FACTOR = 3  # other data between two uses, in cache sizes: enough to certainly replace every cache line


class Arena:
    """The memory of one arm's tensors. It is allocated once and reused, so that a placement costs only one copy.

    Copying into existing pages is three times as fast as into new pages (4.9 against 1.5 GB/s measured), and causes no
    page faults while timing. The offsets, and with them the pages, are drawn again at every placement.
    """

    def __init__(self, device: str, draw: random.Random) -> None:
        self._device, self._draw = device, draw
        self._line = CPU_LINE if torch.device(device).type == "cpu" else GPU_LINE
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self.least = 0  # minimum bytes of the next allocation

    def need(self, sets: Sequence[Params]) -> int:
        """Return the bytes that `place` needs for these tensors."""
        spans = [span for params in sets for span in _spans(params, self._line)]
        return sum(self._up(size) + _GAP for _, _, size in spans) + _START + self._line

    def place(self, sets: Sequence[Params]) -> list[Params]:
        """Copy the tensors into one storage, in random order at random offsets, overwriting earlier copies; return the
        copies.

        Views of one storage remain views of one storage, and strides are kept. Tensors must be strided (`placeable`).
        Raises RuntimeError or torch.OutOfMemoryError if memory is too small.
        """
        spans = [span for params in sets for span in _spans(params, self._line)]
        need = max(self.need(sets), self.least)
        if self._memory.numel() < need:
            none = torch.empty(0, dtype=torch.uint8, device=self._device)
            self._memory = none  # so that it is freed before the larger one is allocated
            self._memory = torch.empty(need, dtype=torch.uint8, device=self._device)
        # Offsets count from the start of a line; the allocator's memory need not begin there.
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
        """Return the tensors as views of this memory; spans are numbered in the order of `place`."""
        out: list[Params] = []
        number = 0
        for params in sets:
            mine = {}
            for storage, low, _ in _spans(params, self._line):
                mine[storage.data_ptr()] = places[number] - low  # to be added to an offset in the old storage
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


class Pool:
    """Copies of the `drawn` weights that several of the package's kernels use in turn: every call, of any of them, gets
    the copy that was used longest ago. So many copies are made once for all these kernels.
    """

    def __init__(self, drawn: Params, draw: random.Random) -> None:
        self.drawn, self._draw = drawn, draw
        self.copies: list[Params] = []
        self.turn: Iterator[Params] = cycle(())

    def hold(self, copies: list[Params]) -> None:
        """Use these copies from now on."""
        self.copies, self.turn = copies, cycle(copies)

    def shuffle(self) -> None:
        """Put the copies into another order, for the next placement."""
        self._draw.shuffle(self.copies)
        self.turn = cycle(self.copies)


def placeable(params: Iterable[Tensor]) -> bool:
    """Return True if copying the bytes is enough: all are plain strided tensors, and no tensor is in a library's own
    form."""
    plain = (Tensor, torch.nn.Parameter)
    return all(
        type(t) in plain and t.layout == torch.strided and not t.is_quantized and not t.is_mkldnn for t in params
    )


def _spans(params: Params, line: int) -> list[tuple[torch.UntypedStorage, int, int]]:
    """Return (storage, first byte, bytes) of the used part of every storage; the first byte starts a cache line."""
    spans: dict[int, tuple[torch.UntypedStorage, int, int]] = {}
    for t in params:
        if t.numel() == 0:
            continue
        storage, size = t.untyped_storage(), t.element_size()
        low = int(t.storage_offset()) * size
        # The offset of the last element in memory, from the strides: a view may be neither contiguous nor in order.
        high = low + size * int(1 + sum((n - 1) * step for n, step in zip(t.shape, t.stride(), strict=True)))
        low -= low % line
        before = spans.get(storage.data_ptr())
        if before:
            low, high = min(low, before[1]), max(high, before[1] + before[2])
        spans[storage.data_ptr()] = (storage, low, high - low)
    return list(spans.values())


def _bytes(storage: torch.UntypedStorage, low: int, size: int) -> Tensor:
    view = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return view.set_(storage, low, (size,), (1,))


def nbytes(params: Params) -> int:
    """Return the bytes of a copy of the tensors."""
    plain = tuple(t for t in params if not t.is_mkldnn)
    return sum(size for _, _, size in _spans(plain, 1)) + sum(onednn.nbytes(t) for t in params if t.is_mkldnn)


# --- cache modes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Caching:
    """The cache mode in use: its name, the copies of weights as they were drawn, and why it is not the requested one.

    `between` is the bytes of weights to read between two uses of a copy, in cold-weights: weights in fewer bits have
    more copies.
    """

    mode: Cache
    copies: int = 1
    note: str = ""
    shared: bool = False  # the package's kernels, their twin and the bare products share one copy of the weights
    between: int = 0

    def copies_of(self, touched: int) -> int:
        """Return the copies of an arm's weights, if a call reads `touched` bytes of them."""
        return max(self.copies, math.ceil(self.between / max(1, touched)))


def caching(cache: Cache, arms: Sequence[tuple[int, int]], llc: int, free: int | None) -> Caching:
    """Return the cache mode for `arms` of these sizes: (bytes of its input and one copy of its weights, bytes of
    weights that one call reads).

    `llc` is the bytes of the last-level cache, `free` the bytes of memory that may be used (None: unknown). warm is
    called shared if the arms together do not fit in the cache. cold-weights cycles through ⌈3 · llc / bytes read⌉
    copies of an arm's weights, at most 1024; flush writes 3 · llc bytes before every call. If that takes too many
    copies or too much memory, the mode is warm, and a note says so.
    """
    warm: Cache = "shared" if sum(size for size, _ in arms) > llc else "warm"
    if cache in ("warm", "shared"):
        return Caching(warm)
    between, least = _FACTOR * llc if cache == "cold-weights" else 0, min(touched for _, touched in arms)
    mode = Caching(cache, between=between)
    mode = replace(mode, copies=mode.copies_of(max(touched for _, touched in arms)))
    if (copies := mode.copies_of(least)) > _MOST_COPIES:
        few = f"measured {warm}, since {cache} would need {copies:,} copies of the weights ({least:,} bytes each)"
        return Caching(warm, note=few)
    need = sum(mode.copies_of(touched) * size for size, touched in arms) + (_FACTOR * llc if cache == "flush" else 0)
    if free is None or need <= free:
        kind = _requested_flush() if cache == "flush" else ""
        return replace(mode, note=f"caches emptied by FFN_FLUSH={kind}" if kind else "")
    short = f"{cache} would need {need / 1e9:,.1f} GB of memory and only {free / 1e9:,.1f} GB may be used"
    return Caching(warm, note=f"measured {warm}, since {short}")


def sharing(cache: Cache, weights: int, touched: int, llc: int, need: int, free: int) -> Caching:
    """Return the cache mode for arms that share one copy of the weights, as there are not `need` bytes for a copy per
    arm.

    The requested mode is kept if it works with one copy (cold-weights works if a single call reads three times the size
    of the cache). Otherwise the mode is warm.
    """
    mode = caching(cache, [(weights, touched)], llc, None)
    mode = replace(mode, between=0) if mode.copies == 1 else caching("warm", [(weights, touched)], llc, None)
    apart = f"a copy for each would need {need / 1e9:,.1f} GB of memory, but only {free / 1e9:,.1f} GB may be used"
    note = f"the package's kernels share one copy of the weights: {apart}"
    return replace(mode, note="; ".join(filter(None, (mode.note, note))), shared=True)


def flusher(llc: int, device: str) -> Callable[[], object]:
    """Return a function that reads (on a GPU) or writes (on a CPU) 3 · llc bytes; it runs before a call, outside the
    timed section.

    When the call begins, written lines still have to be written back, and that time may be charged to the call: on an
    H200, 4.7 % of a call of 23 µs. On a CPU, reading does not surely replace every line. The environment variable
    FFN_FLUSH=read or FFN_FLUSH=write overrides this, to test the effect.
    """
    reads = (_requested_flush() or ("read" if device.startswith("cuda") else "write")) == "read"
    buffer = torch.empty(_FACTOR * llc // 4, dtype=torch.int32, device=device)
    if not reads:
        return lambda: buffer.fill_(1)
    largest = torch.empty((), dtype=torch.int32, device=device)
    buffer.fill_(1)
    return lambda: torch.amax(buffer, 0, out=largest)


def _requested_flush() -> str:
    """Return FFN_FLUSH: `read`, `write` or "" if it is not set. Raises FFNError for another value."""
    kind = os.environ.get("FFN_FLUSH") or ""
    if kind not in ("", "write", "read"):
        raise FFNError(f"FFN_FLUSH: unknown value {shown(kind)}", "use write or read")
    return kind
