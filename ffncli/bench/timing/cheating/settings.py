"""Settings of the process that all kernels share: how each is read, and how it is set again."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch.nn.modules import module as torch_module

from ffncli.bench.verdict import WrongCode
from ffncli.dataclass import dataclass

_VARIABLES = ("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "MALLOC_", "ATEN_", "LD_")
_SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")
_SIGNALS = ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2")


@dataclass(frozen=True)
class Setting:
    """A setting of the process: how it is read, and how it is set again (None: only by whoever changed it)."""

    name: str
    code: WrongCode
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None


def settings() -> list[Setting]:
    """Every setting that all kernels share."""
    changed, torch_c = WrongCode.ENVIRONMENT_CHANGED, torch._C
    libraries = ThreadpoolController()  # those that are loaded now; BLAS is
    return [
        Setting("the number of torch's threads", WrongCode.THREADS_CHANGED, torch.get_num_threads,
                torch.set_num_threads),
        Setting("the number of a library's threads", WrongCode.THREADS_CHANGED,
                lambda: [library.num_threads for library in libraries.lib_controllers],
                lambda counts: _set_threads(libraries, counts)),
        Setting("the default dtype", changed, torch.get_default_dtype, torch.set_default_dtype),
        Setting("the precision of float32 products", changed, torch.get_float32_matmul_precision,
                 torch.set_float32_matmul_precision),
        Setting("the arithmetic of a GPU", changed, _gpu_arithmetic, _set_gpu_arithmetic),
        Setting("the current stream of a GPU", changed, _stream, _set_stream),
        Setting("the use of oneDNN", changed, torch_c._get_mkldnn_enabled, torch_c._set_mkldnn_enabled),
        Setting("the use of deterministic algorithms", changed, torch.are_deterministic_algorithms_enabled,
                 torch.use_deterministic_algorithms),
        Setting("grad mode", changed, torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("autocast", changed, lambda: torch.is_autocast_enabled("cpu"),
                 lambda on: torch.set_autocast_enabled("cpu", on)),
        Setting("anomaly mode", changed, torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        Setting("the treatment of subnormal numbers", changed, _subnormals_kept,
                 lambda kept: torch.set_flush_denormal(not kept)),
        Setting("the modes for torch's functions", WrongCode.PATCHED_TORCH, _modes, _leave_modes),
        Setting("hooks on every nn.Module", WrongCode.PATCHED_TORCH, _hooks, _unhook),
        Setting("the environment", changed, _environment, _reset_environment),
        Setting("the cores that may be used", changed, _cores, _set_cores),
        Setting("a profiling or tracing function", changed, _tracers, _set_tracers),
        Setting("the interval of switches between threads", changed, sys.getswitchinterval, sys.setswitchinterval),
        Setting("the collector of garbage", changed, lambda: (gc.get_threshold(), len(gc.callbacks)), _set_collector),
        Setting("a signal's handler", changed, _handlers, _set_handlers),
        Setting("a timer of the process", changed, _timers, _stop_timers),
    ]  # fmt: skip


def _set_threads(libraries: Any, counts: list[int]) -> None:
    for library, count in zip(libraries.lib_controllers, counts, strict=True):
        library.set_num_threads(count)


def _gpu_arithmetic() -> tuple[object, ...]:
    """torch's flags, which can be read and set without a GPU too. Those of products in TF32 belong to the precision
    of float32 products."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    return (
        cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *_sums(matmul),
    )  # fmt: skip


def _sums(matmul: Any) -> tuple[object, ...]:
    return tuple(getattr(matmul, name) for name in _SUMS if hasattr(matmul, name))


def _set_gpu_arithmetic(before: tuple[Any, ...]) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *sums = before
    for name, value in zip((name for name in _SUMS if hasattr(matmul, name)), sums, strict=True):
        setattr(matmul, name, value)


def _stream() -> object:
    """Which one launches go to, where a GPU is in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if in_use else None


def _set_stream(before: Any) -> None:
    if before is not None:
        torch.cuda.set_stream(before)


def _subnormals_kept() -> bool:
    return bool((torch.full((1,), 2.0**-1040, dtype=torch.float64) * 0.5).item())


def _modes() -> tuple[int, int]:
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def _leave_modes(before: tuple[int, int]) -> None:
    from torch.overrides import _pop_mode
    from torch.utils._python_dispatch import _pop_mode as pop_dispatch_mode

    while torch._C._len_torch_function_stack() > before[0]:
        _pop_mode()  # type: ignore[no-untyped-call]
    while torch._C._len_torch_dispatch_stack() > before[1]:
        pop_dispatch_mode()


def _global_hooks() -> list[dict[int, object]]:
    """torch's dicts of hooks for every module."""
    return [d for name, d in vars(torch_module).items() if name.startswith("_global_") and isinstance(d, dict)]


def _hooks() -> list[tuple[int, ...]]:
    return [tuple(hooks) for hooks in _global_hooks()]


def _unhook(before: list[tuple[int, ...]]) -> None:
    for hooks, kept in zip(_global_hooks(), before, strict=True):
        for key in [key for key in hooks if key not in kept]:
            del hooks[key]


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_VARIABLES)}


def _reset_environment(before: Mapping[str, str]) -> None:
    for name in _environment().keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _set_cores(before: frozenset[int]) -> None:
    if before:
        os.sched_setaffinity(0, before)


def _tracers() -> tuple[object, ...]:
    return sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace()


def _set_tracers(before: tuple[Any, ...]) -> None:
    sys.setprofile(before[0])
    sys.settrace(before[1])
    threading.setprofile(before[2])
    threading.settrace(before[3])


def _set_collector(before: tuple[tuple[int, int, int], int]) -> None:
    gc.set_threshold(*before[0])
    del gc.callbacks[before[1] :]


def _handlers() -> list[object]:
    return [signal.getsignal(getattr(signal, name)) for name in _SIGNALS if hasattr(signal, name)]


def _set_handlers(before: list[Any]) -> None:
    for name, handler in zip([name for name in _SIGNALS if hasattr(signal, name)], before, strict=True):
        signal.signal(getattr(signal, name), handler)


def _timers() -> tuple[bool, ...]:
    """Which timers run; their remaining time is not a setting."""
    if not hasattr(signal, "getitimer"):
        return ()
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    return tuple(signal.getitimer(kind) != (0.0, 0.0) for kind in kinds)


def _stop_timers(before: tuple[bool, ...]) -> None:
    kinds = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    for kind, ran in zip(kinds, before, strict=True):
        if not ran:
            signal.setitimer(kind, 0)
