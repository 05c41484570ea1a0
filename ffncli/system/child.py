"""A child process that runs other people's code: what it settles before any of that runs, its end, and its death."""

from __future__ import annotations

import ctypes
import io
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

from ffncli.system.process_tree import descendants

KILLED = -9
_REAPING = 10.0  # s; a process that waits for a driver cannot be killed before that answers
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_SIGNALS = {
    -11: "segmentation fault",
    -6: "aborted",
    -7: "bus error",
    -8: "arithmetic error",
    -4: "illegal instruction",
}


def settle() -> None:
    """In the child, first of all: prints go to stderr, Ctrl-C is the parent's to hear, its death is ours."""
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # what a kernel prints is not lost where it ends the process
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what it starts stays below it: seen, counted and ended with it
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_parent() -> None:
    """From now on this process is killed when its parent ends; on Linux, which alone can do so."""
    if sys.platform == "linux":
        parent = os.getppid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before we asked to be told
            os._exit(0)


def _prctl(what: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)


def require_original(pid: int) -> None:
    """Ends this process at once if it is a copy of that one, forked by a user's code: it must not speak for it."""
    if os.getpid() != pid:
        os._exit(1)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child with its process group and what it started outside of that, and reap the child."""
    left = descendants(process.pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING)


def shared_memory(size: int = 0) -> int:
    """The descriptor of memory without a name, of so many bytes, which a child can be given."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("ffn")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, size)
    return number


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """The child's exit code once it has closed its line; negative is a signal. It is not reaped: its group keeps its
    id."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.wait()
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if status is None:
        return 0
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def has_ended(process: subprocess.Popen[bytes], patience: float) -> bool:
    """Whether the child ends within so many seconds. It is not reaped."""
    until = time.monotonic() + patience
    while True:
        if not hasattr(os, "waitid"):
            over = process.poll() is not None
        else:
            over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        if over or time.monotonic() > until:
            return over
        time.sleep(0.01)


def ending(code: int | None) -> str:
    """How a process ended, in words; None: it still ran."""
    if code is None:
        return "closed its line"
    if code == KILLED:
        return "was killed (signal 9), probably for lack of memory"
    if code < 0:
        return f"was ended by signal {-code}" + (f" ({_SIGNALS[code]})" if code in _SIGNALS else "")
    return f"ended with exit code {code}"
