"""Reference arms, timed calls by which a run checks itself: the machine anchor, and a kernel slowed by a known factor.

The anchor is the same work in every run, so its time shows how fast the machine is now.

The host's anchor uses numpy, not torch. It shows nothing about a GPU, and a GPU's events cannot time it, so a GPU has
its own anchor: work on the GPU that is the same in every case and version. The GPU's anchor needs torch, but every row
has torch's version, and the anchor's shapes are so common that a new version hardly changes its time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy
from numpy.typing import NDArray

from ffncli.bench.records import ANCHOR
from ffncli.bench.timing.clock import Call
from ffncli.bench.timing.rounds import Arm
from ffncli.errors import FFNError
from ffncli.kernels.kernel import Computes, Kernel, Params, Steps
from ffncli.show.text import percent, time_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ffncli.bench.timing.gpu.cuda_clock import CudaClock


SIDE, COUNT = 64, 72  # size and number of the matrices: 72 · 2 · 64³ = 38 MFLOP, about 0.6 ms on one core
COPIED = 2 << 20  # bytes read and also written: more than a core's own cache, less than most last-level caches
_LINE, _PAGE = 64, 4096
_GPU_SIDE = 2048  # side of a square matrix product in fp16: 17 GFLOP
_GPU_COPIED = 512 << 20  # bytes read and also written: 1 GiB, many times the largest L2 (126 MB)


@cache
def _numbers() -> tuple[NDArray[numpy.float32], ...]:
    """Draw the buffers' contents, normal random values: two arrays of matrices, and the array to copy."""
    draw = numpy.random.default_rng(0)
    shapes: tuple[tuple[int, ...], ...] = ((COUNT, SIDE, SIDE), (COUNT, SIDE, SIDE), (COPIED // 4,))
    return tuple(draw.standard_normal(shape, numpy.float32) for shape in shapes)


def anchor(draw: random.Random) -> Arm:
    """Build the anchor: 72 float32 matmuls of two 64 × 64 matrices, then a copy of 2 MiB, all on one core.

    OpenBLAS multiplies matrices this small on one thread; with more threads, the time would depend on other tasks
    waiting for a core. The anchor has its own buffers, at random offsets of whole cache lines. The number of calls per
    block is chosen in the run, as for every arm; comparisons of stored runs use the anchor's time per call.
    """
    a, b, source = (_placed(array, draw) for array in _numbers())
    product, destination = (_placed(array, draw) for array in (a, source))

    def call() -> object:
        numpy.matmul(a, b, out=product)
        numpy.copyto(destination, source)
        return product

    return Arm(ANCHOR, call)


def _placed(like: NDArray[numpy.float32], draw: random.Random) -> NDArray[numpy.float32]:
    memory = numpy.empty(like.nbytes + _PAGE + _LINE, numpy.uint8)
    start = -memory.ctypes.data % _LINE + _LINE * draw.randrange(_PAGE // _LINE)
    copy = memory[start : start + like.nbytes].view(numpy.float32).reshape(like.shape)
    copy[...] = like
    return copy


@cache
def gpu_anchor(device: str) -> Call:
    """Return a call that multiplies two [2048, 2048] matrices in fp16 and copies 512 MiB; its buffers live as long as
    the process.

    The contents are random because a GPU computing on constants draws less power and therefore clocks higher.
    """
    import torch

    with torch.inference_mode(False), torch.no_grad():  # writable in a backward pass too
        generator = torch.Generator().manual_seed(0)

        def drawn() -> Any:
            return torch.randn(_GPU_SIDE, _GPU_SIDE, generator=generator).to(device, torch.float16)

        left, right, product = drawn(), drawn(), drawn()
        there = torch.Generator(device).manual_seed(0)
        source = torch.randint(256, (_GPU_COPIED,), dtype=torch.uint8, device=device, generator=there)
        target = torch.empty_like(source)

    def run() -> object:
        torch.mm(left, right, out=product)
        target.copy_(source)
        return product

    return run


# --- a slowed kernel --------------------------------------------------------------------------------------------------

_CALLS, _BLOCKS = 20, 5  # calls per block, and number of blocks, of a measurement on a GPU; the shortest block counts


def slowed(call: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """Wrap `call` so that it busy-waits until `factor` times its duration has passed. For a CPU; factor ≥ 1."""
    now = time.perf_counter

    def run(*arguments: Any) -> Any:
        start = now()
        out = call(*arguments)
        end = start + factor * (now() - start)
        while now() < end:
            pass
        return out

    return run


def slowed_on_gpu(
    call: Callable[..., Any], factor: float, cuda: Any = None, clock: CudaClock | None = None
) -> Callable[..., Any]:
    """Wrap `call` for a GPU: after each call, a kernel waits (factor - 1) times as long as the call takes.

    The first use times the call, and raises FFNError if the wait would be shorter than the shortest kernel. `cuda` is
    torch.cuda or a stand-in, `clock` is that GPU's clock.
    """
    waits: list[Callable[[], object]] = []

    def run(*arguments: Any) -> Any:
        if not waits:
            waits.append(_waiting(lambda: call(*arguments), factor, cuda, clock))
        out = call(*arguments)
        waits[0]()
        return out

    return run


def _waiting(call: Call, factor: float, cuda: Any, clock: CudaClock | None) -> Call:
    """Return a function that launches the waiting kernel."""
    import torch

    from ffncli.bench.timing.gpu.cuda_clock import CudaClock

    cuda = cuda or torch.cuda
    timer = clock or CudaClock(cuda)
    call()

    def seconds(timed: Call) -> float:
        return min(timer.time(timed, _CALLS) / _CALLS for _ in range(_BLOCKS))

    took, least = seconds(call), seconds(lambda: cuda._sleep(1))  # `least` is an empty kernel's time
    wait = (factor - 1) * took
    if wait < least:
        longer = f"a call of {time_text(took)} cannot be made {percent(factor - 1, 2)} longer"
        raise FFNError(f"{longer}: the fastest kernel takes {time_text(least)}", "use a larger block, or more --tokens")
    cycles = max(1, round((wait - least) * timer.cycles_per_s))
    return lambda: cuda._sleep(cycles)


def slowed_kernel(kernel: Kernel, factor: float) -> Kernel:
    """Return the kernel, slowed so that calls take `factor` times as long; a user's function is called as written."""

    def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        from ffncli.run.user.kernels import unguarded

        call = unguarded(kernel.build(steps, device, dtype))
        if factor == 1:  # call it directly, without a clock around it
            return call
        wrap = slowed_on_gpu if device.startswith("cuda") else slowed
        made: Callable[[Tensor, Params], Tensor] = wrap(call, factor)
        return made

    return replace(kernel, build=build)
