"""The columns of the results that make two GPUs of one model two machines: which card, its limits, its libraries.

Like parts differ by 5 % or more, a power limit of 500 instead of 700 W by more, and another cuBLAS is another `eager`.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch

from ffncli.bench.machine.nvml import gpu_handles
from ffncli.system.cgroup import text
from ffncli.system.gpu_state import gpu_state, uuid_of
from ffncli.system.packages import installed

_HASHED = 12  # hexadecimal digits: enough to tell cards apart, too few to be the card's
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12", "nvidia-cublas-cu11")


def gpu_columns(device: str) -> dict[str, str]:
    """Those of a GPU, empty where they are not known; none of a CPU."""
    if torch.device(device).type != "cuda":
        return {}
    handles, _ = gpu_handles(device)
    state = gpu_state(handles) if handles else None
    limit, persistence = (state.power_limit_w, state.persistence) if state else (None, None)
    uuid = uuid_of(device, torch)
    part = re.search(r"\bMIG (\S+)", torch.cuda.get_device_name(torch.device(device)))
    return {
        "gpu_uuid": hashlib.sha256(uuid.encode()).hexdigest()[:_HASHED] if uuid else "",
        "power_limit_w": "" if limit is None else f"{limit:g}",
        "cublas": cublas_version(),
        "cudnn": str(torch.backends.cudnn.version() or ""),  # type: ignore[no-untyped-call]
        "triton": installed("triton") or installed("pytorch-triton") or "",
        "mig": part[1] if part else "",
        "persistence": "" if persistence is None else "on" if persistence else "off",
    }


@cache
def cublas_version() -> str:
    """`12.8.4`: of the library in this process, whichever path it was loaded from; else of the installed package."""
    path = re.search(r"\S*/libcublas\.so\S*", text(Path("/proc/self/maps")))
    if path:
        try:
            return property_version(ctypes.CDLL(path[0]).cublasGetProperty)
        except (OSError, AttributeError):
            pass
    return next((version for name in _CUBLAS if (version := installed(name))), "")


def property_version(get: Any) -> str:
    """The version by a function of CUDA's libraries, `get(0|1|2, &value)`: major, minor, patch."""
    parts = []
    for which in range(3):
        value = ctypes.c_int()
        get(which, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)
