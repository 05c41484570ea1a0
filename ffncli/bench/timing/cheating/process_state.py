"""What the operating system and the C library hold for this process, and all kernels share: a Setting for each.

A kernel may change these through Python, through ctypes or in C: they are read where the system keeps them.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ffncli.bench.verdict import WrongCode
from ffncli.system.cgroup import ROOT, text
from ffncli.system.host import malloc_statistics

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

_VARIABLES = ("OMP_", "GOMP_", "MKL_", "OPENBLAS_", "ONEDNN_", "DNNL_", "MALLOC_", "ATEN_", "LD_")
_NAMES = ("SIGALRM", "SIGVTALRM", "SIGPROF", "SIGUSR1", "SIGUSR2", "SIGCHLD")
_SIGNALS = [getattr(signal, name) for name in _NAMES if hasattr(signal, name)]
_SIGNAL_MASK: int = sum(1 << (number - 1) for number in _SIGNALS)
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF) if hasattr(signal, "getitimer") else ()
_STATUS = ("NoNewPrivs", "Seccomp", "Speculation", "THP_enabled", "Mems_allowed_list")


@dataclass(frozen=True)
class Setting:
    """A setting of the process, with functions to read and restore it (`write` is None if only the code that changed it
    can restore it)."""

    name: str
    code: WrongCode
    read: Callable[[], Any]
    write: Callable[[Any], object] | None = None

    def now(self) -> Any:
        """Return the current value; the error's text if the system or torch refuses to tell it."""
        try:
            return self.read()
        except (OSError, RuntimeError) as error:
            return str(error)


def settings_of_process() -> list[Setting]:
    """Return the settings that the operating system and the C library keep."""
    changed = WrongCode.ENVIRONMENT_CHANGED
    return [
        Setting("the environment", changed, _environment, _reset_environment),
        Setting("the cores that may be used", changed, _cores, _set_cores),
        Setting("the priority of the process", changed, _priority, _set_priority),
        Setting("a limit of the process", changed, _limits, _set_limits),
        Setting("the cgroup", changed, lambda: text(ROOT / "proc/self/cgroup")),
        Setting("the system's treatment of the process", changed, _status),
        Setting("the C library's allocation", changed, _allocation, _reset_allocation),
        Setting("a signal's handler", changed, _handlers, _set_handlers),
        Setting("a timer of the process", changed, _timers, _stop_timers),
        Setting("a signal that code in C handles", changed, lambda: _signals("SigCgt:"), _uncatch),
        Setting("a signal that is ignored", changed, lambda: _signals("SigIgn:")),
        Setting("a timer of the system", changed, _system_timers),
    ]


def _environment() -> tuple[dict[str, str], dict[str, str]]:
    """Return the variables that libraries read: Python's copy, and the C library's."""
    return tuple({k: v for k, v in of.items() if k.startswith(_VARIABLES)} for of in (os.environ, _in_c()))  # type: ignore[return-value]


def _in_c() -> Mapping[str, str]:
    if sys.platform != "linux":
        return {}
    entry = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    variables, at = dict[str, str](), 0
    while entry and entry[at] is not None:
        name, _, value = os.fsdecode(entry[at]).partition("=")
        variables[name], at = value, at + 1
    return variables


def _reset_environment(before: tuple[Mapping[str, str], Mapping[str, str]]) -> None:
    for now, then, put, remove in zip(
        _environment(), before, (os.environ.__setitem__, os.putenv), (os.environ.__delitem__, os.unsetenv), strict=True
    ):
        for name in now.keys() - then.keys():
            remove(name)
        for name, value in then.items():
            put(name, value)


def _cores() -> frozenset[int]:
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


def _set_cores(before: frozenset[int]) -> None:
    if before:
        os.sched_setaffinity(0, before)


def _priority() -> tuple[int, ...]:
    """Return this thread's scheduling policy, its priority there, and its niceness."""
    if not hasattr(os, "sched_getscheduler"):
        return ()
    return os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, os.getpriority(os.PRIO_PROCESS, 0)


def _set_priority(before: tuple[int, int, int]) -> None:
    with suppress(PermissionError):  # without rights, a thread cannot raise its priority again
        os.sched_setscheduler(0, before[0], os.sched_param(before[1]))
        os.setpriority(os.PRIO_PROCESS, 0, before[2])


def _limits() -> dict[str, tuple[int, int]]:
    names = [name for name in dir(resource) if name.startswith("RLIMIT_")]
    return {name: resource.getrlimit(getattr(resource, name)) for name in names}


def _set_limits(before: Mapping[str, tuple[int, int]]) -> None:
    for name, limits in before.items():
        with suppress(ValueError, OSError):  # without rights, a hard limit cannot be raised again
            resource.setrlimit(getattr(resource, name), limits)


def _status() -> list[str]:
    """Return the lines of the system's own record about filters of system calls, mitigations and memory."""
    return [line for line in text(ROOT / "proc/self/status").splitlines() if line.startswith(_STATUS)]


# --- memory -----------------------------------------------------------------------------------------------------------


_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_THRESHOLD, _M_PERTURB = -1, -2, -3, -6  # mallopt's parameters
_FIXED = {
    _M_TRIM_THRESHOLD: "MALLOC_TRIM_THRESHOLD_",
    _M_TOP_PAD: "MALLOC_TOP_PAD_",
    _M_MMAP_THRESHOLD: "MALLOC_MMAP_THRESHOLD_",
}
_BLOCK, _EDGE, _MARK = 1 << 14, 64, 0x5A  # bytes; malloc keeps its own data at a free block's edges
_MOST_FREE, _MOST = 1 << 28, 2**31 - 1


def _allocation() -> tuple[bool, bool]:
    """Return what malloc does, whose settings cannot be read: whether it overwrites blocks that are freed or returned,
    and whether it gives freed memory back to the system, page by page. With --allocator system, it may do the latter.
    """
    libc = ctypes.CDLL(None)
    if sys.platform != "linux" or not hasattr(libc, "mallopt"):
        return False, False
    libc.malloc.restype = libc.sbrk.restype = ctypes.c_void_p
    libc.malloc.argtypes, libc.free.argtypes, libc.sbrk.argtypes = [ctypes.c_size_t], [ctypes.c_void_p], [ctypes.c_long]
    overwrites = _overwrites(libc)
    known = malloc_statistics()
    # the least size that no free block has, so that malloc takes it from the end of its memory, or extends that
    size = known.get("fordblks", 0) - known.get("keepcost", 0) + _BLOCK
    if overwrites or size > _MOST_FREE or not all(name in os.environ for name in _FIXED.values()):
        return overwrites, False
    block, end = libc.malloc(size), libc.sbrk(0)
    mapped = malloc_statistics().get("hblks") != known.get("hblks")
    libc.free(block)
    return overwrites, bool(mapped or libc.sbrk(0) < end)


def _overwrites(libc: Any) -> bool:
    block = libc.malloc(_BLOCK)
    ctypes.memset(block, _MARK, _BLOCK)
    libc.free(block)
    again = libc.malloc(_BLOCK)
    inside = ctypes.string_at(again + _EDGE, _BLOCK - 2 * _EDGE)
    libc.free(again)
    return bool(again == block and inside != bytes([_MARK]) * len(inside))


def _reset_allocation(before: tuple[bool, bool]) -> None:
    mallopt = ctypes.CDLL(None).mallopt
    mallopt(_M_PERTURB, 0)
    for parameter, name in _FIXED.items():
        if os.environ.get(name, "").isdigit():
            mallopt(parameter, min(int(os.environ[name]), _MOST))


# --- signals ----------------------------------------------------------------------------------------------------------


def _handlers() -> list[object]:
    return list(map(signal.getsignal, _SIGNALS))


def _set_handlers(before: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, before, strict=True):
        signal.signal(number, handler)


def _timers() -> tuple[bool, ...]:
    """Return which timers are running; their remaining time is not a setting."""
    return tuple(signal.getitimer(kind) != (0.0, 0.0) for kind in _TIMERS)


def _stop_timers(before: tuple[bool, ...]) -> None:
    for kind, ran in zip(_TIMERS, before, strict=True):
        if not ran:
            signal.setitimer(kind, 0)


def _signals(line: str) -> int:
    """Return a mask of the system: of signals that are caught by any handler, also by one that Python does not know, or
    that are ignored."""
    for known in text(ROOT / "proc/self/status").splitlines():  # no built-in function, which may be replaced
        if known.startswith(line):
            return int(known.split()[1], 16) & _SIGNAL_MASK
    return 0


def _uncatch(before: int) -> None:
    for number in _SIGNALS:
        if _signals("SigCgt:") & ~before & 1 << (number - 1):
            signal.signal(number, signal.SIG_DFL)


def _system_timers() -> int:
    """Return the number of POSIX timers of this process, which only code in C can start."""
    return text(ROOT / "proc/self/timers").count("ID:")
