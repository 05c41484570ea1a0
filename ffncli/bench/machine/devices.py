"""The device of a benchmark, for the parent, which loads torch only if there may be a GPU."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from ffncli.errors import ExitCode, FFNError


def has_driver() -> bool:
    """Whether there may be a GPU: only then is torch loaded to find out."""
    return sys.platform == "win32" or any(
        Path(name).exists() for name in ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")
    )


def default_device() -> str:
    """A GPU if torch has one, else the CPU."""
    if not has_driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def require_gpu(devices: Sequence[str], sustained: bool) -> None:
    """Raises FFNError for a missing GPU (exit 3), and for `sustained` without one."""
    asks_for_gpu = any(device.startswith("cuda") for device in devices)
    if sustained and not asks_for_gpu:
        raise FFNError("--sustained needs --device cuda", "on a CPU, blocks are long enough for the clock to settle")
    if asks_for_gpu and not has_driver():
        raise FFNError("--device cuda: there is no GPU here (no driver)", "use --device cpu", ExitCode.ENVIRONMENT)
