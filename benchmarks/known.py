"""Kernels whose ratio to each other is known: for `ffn bench --kernel benchmarks/known.py:NAME`, and for its peers.

Each runs the block's own products and then waits, on the clock, until FACTOR times what they have just taken has
passed. `base` and `same` go through the same code with FACTOR 1, which never waits, so that what looking at the clock
costs is in every arm and cancels. The ratio of `slow` to `base` is 1.05 whatever the shape, the threads and the load;
`injected()` says how near to it the waiting came.

`sweep` and `threaded` disturb: after the block one writes more memory than the last-level cache holds, the other wakes
a thread for every core.
"""

import math
import os
import time
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, silu

SLOWER = 1.05
_OWN: dict[float, float] = {1.0: 0.0, SLOWER: 0.0}
_ALL: dict[float, float] = {1.0: 0.0, SLOWER: 0.0}


def _gated(x: Tensor, gate: Tensor, up: Tensor, down: Tensor, factor: float) -> Tensor:
    start = time.perf_counter()
    y = linear(silu(linear(x, gate)) * linear(x, up), down)
    return _until(y, start, factor)


def _plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor, factor: float) -> Tensor:
    start = time.perf_counter()
    y = linear(gelu(linear(x, up, up_bias)), down, down_bias)
    return _until(y, start, factor)


def _until(y: Tensor, start: float, factor: float) -> Tensor:
    """Wait until `factor` times the time since `start` has passed, and keep count of both."""
    own = now = time.perf_counter()
    end = start + factor * (own - start)
    while now < end:
        now = time.perf_counter()
    _OWN[factor] += own - start
    _ALL[factor] += now - start
    return y


def injected(factor: float = SLOWER) -> float:
    """The ratio that was truly injected into all calls so far: their seconds over those of their own work."""
    return _ALL[factor] / _OWN[factor] if _OWN[factor] else math.nan


def base(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated block."""
    return _gated(x, gate, up, down, 1.0)


def same(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """The same once more."""
    return _gated(x, gate, up, down, 1.0)


def slow(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """1.05 times as slow."""
    return _gated(x, gate, up, down, SLOWER)


def base_plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """A plain block with biases."""
    return _plain(x, up, up_bias, down, down_bias, 1.0)


def same_plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """The same once more."""
    return _plain(x, up, up_bias, down, down_bias, 1.0)


def slow_plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """1.05 times as slow."""
    return _plain(x, up, up_bias, down, down_bias, SLOWER)


def sweep(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated block, then a pass over three times the last-level cache."""
    y = linear(silu(linear(x, gate)) * linear(x, up), down)
    _memory().fill_(0.0)
    return y


def threaded(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """A gated block on all cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 2)
    try:
        return linear(silu(linear(x, gate)) * linear(x, up), down)
    finally:
        torch.set_num_threads(threads)


@cache
def _memory() -> Tensor:
    return torch.empty(3 * _llc_bytes() // 4)


def _llc_bytes() -> int:
    """The largest cache of core 0, at least 32 MiB, also where Linux does not say."""
    sizes = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text("ascii").strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes)
