"""A kernel that is slower by a known factor: what a benchmark must find. Text: `LABEL=slowed:FACTOR:KERNEL`."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
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
    """The same on a GPU: after the call, its stream sleeps for the cycles that the call takes, times factor - 1.

    They are measured at the first call, the shortest of ten.
    """
    import torch

    cycles: list[int] = []

    def run(*arguments: Any) -> Any:
        if not cycles:
            call(*arguments)
            seconds = min(_seconds(lambda: call(*arguments)) for _ in range(10))
            cycles.append(round((factor - 1) * seconds * _cycles_per_second()))
        out = call(*arguments)
        torch.cuda._sleep(cycles[0])
        return out

    return run


def _seconds(call: Callable[[], object]) -> float:
    """Of a call that is queued on the GPU, by events."""
    import torch

    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000)  # the call is in the queue before the first event comes
    before.record()
    call()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) / 1e3


@cache
def _cycles_per_second() -> float:
    import torch

    many = 20_000_000
    return many / min(_seconds(lambda: torch.cuda._sleep(many)) for _ in range(3))


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
