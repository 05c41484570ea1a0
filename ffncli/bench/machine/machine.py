"""The machine of a benchmark as columns of its results (versions, device, driver, BLAS, arithmetic), and its memory:
how much is free, how much a kernel keeps, and the peak of a call.

Parts that do not need torch are in `system/host.py`; they are also exported here, so that a worker only needs this
module.
"""

import ctypes
import gc
import hashlib
import os
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ffncli.bench.machine.devices import gpu_handles
from ffncli.errors import FFNError, shown
from ffncli.system import host
from ffncli.system.cgroup import text
from ffncli.system.child import used_memory
from ffncli.system.gpu import gpu_state, uuid_of
from ffncli.system.host import available_memory, cores, default_threads, freed_memory, load, return_freed_memory
from ffncli.system.packages import installed
from ffncli.version import __version__

__all__ = [
    "allocator", "available_memory", "blas", "cores", "default_threads", "device_name", "driver", "environment",
    "finish", "free", "llc_and_room", "llc_bytes", "llc_note", "load", "openmp", "room",
]  # fmt: skip

_HASHED = 12  # hexadecimal digits: enough to distinguish cards, too few to identify one
_CUBLAS = ("nvidia-cublas", "nvidia-cublas-cu13", "nvidia-cublas-cu12", "nvidia-cublas-cu11")
_SHARE = 0.6  # fraction of the free memory; calls need the rest
_GPU_CACHE_FALLBACK = 50 << 20  # the size on an H100, used if torch does not report the cache
Cuda: TypeAlias = Any


def environment(device: str) -> dict[str, str]:
    """Return the columns of `ResultRow` that describe the machine and the software for this device, including the
    device.

    Call it in the process that measures, once its settings are made: `math_mode`, `openmp` and `allocator` are read
    from this process.
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
    """Return the device name given by its maker, such as `NVIDIA H100 80GB HBM3`; for `cpu`, the name of the CPU."""
    if is_cuda(device):
        return torch.cuda.get_device_name(torch.device(device))
    return host.cpu_name()


def is_cuda(device: str) -> bool:
    """Return True for a GPU that torch calls cuda, which includes AMD's."""
    return torch.device(device).type == "cuda"


# --- software ---------------------------------------------------------------------------------------------------------


def driver(device: str) -> str:
    """Return the GPU's driver and torch's platform, as in `580.82.07, CUDA 12.8`; empty for a CPU."""
    if not is_cuda(device):
        return ""
    if torch.version.hip:
        return ", ".join(filter(None, (text(Path("/sys/module/amdgpu/version")), f"ROCm {torch.version.hip}")))
    return ", ".join(filter(None, (nvidia_driver(), f"CUDA {torch.version.cuda}")))


@cache
def nvidia_driver() -> str:
    """Return the version of NVIDIA's kernel driver, from /proc or otherwise from nvidia-smi; empty if there is none."""
    match = re.search(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s", text(Path("/proc/driver/nvidia/version")))
    if match:
        return match[1]
    return host.program_output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0]


def blas() -> str:
    """Return the matrix-multiplication libraries, as in `torch: MKL 2024.2, oneDNN 3.12.0; numpy: openblas 0.3.31`."""
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
    """Return the OpenMP runtime and its thread settings, as in `libgomp;bind=true;places=cores;wait=passive`."""
    settings = (f"{name}={os.environ[variable]}" for name, variable in _OPENMP.items() if os.environ.get(variable))
    return ";".join((*openmp_runtimes(), *settings))


def openmp_runtimes() -> tuple[str, ...]:
    """Return the OpenMP libraries in this process; more than one is a problem, since each has its own threads."""
    from threadpoolctl import threadpool_info  # type: ignore[import-untyped]

    prefixes = (info["prefix"] for info in threadpool_info() if info["user_api"] == "openmp")
    return tuple(dict.fromkeys(prefixes))


def allocator(device: str = "cpu") -> str:
    """Return the memory allocator and its settings, as in `glibc;mmap_threshold=...`, `jemalloc` or `system`."""
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


# --- arithmetic: what torch may use instead of full float32; set before anything is measured ----------------------


# Environment variables that change a GPU's matmuls without torch's knowledge: the first one overrides `allow_tf32`.
_OVERRIDES = {"NVIDIA_TF32_OVERRIDE": "tf32_override", "CUBLAS_WORKSPACE_CONFIG": "cublas_workspace"}
# torch's float32 matmul precision → the arithmetic of float32 matmuls, on a GPU and (oneDNN) on a CPU.
MODES = {"highest": ("ieee", "ieee"), "high": ("tf32", "tf32"), "medium": ("tf32", "bf16")}


def set_math_mode(mode: str, device: str = "cpu") -> str:
    """Set the arithmetic of this process; return it in the form of the column `math_mode`, read back from torch.

    `mode` is torch's float32 matmul precision and applies to convolutions too: cuDNN's convolutions use TF32 by
    default, and a kernel made of convolutions would otherwise use different arithmetic from one made of matmuls. Sums
    in bf16 and fp16 matmuls keep torch's defaults (partial sums may be rounded), fp16 accumulation stays off, and
    subnormals are kept. The result lists the settings that matter on `device` (`cpu`, `cuda`, `cuda:1`). Raises
    FFNError for an unknown mode.
    """
    if mode not in MODES:
        raise FFNError(f"--math-mode: unknown mode {shown(mode)}", f"use {', '.join(MODES)}")
    torch.set_float32_matmul_precision(mode)
    on_gpu, on_cpu = MODES[mode]
    torch.backends.cudnn.allow_tf32 = on_gpu == "tf32"
    if hasattr(torch.backends.mkldnn, "conv"):
        torch.backends.mkldnn.conv.fp32_precision = on_cpu
    matmul = torch.backends.cuda.matmul
    matmul.allow_bf16_reduced_precision_reduction = True
    matmul.allow_fp16_reduced_precision_reduction = True
    if hasattr(matmul, "allow_fp16_accumulation"):
        matmul.allow_fp16_accumulation = False
    torch.set_flush_denormal(False)
    return math_mode(device)


def math_mode(device: str = "cpu") -> str:
    """Return the arithmetic in use, as in `fp32=highest subnormals=kept`; on a GPU also TF32 and 16-bit sums."""
    matmul = torch.backends.cuda.matmul
    words = [f"fp32={torch.get_float32_matmul_precision()}"]
    if device.startswith("cuda"):
        words += [
            f"tf32={'on' if matmul.allow_tf32 else 'off'}",
            f"conv_tf32={'on' if torch.backends.cudnn.allow_tf32 else 'off'}",
            f"bf16_reduction={_sums(matmul.allow_bf16_reduced_precision_reduction)}",
            f"fp16_reduction={_sums(matmul.allow_fp16_reduced_precision_reduction)}",
            f"blas={str(torch.backends.cuda.preferred_blas_library()).rpartition('.')[2].lower()}",
        ]
        overrides = {word: os.environ.get(name, "") for name, word in _OVERRIDES.items()}
        words += [f"{word}={''.join(value.split())}" for word, value in overrides.items() if value]
    smallest = torch.tensor(torch.finfo(torch.float32).tiny) / 2  # torch does not report whether subnormals are flushed
    return " ".join([*words, f"subnormals={'kept' if smallest.item() else 'flushed'}"])


def _sums(reduced: object) -> str:
    """Return how partial sums are kept. torch's flag may be a pair (reduced precision, split-k); its first value says
    whether they are rounded."""
    first = reduced[0] if isinstance(reduced, tuple) else reduced
    return "rounded" if first else "fp32"


# --- what distinguishes two GPUs of the same model
# ---------------------------------------------------------------------


def gpu_columns(device: str) -> dict[str, str]:
    """Return the columns of a GPU, empty if unknown; no columns for a CPU.

    Cards of the same model differ by 5 % or more; a power limit of 500 instead of 700 W makes a larger difference, and
    with another version of cuBLAS, `eager` is a different kernel.
    """
    if not is_cuda(device):
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
    """Return the version, such as `12.8.4`, of the library that this process loaded, else of the installed package."""
    path = re.search(r"\S*/libcublas\.so\S*", text(Path("/proc/self/maps")))
    if path:
        try:
            return property_version(ctypes.CDLL(path[0]).cublasGetProperty)
        except (OSError, AttributeError):
            pass
    return next((version for name in _CUBLAS if (version := installed(name))), "")


def property_version(get: Any) -> str:
    """Return the version reported by a function of CUDA's libraries, `get(0|1|2, &value)`: major, minor, patch."""
    parts = []
    for which in range(3):
        value = ctypes.c_int()
        get(which, ctypes.byref(value))
        parts.append(str(value.value))
    return ".".join(parts)


# --- memory and caches ------------------------------------------------------------------------------------------------


def room(device: str, most: int | None = None) -> int | None:
    """Return the bytes of the device's memory that copies may use; None if the free memory is unknown. `most` limits
    the bytes of CPU memory for this process and everything it started. Memory that an earlier case has returned to
    malloc counts as free."""
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
    """Return the values of `llc_bytes` and `room`."""
    return llc_bytes(device), room(device, most)


def free(device: str) -> int | None:
    """Return the free bytes of the device's memory, including what torch has cached; None if unknown."""
    return free_memory(device) if device.startswith("cuda") else available_memory()


def llc_bytes(device: str) -> int:
    """Return the bytes of the device's last-level cache; `llc_note` says if the size is a guess."""
    return _llc(device)[0]


def llc_note(device: str) -> str:
    """Return the source of `llc_bytes`; empty if the value is simply the size of one cache."""
    return _llc(device)[1]


def _llc(device: str) -> tuple[int, str]:
    if not is_cuda(device):
        return host.cpu_llc()
    from ffncli.system import hardware

    properties = torch.cuda.get_device_properties(torch.device(device))
    row = hardware.find(properties.name)
    sheet = row.llc_bytes if row else 0
    size = int(getattr(properties, "L2_cache_size", 0) or 0)
    if sheet > 2 * size:  # AMD: torch only knows the L2 cache of one die, not the Infinity Cache behind it
        return sheet, "from the data sheet"
    return (size, "") if size else (_GPU_CACHE_FALLBACK, f"unknown, {_GPU_CACHE_FALLBACK >> 20} MiB assumed")


def finish(device: str) -> None:
    """Wait until a GPU has finished all its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def free_memory(device: str, cuda: Cuda = torch.cuda) -> int:
    """Return the bytes that tensors can still get: those that the driver calls free, and those that torch has cached
    from freed tensors.

    The cache of a graph's private pool is included, although only that graph could use it, because graphs are freed
    first.
    """
    free, _ = cuda.mem_get_info(torch.device(device))
    return int(free + cuda.memory_reserved(device) - cuda.memory_allocated(device))


def release(device: str, cuda: Cuda = torch.cuda) -> None:
    """Free tensors in reference cycles, which takes about 0.1 s. Then return freed GPU memory to the driver, or freed
    CPU memory to the system if there is much of it."""
    gc.collect()
    if not device.startswith("cuda"):
        return_freed_memory()
        return
    with suppress(RuntimeError):  # after a fault every call raises; the next case reports it
        cuda.empty_cache()


class KernelMemory:
    """The bytes of memory that one kernel needs besides its weights and x; nothing is measured on a CPU."""

    def __init__(self, device: str, cuda: Cuda = torch.cuda) -> None:
        self.kept = 0
        self._device, self._cuda = device, cuda
        self.counted = device.startswith("cuda")

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Count memory that the `with` block allocates and does not free, such as buffers, as kept by the kernel."""
        before = self._allocated()
        yield
        self.kept += self._allocated() - before

    def peak(self, call: Callable[[], object], forget: Callable[[], object]) -> int | None:
        """Return the peak of bytes allocated by a call, including its output and what the kernel keeps; None on a CPU.

        `forget` frees the last call's output, wherever the caller keeps it. `call` must be a plain call, not a graph's
        replay, whose memory was allocated at capture. It is called once in advance, so that a library's permanent
        workspace does not count.
        """
        if not self.counted:
            return None
        call()
        forget()
        before = self._allocated()
        self._cuda.reset_peak_memory_stats(self._device)
        call()
        self._cuda.synchronize(self._device)
        peak = int(self._cuda.max_memory_allocated(self._device))
        forget()
        return peak - before + self.kept

    def _allocated(self) -> int:
        if not self.counted:
            return 0
        self._cuda.synchronize(self._device)
        return int(self._cuda.memory_allocated(self._device))
