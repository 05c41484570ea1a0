"""The device of a benchmark: for the parent, which loads torch only if there may be a GPU, and for a worker."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import cache

from ffncli.errors import FFNError
from ffncli.system.gpu import device_index, has_driver, problem_of, use_device
from ffncli.system.gpu_state import gpu_state


def default_device() -> str:
    """A GPU if torch has one, else the CPU."""
    if not has_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_gpu(devices: Sequence[str], sustained: bool) -> None:
    """Raises FFNError for a GPU that is certainly missing (exit 3), and for `sustained` without one.

    Nothing is made on a GPU here: the parent would keep its memory, and in exclusive mode the GPU itself, from the
    workers, which try it (`use_in_worker`). Without a driver's files torch is asked: a sandbox may not show them.
    """
    gpus = [device for device in devices if device_index(device) is not None]
    if sustained and not gpus:
        raise FFNError("--sustained needs --device cuda", "on a CPU, blocks are long enough for the clock to settle")
    if not gpus or has_driver():
        return
    import torch

    index = device_index(gpus[0])
    if not torch.cuda.is_available() and index is not None and (problem := problem_of(index, torch)):
        raise problem.error(gpus[0])


def use_in_worker(device: str) -> None:
    """Make the device torch's current one. Raises FFNError (exit 3) if torch cannot compute there."""
    import torch

    if device_index(device) is not None:
        with suppress(RuntimeError, AssertionError):  # of a GPU that cannot be used: the reason is given below
            neighbours(device)
    use_device(device, torch)


@cache
def neighbours(device: str) -> str:
    """Which other processes use a GPU, in words, as it was when first asked: before this process has anything there."""
    from ffncli.bench.machine.nvml import gpu_handles

    gpu, _ = gpu_handles(device)
    return gpu_state(gpu).neighbours if gpu else ""
