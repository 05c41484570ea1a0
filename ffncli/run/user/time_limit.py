"""A time limit on running a user's Python file: importing it, building its class, identifying what it computes, and
calling it. Code that ends the process is named, too.

The command line sets a limit; a library call has no limit unless its caller sets one. Two mechanisms end a load:

- An alarm (SIGALRM) raises in the main thread. It ends all code that returns to Python now and then: loops, sleeps,
  waits for a lock or a compiler. The alarm repeats, because `except: pass` may swallow the first one.
- C code that never returns to Python never sees the alarm. A separate guard process ends this process some seconds
  later, by a signal whose handler is the C library's `_exit`, which needs neither Python nor its lock. If this process
  ends before (a crash in C code, a signal), the guard says so.
"""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ffncli.errors import ExitCode, FFNError, option, shown_path
from ffncli.options import shared
from ffncli.options.opt import Options, as_typed

LOAD_TIME = 180.0  # s; long enough to compile a C++ extension
_AGAIN = 0.5  # s, between alarms
_GRACE = 5.0  # s, from the first alarm to the guard's signal
_limit: ContextVar[float | None] = ContextVar("load_time", default=None)

# The guard's stdin is closed when this process ends; if it ends as it should, it stops the guard first.
_GUARD = """
import os, select, sys
seconds, process, slow, ended = sys.argv[1:]
late = not select.select([0], [], [], float(seconds))[0]
sys.stderr.write((slow if late else ended) + "\\n")
sys.stderr.flush()
if late:
    os.kill(int(process), 3)
"""


class OutOfTime(BaseException):
    """Raised if a load takes too long; as a BaseException, it is not caught by the user's `except Exception`."""


@contextmanager
def limited_loading(seconds: float | None = LOAD_TIME) -> Iterator[None]:
    """Limit the loading of a user's file to `seconds`; None for no limit."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


def set_load_time(seconds: float | None) -> None:
    """Change the limit until the surrounding `limited_loading` ends; None leaves it unchanged."""
    if seconds is not None:
        _limit.set(seconds)


@dataclass(frozen=True, kw_only=True)
class LoadOptions(Options):
    """The option of commands that load a user's Python file."""

    load_time: shared.LoadTime = None

    def apply(self) -> None:
        """Set the limit for the rest of the command."""
        set_load_time(self.load_time)

    def limited(self) -> AbstractContextManager[None]:
        """Return a context that applies this limit; if no limit is set, the outer limit stays in force."""
        return nullcontext() if self.load_time is None else limited_loading(self.load_time)


class ProcessEnd(Exception):
    """Raised if the user's code calls `os._exit`, which would end this process with the code's own exit code."""


class _StayingAlive:
    """A context in which `os._exit` raises ProcessEnd; two threads, or a load inside another, may be in it at once."""

    def __init__(self) -> None:
        self._lock, self._depth, self._process, self._exit = threading.Lock(), 0, os.getpid(), os._exit

    def __enter__(self) -> None:
        with self._lock:
            if self._depth == 0:
                self._exit, self._process, os._exit = os._exit, os.getpid(), self._refuse
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0:
                os._exit = self._exit

    def _refuse(self, status: int) -> NoReturn:
        if os.getpid() != self._process:  # a fork that the user's code made may end
            self._exit(status)
        raise ProcessEnd(f"ends its process, with exit code {status}")


_staying_alive = _StayingAlive()


@contextmanager
def loading(path: Path | str, doing: str = "load") -> Iterator[None]:
    """Load this file within the limit (exit 3 if it takes longer), or call its code, which is then `doing` "return". In
    its code, `os._exit` raises ProcessEnd.

    There is no limit inside another load, outside the main thread, or on systems without alarms (Windows).
    """
    seconds = _limit.get()
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        with _staying_alive:
            yield
        return
    subject = path if isinstance(path, str) else shown_path(path)
    error, ended = _error(subject, doing, seconds), f"error: the process ended while {subject} ran"
    slow = f"error: {error.in_words(as_typed)}"
    before = signal.signal(signal.SIGALRM, _raise)
    try:
        with _staying_alive, limited_loading(None), _guard(seconds + _GRACE, slow, ended):
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # again, because OutOfTime may have interrupted the line above
        signal.signal(signal.SIGALRM, before)


def _error(subject: str, doing: str, seconds: float) -> FFNError:
    from ffncli.show.text import seconds_text, time_text

    limit = seconds_text(seconds) if seconds >= 1 else time_text(seconds)
    return FFNError(
        f"{subject} did not {doing} within {limit}", f"{option('load_time')} allows more", ExitCode.ENVIRONMENT
    )


def _raise(number: int, frame: object) -> NoReturn:
    raise OutOfTime


@contextmanager
def _guard(seconds: float, slow: str, ended: str) -> Iterator[None]:
    """Start a process that, after `seconds`, prints `slow` and ends this process with exit code 3, and that prints
    `ended` if this process ends before."""
    import subprocess

    command = [sys.executable, "-I", "-S", "-c", _GUARD, repr(seconds), str(os.getpid()), slow, ended]
    with _exit_on_signal():
        try:
            guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError:  # no process can be started; only the alarm remains
            yield
            return
        try:
            yield
        finally:
            guard.kill()
            guard.wait()
            if guard.stdin is not None:
                guard.stdin.close()


@contextmanager
def _exit_on_signal() -> Iterator[None]:
    """Make signal 3 end the process immediately with exit code 3, by making the C library's `_exit` its handler.

    A handler receives the signal's number and `_exit` the exit code; both are ExitCode.ENVIRONMENT.
    """
    import ctypes

    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = [ctypes.c_int, ctypes.c_void_p], ctypes.c_void_p
    before = library.signal(int(ExitCode.ENVIRONMENT), ctypes.cast(library._exit, ctypes.c_void_p))
    try:
        yield
    finally:
        with suppress(OSError):
            library.signal(int(ExitCode.ENVIRONMENT), before)
