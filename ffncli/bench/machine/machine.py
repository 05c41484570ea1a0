"""The machine a benchmark ran on, as columns of its results: versions, device, driver, BLAS, arithmetic.

The parts without torch are in `system/host.py`; they are also exported here, so that a worker needs only this module.
"""

from __future__ import annotations

import os
import platform
import re
from functools import cache
from pathlib import Path

import torch

from ffncli.bench.machine.device_memory import free_memory
from ffncli.bench.machine.gpu_columns import gpu_columns
from ffncli.bench.machine.math_mode import math_mode
from ffncli.system import host
from ffncli.system.cgroup import text
from ffncli.system.host import available_memory, cores, default_threads, freed_memory, load
from ffncli.system.process_tree import used_memory
from ffncli.version import __version__

__all__ = [
    "allocator", "available_memory", "blas", "cores", "default_threads", "device_name", "driver", "environment",
    "finish", "free", "llc_and_room", "llc_bytes", "llc_note", "load", "openmp", "room",
]  # fmt: skip

_SHARE = 0.6  # of the free memory; the rest is for the calls
_GPU_CACHE_FALLBACK = 50 << 20  # H100's; used if torch does not report it


def environment(device: str) -> dict[str, str]:
    """The columns of `ResultRow` on machine and software that apply to this device, and the device.

    Call it in the process that measures, after its settings: `math_mode`, `openmp` and `allocator` are the current
    ones.
    """
    import numpy

    return {
        "ffncli": __version__,
        "torch": str(torch.__version__),  # unpickling a TorchVersion would load torch
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "host": platform.node(),
        "cpu": host.cpu_name(),
        "isa": " ".join(host.isa()),
        "device": device,
        "device_name": device_name(device),
        "driver": driver(device),
        "blas": blas(),
        "math_mode": math_mode(device),
        "openmp": openmp(),
        "allocator": allocator(device),
        "launch_queues": os.environ.get("CUDA_SCALE_LAUNCH_QUEUES", "") if is_cuda(device) else "",
        **gpu_columns(device),
    }


def device_name(device: str) -> str:
    """The device's name from its maker: `NVIDIA H100 80GB HBM3`; for `cpu`, the CPU."""
    if is_cuda(device):
        return torch.cuda.get_device_name(torch.device(device))
    return host.cpu_name()


def llc_bytes(device: str) -> int:
    """Bytes of the device's last-level cache; `llc_note` says if that is a guess."""
    return _llc(device)[0]


def llc_note(device: str) -> str:
    """The source of `llc_bytes`, unless it is simply the size of one cache."""
    return _llc(device)[1]


def _llc(device: str) -> tuple[int, str]:
    if not is_cuda(device):
        return host.cpu_llc()
    from ffncli.system import hardware

    properties = torch.cuda.get_device_properties(torch.device(device))
    row = hardware.find(properties.name)
    sheet = row.llc_bytes if row else 0
    size = int(getattr(properties, "L2_cache_size", 0) or 0)
    if sheet > 2 * size:  # AMD: torch knows only the L2 of a die, not the Infinity Cache behind it
        return sheet, "from the data sheet"
    return (size, "") if size else (_GPU_CACHE_FALLBACK, f"unknown, {_GPU_CACHE_FALLBACK >> 20} MiB assumed")


def is_cuda(device: str) -> bool:
    """Whether this is a GPU that torch calls cuda (AMD's too)."""
    return torch.device(device).type == "cuda"


# --- software ---------------------------------------------------------------------------------------------------------


def driver(device: str) -> str:
    """`580.82.07, CUDA 12.8`: the GPU's driver and the platform of this torch build; empty for a CPU."""
    if not is_cuda(device):
        return ""
    if torch.version.hip:
        return ", ".join(filter(None, (text(Path("/sys/module/amdgpu/version")), f"ROCm {torch.version.hip}")))
    return ", ".join(filter(None, (nvidia_driver(), f"CUDA {torch.version.cuda}")))


@cache
def nvidia_driver() -> str:
    """NVIDIA's kernel driver: from /proc, else from nvidia-smi; empty if there is none."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text(Path("/proc/driver/nvidia/version")))
    if match:
        return match[1]
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""


def finish(device: str) -> None:
    """Wait until a GPU has finished all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def room(device: str, most: int | None = None) -> int | None:
    """Bytes of the device's memory that copies may use; None if the free memory is unknown. `most`: the bytes that this
    process and all that it started may use of a CPU's. What an earlier case has left to malloc is free for the next."""
    left = free(device)
    if is_cuda(device):
        return None if left is None else int(_SHARE * left)
    kept = freed_memory()
    left = None if left is None else left + kept
    if most is not None:
        within = max(0, most - (used_memory(os.getpid()) or 0) + kept)
        left = within if left is None else min(left, within)
    return None if left is None else int(_SHARE * left)


def llc_and_room(device: str, most: int | None) -> tuple[int, int | None]:
    """`llc_bytes` and `room`."""
    return llc_bytes(device), room(device, most)


def free(device: str) -> int | None:
    """Bytes of the device's memory that are free, with what torch has cached; None if unknown."""
    return free_memory(device) if device.startswith("cuda") else available_memory()


def blas() -> str:
    """The libraries that multiply matrices: `torch: MKL 2024.2, oneDNN 3.12.0, AVX512; numpy: openblas 0.3.31`."""
    config = torch.__config__.show()
    parts = []
    if match := re.search(r"Math Kernel Library Version (\S+?)(?:-Product)?\s", config):
        parts.append(f"MKL {match[1]}")
    elif match := re.search(r"BLAS_INFO=(\w+)", config):
        parts.append(match[1])
    if match := re.search(r"MKL-DNN v([\d.]+)", config):
        parts.append(f"oneDNN {match[1]}")
    parts.append(torch.backends.cpu.get_cpu_capability())
    return f"torch: {', '.join(parts)}; numpy: {_numpy_blas()}"


def _numpy_blas() -> str:
    import numpy

    try:
        library = numpy.show_config(mode="dicts")["Build Dependencies"]["blas"]
        return f"{library['name']} {library['version']}".strip()
    except (KeyError, TypeError, AttributeError):
        return "unknown"


# --- how it computes --------------------------------------------------------------------------------------------------


_OPENMP = {"bind": "OMP_PROC_BIND", "places": "OMP_PLACES", "wait": "OMP_WAIT_POLICY", "spin": "GOMP_SPINCOUNT"}


def openmp() -> str:
    """`libgomp;bind=true;places=cores;wait=passive`: the runtime and its settings for threads."""
    settings = (f"{name}={os.environ[variable]}" for name, variable in _OPENMP.items() if os.environ.get(variable))
    return ";".join((*openmp_runtimes(), *settings))


def openmp_runtimes() -> tuple[str, ...]:
    """The OpenMP libraries in this process; more than one is a problem, since each has its own threads."""
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    prefixes = (info["prefix"] for info in threadpool_info() if info["user_api"] == "openmp")
    return tuple(dict.fromkeys(prefixes))


def allocator(device: str = "cpu") -> str:
    """The memory allocator and its settings: `glibc;mmap_threshold=...;trim_threshold=...`, `jemalloc`, `system`."""
    maps = text(Path("/proc/self/maps"))
    library = next((name for name in ("jemalloc", "tcmalloc", "mimalloc") if f"lib{name}" in maps), "")
    settings = [
        f"{name.removeprefix('MALLOC_').rstrip('_').lower()}={value}"
        for name, value in sorted(os.environ.items())
        if name.startswith("MALLOC_")
    ]
    summary = ";".join(([library] if library else []) + settings) or "system"
    if is_cuda(device):
        gpu = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "default"
        summary += f";cuda={gpu}"
    return summary
