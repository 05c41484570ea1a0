"""A kernel that is slower by a known factor, which a benchmark must detect."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.kernels.kernel import Computes, Kernel, Params, Steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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


def slowed_on_gpu(call: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """The same on a GPU: after the call, its stream sleeps for the time that the call takes, times factor - 1.

    That time is measured at the first call, as the shortest of ten.
    """
    from ffncli.bench.timing.cuda_clock import CudaClock

    sleep: list[Callable[[], object]] = []

    def run(*arguments: Any) -> Any:
        if not sleep:
            clock = CudaClock()
            call(*arguments)
            seconds = min(clock.time(lambda: call(*arguments), 1) for _ in range(10))
            sleep.append(_sleeping(round((factor - 1) * seconds * clock.cycles_per_s)))
        out = call(*arguments)
        sleep[0]()
        return out

    return run


def _sleeping(cycles: int) -> Callable[[], object]:
    import torch

    sleep: Callable[[int], object] = torch.cuda._sleep
    return lambda: sleep(cycles)


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
