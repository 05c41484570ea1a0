"""A time limit on loading a user's Python file: importing it, building its class, finding out what it computes.

The command line sets one; a call of the library has none, unless its caller sets it. Two things end a load:

- An alarm (SIGALRM) raises in the main thread. It ends whatever returns to Python now and then: loops, sleeps, waits
  for a lock or for a compiler. It repeats, because `except: pass` would swallow one.
- C code that never returns to Python never sees the alarm. A guard, a process of its own, ends this one some seconds
  later, by a signal whose handler is the C library's `_exit`: that needs neither Python nor its lock.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from ffncli.errors import ExitCode, FFNError, option, shown_path
from ffncli.options import shared
from ffncli.options.opt import Options, as_typed

LOAD_TIME = 180.0  # s; a C++ extension compiles then
_AGAIN = 0.5  # s, between alarms
_GRACE = 5.0  # s, from the first alarm to the guard's signal
_limit: ContextVar[float | None] = ContextVar("load_time", default=None)

# Its input ends, or holds a byte, when the load is over or this process is gone.
_GUARD = """
import os, select, sys
seconds, process, text = sys.argv[1:]
if not select.select([0], [], [], float(seconds))[0]:
    sys.stderr.write(text + "\\n")
    sys.stderr.flush()
    os.kill(int(process), 3)
"""


class OutOfTime(BaseException):
    """A load took too long; no `except Exception` of the user's file catches it."""


@contextmanager
def limited_loading(seconds: float | None = LOAD_TIME) -> Iterator[None]:
    """Limit the load of a user's file to so many seconds; None: any number."""
    token = _limit.set(seconds)
    try:
        yield
    finally:
        _limit.reset(token)


def set_load_time(seconds: float | None) -> None:
    """Change the limit until the surrounding `limited_loading` ends; None leaves it as it is."""
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
        """Apply this limit; without one, the outer limit holds."""
        return nullcontext() if self.load_time is None else limited_loading(self.load_time)


@contextmanager
def loading(path: Path) -> Iterator[None]:
    """Load this file within the limit (exit 3 if it takes longer).

    Nothing is limited inside another load, in a thread other than the main one, and if there are no alarms (Windows).
    """
    import threading  # this file is loaded by every command, the rest by those that load a user's file

    seconds = _limit.get()
    if seconds is None or not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return
    error = _error(path, seconds)
    before = signal.signal(signal.SIGALRM, _raise)
    try:
        with limited_loading(None), _guard(seconds + _GRACE, f"error: {error.in_words(as_typed)}"):
            signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN)
            try:
                yield
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
    except OutOfTime:
        raise error from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # again: an alarm may have come just before it was stopped
        signal.signal(signal.SIGALRM, before)


def _error(path: Path, seconds: float) -> FFNError:
    from ffncli.show.text import seconds_text, time_text

    limit = seconds_text(seconds) if seconds >= 1 else time_text(seconds)
    return FFNError(
        f"{shown_path(path)} did not load within {limit}", f"{option('load_time')} allows more", ExitCode.ENVIRONMENT
    )


def _raise(number: int, frame: object) -> NoReturn:
    raise OutOfTime


@contextmanager
def _guard(seconds: float, text: str) -> Iterator[None]:
    """Start a process that ends this one after so many seconds, with that line and exit code 3."""
    import os
    import subprocess

    command = [sys.executable, "-I", "-S", "-c", _GUARD, repr(seconds), str(os.getpid()), text]
    with _exit_on_signal():
        try:
            guard = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
        except OSError:  # no more processes: the alarm is left
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
    """Let signal 3 end the process with exit code 3 at once: the C library's `_exit` is its handler.

    A handler gets the signal's number, `_exit` takes the exit code, and both are ExitCode.ENVIRONMENT.
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
