"""What several probes do on the GPU: times by events behind a wait, graphs, blocks; without `ffn bench`'s clock."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

Call = Callable[[], object]
CYCLES_PER_S = 1.5e9  # assumed; a wait may be off by a half


def wait(seconds: float) -> None:
    """Keep the GPU busy, so that the host gets ahead of it."""
    import torch

    torch.cuda._sleep(int(seconds * CYCLES_PER_S))


def timed(call: Call, repeats: int = 1, ahead: float = 5e-3) -> float:
    """The GPU's seconds for `repeats` calls, launched while it waits."""
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    wait(ahead)
    start.record()
    for _ in range(repeats):
        call()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) * 1e-3


def typical(measure: Callable[[], float], rounds: int = 7) -> float:
    """The median of some measurements, after one that does not count."""
    measure()
    return median(measure() for _ in range(rounds))


def each_timed(call: Call, before: Call, repeats: int = 50) -> float:
    """The median of the GPU's seconds of single calls, each after `before`."""
    import torch

    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats)]
    torch.cuda.synchronize()
    wait(10e-3)
    for start, end in events:
        before()
        start.record()
        call()
        end.record()
    torch.cuda.synchronize()
    return median(float(start.elapsed_time(end)) for start, end in events) * 1e-3


def graph_of(calls: Sequence[Call]) -> Call:
    """A replay of these calls, recorded in one graph."""
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def small_kernel() -> Call:
    """One launch with next to no work."""
    import torch

    x = torch.zeros(16, device="cuda")
    return lambda: x.add_(1)


def gated_block(d_model: int, d_ff: int, tokens: int, copies: int = 1) -> list[Call]:
    """SwiGLU blocks in bf16 on one input, each with weights of its own."""
    import torch
    from torch.nn.functional import linear, silu

    def drawn(*shape: int) -> Any:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) / shape[-1] ** 0.5

    x = drawn(tokens, d_model)

    def block() -> Call:
        gate, up, down = drawn(d_ff, d_model), drawn(d_ff, d_model), drawn(d_model, d_ff)
        return lambda: linear(silu(linear(x, gate)) * linear(x, up), down)

    return [block() for _ in range(copies)]


def cache_bytes() -> int:
    """The GPU's L2 cache."""
    import torch

    return int(torch.cuda.get_device_properties(0).L2_cache_size)


def product(size: int = 4096) -> Call:
    """A bf16 matrix product that keeps the GPU at full power."""
    import torch

    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def keep_busy(seconds: float) -> None:
    """Products for so long by the host's clock, waited for now and then, so that the queue stays short."""
    import torch

    call, until = product(), time.perf_counter() + seconds
    while time.perf_counter() < until:
        for _ in range(20):
            call()
        torch.cuda.synchronize()


def nvml() -> tuple[Any, Any]:
    """(pynvml, the handle of torch's current GPU, by its uuid). Ends this probe without nvidia-ml-py."""
    import torch

    try:
        import pynvml
    except ImportError:
        raise SystemExit("needs nvidia-ml-py: pip install nvidia-ml-py") from None

    pynvml.nvmlInit()
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    return pynvml, pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
