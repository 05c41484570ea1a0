"""Kernels whose time ratio is known: for `ffn bench --kernel benchmarks/known.py:NAME`, and for other timers.

Each kernel computes the block and then waits until `factor` times the time of that computation has passed. `base` and
`same` run the same code with factor 1, which never waits, so that reading the clock costs the same in every kernel. The
ratio of `slow` to `base` is 1.05 for every shape, number of threads and load; `injected()` returns the ratio that the
waits really produced.

`times_20` and its kin compute a plain block 20, 21, 22, 26, 40 and 480 times: their ratios are exact under any load.

`sweep` and `threaded` disturb the other kernels: `sweep` writes more memory than the last-level cache holds, and
`threaded` runs on every core.
"""

import math
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, linear, relu, silu

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
    """Wait until `factor` times the time since `start` has passed; add up the times without and with the wait."""
    own = now = time.perf_counter()
    end = start + factor * (own - start)
    while now < end:
        now = time.perf_counter()
    _OWN[factor] += own - start
    _ALL[factor] += now - start
    return y


def injected(factor: float = SLOWER) -> float:
    """Return the ratio injected into all calls so far: their time with the waits divided by their time without."""
    return _ALL[factor] / _OWN[factor] if _OWN[factor] else math.nan


def base(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute a gated block."""
    return _gated(x, gate, up, down, 1.0)


def same(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute the block exactly as `base` does."""
    return _gated(x, gate, up, down, 1.0)


def slow(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute the block as `base` does, but take 1.05 times as long."""
    return _gated(x, gate, up, down, SLOWER)


def base_plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Compute a plain block with biases."""
    return _plain(x, up, up_bias, down, down_bias, 1.0)


def same_plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Compute the block exactly as `base_plain` does."""
    return _plain(x, up, up_bias, down, down_bias, 1.0)


def slow_plain(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
    """Compute the block as `base_plain` does, but take 1.05 times as long."""
    return _plain(x, up, up_bias, down, down_bias, SLOWER)


def _repeated(count: int) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def times(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        y = linear(relu(linear(x, up)), down)
        for _ in range(count - 1):
            y = linear(relu(linear(x, up)), down)
        return y

    return times


times_20, times_21, times_22 = _repeated(20), _repeated(21), _repeated(22)
times_26, times_40, times_480 = _repeated(26), _repeated(40), _repeated(480)


def sweep(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute a gated block, then write memory of three times the last-level cache's size."""
    y = linear(silu(linear(x, gate)) * linear(x, up), down)
    _memory().fill_(0.0)
    return y


def threaded(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """Compute a gated block on all cores."""
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
    """Return the size of core 0's largest cache, but at least 32 MiB, also if Linux does not report it."""
    sizes = [32 * 2**20]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text("ascii").strip()
        sizes.append(int(text[:-1]) * {"K": 2**10, "M": 2**20}[text[-1]])
    return max(sizes)
