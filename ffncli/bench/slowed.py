"""A kernel that is slower by a known factor: what a benchmark must find. Text: `LABEL=slowed:FACTOR:KERNEL`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ffncli.kernels.kernel import Computes, Kernel, Params, Steps

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_FORM = re.compile(r"(?:(?P<label>[^=]+)=)?slowed:(?P<factor>\d+(?:\.\d+)?):(?P<kernel>.+)")


def slowed(call: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """`call`, which then waits until `factor` times its own duration has passed. On a CPU; factor ≥ 1."""
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

    That is measured at the first call, the shortest of ten.
    """
    from ffncli.bench.cuda_clock import CudaClock, slow_cycles

    sleep: list[Callable[[], object]] = []

    def run(*arguments: Any) -> Any:
        if not sleep:
            clock = CudaClock()
            call(*arguments)
            seconds = min(clock.time(lambda: call(*arguments), 1) for _ in range(10))
            sleep.append(_sleeping(slow_cycles((factor - 1) * seconds, clock.cycles_per_s)))
        out = call(*arguments)
        sleep[0]()
        return out

    return run


def _sleeping(cycles: int) -> Callable[[], object]:
    import torch

    sleep: Callable[[int], object] = torch.cuda._sleep
    return lambda: sleep(cycles)


def slowed_kernel(text: str, known: Callable[[str], Kernel]) -> Kernel | None:
    """The kernel that `text` slows down, which `known` finds by name; None for a text that asks for no such thing."""
    match = _FORM.fullmatch(text)
    if not match:
        return None
    inner, factor = known(match["kernel"]), float(match["factor"])

    def build(steps: Steps, device: str, dtype: torch.dtype) -> Computes:
        wrap = slowed_on_gpu if device.startswith("cuda") else slowed
        made: Callable[[Tensor, Params], Tensor] = wrap(inner.build(steps, device, dtype), factor)
        return made

    return replace(inner, name=match["label"] or f"slowed:{match['factor']}:{inner.name}", build=build)
