"""Settings of torch, of other libraries and of Python that all kernels share, and those of the process."""

import gc
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch._C._dynamo import eval_frame
from torch.nn.modules import module as torch_module

from ffncli.bench.timing.cheating.process_state import Setting, settings_of_process
from ffncli.bench.verdict import WrongCode

_PRODUCTS = [
    ("generic", "all"),
    *((backend, what) for backend in ("cuda", "mkldnn") for what in ("all", "matmul", "conv", "rnn")),
]
_SUMS = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction", "allow_fp16_accumulation")


def settings() -> list[Setting]:
    """Return every setting that all kernels share."""
    changed, torch_c = WrongCode.ENVIRONMENT_CHANGED, torch._C
    libraries = ThreadpoolController()  # the loaded libraries, including BLAS
    return [
        Setting("the number of torch's threads", WrongCode.THREADS_CHANGED, torch.get_num_threads,
                torch.set_num_threads),
        Setting("the thread count of a library", WrongCode.THREADS_CHANGED,
                lambda: [library.num_threads for library in libraries.lib_controllers],
                lambda counts: _set_threads(libraries, counts)),
        Setting("OpenMP's choice of the number of threads", WrongCode.THREADS_CHANGED,
                lambda: [omp.omp_get_dynamic() for omp in _openmp(libraries)],
                lambda flags: _set_openmp(libraries, flags)),
        Setting("the default dtype", changed, torch.get_default_dtype, torch.set_default_dtype),
        Setting("the precision of float32 matmuls", changed, torch.get_float32_matmul_precision,
                 torch.set_float32_matmul_precision),
        Setting("a GPU's arithmetic", changed, _gpu_arithmetic, _set_gpu_arithmetic),
        # by torch's newer names; while these contradict the older ones, torch does not tell the older ones' values
        Setting("the precision of float32 products", changed, _precisions, _set_precisions),
        Setting("the current stream of a GPU", changed, _stream, _set_stream),
        Setting("the use of oneDNN", changed, torch_c._get_mkldnn_enabled, torch_c._set_mkldnn_enabled),
        Setting("the use of deterministic algorithms", changed, torch.are_deterministic_algorithms_enabled,
                 torch.use_deterministic_algorithms),
        Setting("grad mode", changed, torch.is_grad_enabled, torch.set_grad_enabled),
        Setting("autocast", changed, lambda: torch.is_autocast_enabled("cpu"),
                 lambda on: torch.set_autocast_enabled("cpu", on)),
        Setting("anomaly mode", changed, torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
        Setting("the treatment of subnormal numbers", changed,
                 lambda: bool((torch.full((1,), 2.0**-1040, dtype=torch.float64) * 0.5).item()),
                 lambda kept: torch.set_flush_denormal(not kept)),
        Setting("torch's function modes", WrongCode.PATCHED_TORCH, _modes, _leave_modes),
        Setting("hooks on every nn.Module", WrongCode.PATCHED_TORCH, _hooks, _unhook),
        Setting("torch's dispatch keys", WrongCode.PATCHED_TORCH, _dispatch_keys),
        Setting("torch's memory for tensors", changed, torch_c._is_default_mobile_cpu_allocator_set,
                _unset_allocator),
        Setting("hooks on saved tensors", WrongCode.PATCHED_TORCH, _saved_tensors, _leave_saved_tensors),
        Setting("torch's profiler", changed, lambda: torch_c._autograd._profiler_type().value),
        Setting("the evaluation of Python's functions", WrongCode.PATCHED_TORCH, _evaluation, _set_evaluation),
        Setting("a profiling or tracing function", changed, _tracers, _set_tracers),
        Setting("a monitor of Python's events", changed, _monitors, _free_monitors),
        Setting("an audit hook", changed, _is_audited),
        Setting("the tracing of memory", changed, tracemalloc.is_tracing, _stop_tracing),
        Setting("the interval between thread switches", changed, sys.getswitchinterval, sys.setswitchinterval),
        Setting("the garbage collector", changed, lambda: (gc.get_threshold(), len(gc.callbacks), gc.get_debug()),
                _set_collector),
        *settings_of_process(),
    ]  # fmt: skip


def _set_threads(libraries: Any, counts: list[int]) -> None:
    for library, count in zip(libraries.lib_controllers, counts, strict=True):
        library.set_num_threads(count)


def _openmp(libraries: Any) -> list[Any]:
    return [library.dynlib for library in libraries.lib_controllers if library.user_api == "openmp"]


def _set_openmp(libraries: Any, flags: list[int]) -> None:
    for omp, flag in zip(_openmp(libraries), flags, strict=True):
        omp.omp_set_dynamic(flag)


def _precisions() -> list[str]:
    return [torch._C._get_fp32_precision_getter(*place) for place in _PRODUCTS]


def _set_precisions(before: list[str]) -> None:
    for place, precision in zip(_PRODUCTS, before, strict=True):
        torch._C._set_fp32_precision_setter(*place, precision)


def _gpu_arithmetic() -> tuple[object, ...]:
    """Return torch's flags, which can be read and set even without a GPU. The TF32 flag of matmuls is left out: it is
    part of the setting for the precision of float32 matmuls."""
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    sums = (getattr(matmul, name) for name in _SUMS if hasattr(matmul, name))
    return cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *sums


def _set_gpu_arithmetic(before: tuple[Any, ...]) -> None:
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    cudnn.allow_tf32, cudnn.enabled, cudnn.benchmark, cudnn.deterministic, *sums = before
    for name, value in zip((name for name in _SUMS if hasattr(matmul, name)), sums, strict=True):
        setattr(matmul, name, value)


def _stream() -> object:
    """Return the stream that receives launches, if a GPU is in use."""
    in_use = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return torch.cuda.current_stream() if in_use else None


def _set_stream(before: Any) -> None:
    if before is not None:
        torch.cuda.set_stream(before)


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
    """Return torch's dicts of hooks that apply to every module."""
    return [d for name, d in vars(torch_module).items() if name.startswith("_global_") and isinstance(d, dict)]


def _hooks() -> list[tuple[int, ...]]:
    return [tuple(hooks) for hooks in _global_hooks()]


def _unhook(before: list[tuple[int, ...]]) -> None:
    for hooks, kept in zip(_global_hooks(), before, strict=True):
        for key in [key for key in hooks if key not in kept]:
            del hooks[key]


def _tracers() -> tuple[object, ...]:
    return sys.getprofile(), sys.gettrace(), threading.getprofile(), threading.gettrace()


def _set_tracers(before: tuple[Any, ...]) -> None:
    sys.setprofile(before[0])
    sys.settrace(before[1])
    threading.setprofile(before[2])
    threading.settrace(before[3])


def _set_collector(before: tuple[tuple[int, int, int], int, int]) -> None:
    gc.set_threshold(*before[0])
    del gc.callbacks[before[1] :]
    gc.set_debug(before[2])


def _dispatch_keys() -> tuple[str, str]:
    return str(torch._C._dispatch_tls_local_include_set()), str(torch._C._dispatch_tls_local_exclude_set())


def _saved_tensors() -> object:
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


def _leave_saved_tensors(before: object) -> None:
    while (now := _saved_tensors()) is not None and now != before:
        torch._C._autograd._pop_saved_tensors_default_hooks()


def _evaluation() -> object:
    """Return what evaluates Python's functions instead of the interpreter, which torch.compile sets while it compiles
    and calls."""
    return eval_frame.get_eval_frame_callback()


def _set_evaluation(before: Any) -> None:
    eval_frame.set_eval_frame(before)


def _unset_allocator(before: bool) -> None:
    if not before:
        torch._C._unset_default_mobile_cpu_allocator()


def _stop_tracing(before: bool) -> None:
    if not before:
        tracemalloc.stop()


_MONITORS = range(6)  # the ids of tools; those that follow are Python's own


def _monitors() -> tuple[tuple[str, int], ...]:
    """Return the tools that Python reports events to, from 3.12 on, and which events."""
    if sys.version_info < (3, 12):
        return ()
    named = [(number, sys.monitoring.get_tool(number)) for number in _MONITORS]
    return tuple((name, sys.monitoring.get_events(number)) for number, name in named if name is not None)


def _free_monitors(before: tuple[tuple[str, int], ...]) -> None:
    if sys.version_info >= (3, 12):
        for number in _MONITORS:
            if (name := sys.monitoring.get_tool(number)) is not None and name not in dict(before):
                sys.monitoring.set_events(number, 0)
                sys.monitoring.free_tool_id(number)


_EVENTS, _SERIES, _HEARD = 50, 20, 3.0
_READ = time.perf_counter_ns  # a file might replace it


def _is_audited() -> bool:
    """Return whether a function hears Python's audit events, by how long an event takes: Python lists no such function.

    It is called when this process looks at anything, and could put back what it has changed.
    """
    calls: tuple[Callable[[str], object], ...] = sys.audit, len
    least = [10**9, 10**9]
    for _ in range(_SERIES):
        for at, call in enumerate(calls):
            start = _READ()
            for _ in range(_EVENTS):
                call("ffncli")
            least[at] = min(least[at], _READ() - start)
    return least[0] > _HEARD * least[1]
