"""A child process that runs other people's code: what it settles before any of that runs, its end, and its death.

What it prints is passed on to stderr up to a limit: a flood fills no terminal, no disk, and no pipe. All that it
started is known from Linux's /proc; elsewhere no descendants and no memory are.
"""

from __future__ import annotations

import ctypes
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ffncli.system.cgroup import ROOT, text

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


MOST_OUTPUT = 64 << 10  # bytes of one source
_CHUNK = 1 << 16
_LAST_CHUNKS = 16  # read at the end, of what is still in the pipe; a process that escaped may go on writing
_PATIENCE = 1.0  # s, for stderr to take the rest


@dataclass
class PrintedBytes:
    """How much each source has printed; `source` is whose output arrives now, as a note about it says it."""

    source: str = "the worker"
    most: int = MOST_OUTPUT
    counts: dict[str, int] = field(default_factory=dict)

    def passed(self, chunk: bytes) -> tuple[bytes, str]:
        """(what of a chunk is to be shown, a note if this is where it is cut)."""
        source, before = self.source, self.counts.get(self.source, 0)
        self.counts[source] = before + len(chunk)
        if before > self.most:
            return b"", ""
        if before + len(chunk) <= self.most:
            return chunk, ""
        return chunk[: self.most - before], f"note: the output of {source} was cut after {self.most >> 10} KiB\n"


@contextmanager
def passed_on(printed: PrintedBytes) -> Iterator[int]:
    """A descriptor for a child's stdout and stderr. What it prints appears on our stderr, until it was enough.

    All is read, so that the child never waits; on leaving, what is in the pipe is passed on, and no process that still
    holds the descriptor is waited for.
    """
    reading, writing = os.pipe()
    waiting, stopping = os.pipe()
    os.set_blocking(reading, False)
    thread = threading.Thread(target=_pass_on, args=(reading, waiting, printed), daemon=True)
    thread.start()
    try:
        yield writing
    finally:
        os.close(writing)
        os.close(stopping)  # ends the thread
        thread.join(_PATIENCE)


def _pass_on(reading: int, waiting: int, printed: PrintedBytes) -> None:
    """Until the other end of `waiting` is closed; then the rest. Both descriptors are closed here."""
    try:
        poll = select.poll()
        poll.register(reading, select.POLLIN)
        poll.register(waiting, select.POLLIN)
        over = False
        while not over:
            over = any(number == waiting for number, _ in poll.poll())
            for _ in range(_LAST_CHUNKS if over else 1):
                if not _pass_chunk(reading, printed):
                    break
    finally:
        os.close(reading)
        os.close(waiting)


def _pass_chunk(reading: int, printed: PrintedBytes) -> bool:
    """Pass on what is in the pipe; whether there may be more."""
    try:
        chunk = os.read(reading, _CHUNK)
    except OSError:  # nothing is there
        return False
    shown, note = printed.passed(chunk)
    text = shown.decode("utf-8", "replace")
    if note and text and not text.endswith("\n"):
        text += "\n"
    if text or note:
        with suppress(OSError, ValueError, AttributeError):  # stderr is closed, or there is none
            sys.stderr.write(text + note)
            sys.stderr.flush()
    return bool(chunk)


# What a process takes from others; files can be dropped and read again. Shared pages: whole, or the process's share.
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")
_SHARES = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def descendants(pid: int, root: Path = ROOT) -> list[int]:
    """The processes below this one, those of all its threads; a zombie has none left."""
    found: list[int] = []
    left = [pid]
    while left:
        for process in _children(left.pop(), root):
            if process not in found:
                found.append(process)
                left.append(process)
    return found


def used_memory(pid: int, root: Path = ROOT, *, shared_once: bool = False) -> int | None:
    """Bytes of memory that a process and those below it use; None where the system does not say.

    Memory that a fork still shares counts for both, unless `shared_once`, which takes the system far longer to say.
    """
    if not (root / f"proc/{pid}/status").exists():
        return None
    return sum(_used(process, root, shared_once) for process in (pid, *descendants(pid, root)))


def _children(pid: int, root: Path) -> list[int]:
    folder = root / f"proc/{pid}/task"
    try:
        threads = os.listdir(folder)
    except OSError:
        return []
    return [int(word) for thread in threads for word in text(folder / thread / "children").split() if word.isdigit()]


def _used(pid: int, root: Path, shared_once: bool) -> int:
    exact = text(root / f"proc/{pid}/smaps_rollup") if shared_once else ""
    source, names = (exact, _SHARES) if exact else (text(root / f"proc/{pid}/status"), _COUNTED)
    lines = (line.split() for line in source.splitlines() if line.startswith(names))
    return sum(int(words[1]) * 1024 for words in lines if len(words) > 1 and words[1].isdigit())
