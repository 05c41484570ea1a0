"""A kernel that is slower by a known factor, which a benchmark must detect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.bench.timing.clock import Call
from ffncli.errors import FFNError
from ffncli.kernels.kernel import Computes, Kernel, Params, Steps
from ffncli.show.text import percent, time_text

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from ffncli.bench.timing.cuda_clock import CudaClock

_CALLS, _BLOCKS = 20, 5  # of a measurement on a GPU; the shortest block counts


def slowed(call: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """`call` that then waits until `factor` times its duration has passed. On a CPU; factor ≥ 1."""
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
    """The same on a GPU: after the call a kernel waits, for the time that the call takes, times factor - 1.

    That time is measured at the first call, which raises FFNError if no kernel is that short. `cuda` is torch.cuda
    or a stand-in, `clock` the one of that GPU.
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
    """What launches the kernel that waits."""
    import torch

    from ffncli.bench.timing.cuda_clock import CudaClock

    cuda = cuda or torch.cuda
    timer = clock or CudaClock(cuda)
    call()

    def seconds(timed: Call) -> float:
        return min(timer.time(timed, _CALLS) / _CALLS for _ in range(_BLOCKS))

    whole, least = seconds(call), seconds(lambda: cuda._sleep(1))  # a kernel takes that long if it only begins and ends
    wait = (factor - 1) * whole
    if wait < least:
        longer = f"a call of {time_text(whole)} cannot be made {percent(factor - 1, 2)} longer"
        raise FFNError(
            f"{longer}: the shortest kernel takes {time_text(least)}", "use a larger block, or more --tokens"
        )
    cycles = max(1, round((wait - least) * timer.cycles_per_s))
    return lambda: cuda._sleep(cycles)


def slowed_kernel(kernel: Kernel, factor: float) -> Kernel:
    """The kernel, made to take `factor` times as long; a user's function is called as written."""

    def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        from ffncli.run.user.kernels import unguarded

        call = unguarded(kernel.build(steps, device, dtype))
        if factor == 1:  # the call itself, without a clock around it
            return call
        wrap = slowed_on_gpu if device.startswith("cuda") else slowed
        made: Callable[[Tensor, Params], Tensor] = wrap(call, factor)
        return made

    return replace(kernel, build=build)
