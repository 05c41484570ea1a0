"""A child process that runs other people's code: its set-up before any of that code runs, how to end the child, and how
it ended.

The child's output is passed on to stderr up to a limit, so that too much output cannot fill a terminal, a disk or a
pipe. Descendants and memory are read from Linux's /proc; on other systems they are unknown.
"""

import ctypes
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from ffncli.system.cgroup import ROOT, text
from ffncli.system.host import busy_threads

KILLED = -9
ENDED = "ended processes"
_REAPING = 10.0  # seconds; a process that waits for a driver cannot be killed until the driver answers
_PR_SET_PDEATHSIG, _PR_GET_DUMPABLE, _PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER = 1, 3, 4, 24, 36
_CAP_SYS_PTRACE, _CAPABILITY_VERSION = 19, 0x20080522
# `python -m`, but the folders of PYTHONPATH come after those of Python's own modules (and before those of packages, as
# they may have the torch to use), and the package ffncli is this one, wherever it is
_RUN = """
import os, sys
own = os.path.dirname(os.__file__)
sys.path.sort(key=lambda folder: folder not in (own, os.path.join(own, "lib-dynload")))
import importlib.machinery, importlib.util, runpy
_, folder, name, *sys.argv[1:] = sys.argv
spec = importlib.machinery.PathFinder.find_spec("ffncli", [folder])
sys.modules["ffncli"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["ffncli"])
runpy.run_module(name, run_name="__main__", alter_sys=True)
"""
_DEATHS = {-11: "segmentation fault", -6: "aborted", -7: "bus error", -8: "arithmetic error", -4: "illegal instruction"}


def module_command(name: str) -> tuple[str, ...]:
    """Return a command that runs a module of ffn. As long as it has not called `see_users_folders`, no file in a folder
    of the user takes the place of a module of Python, nor one in the current folder that of a package."""
    root = str(Path(__file__).parents[2])
    return sys.executable, "-P", "-c", _RUN, root, name


def see_users_folders() -> None:
    """Find modules in the current folder and in those of PYTHONPATH first, as `python -m` does."""
    folders = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = dict.fromkeys([os.getcwd(), *filter(None, folders)])


def settle() -> None:
    """Set up a new child, before anything else: make it print to stderr, leave Ctrl-C to the parent, and die with the
    parent."""
    os.dup2(2, 1)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # keeps what a kernel prints before it kills the process
    if sys.platform == "linux":
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans become children of this process: they can be found and ended
        give_up_reading_memory()
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def end_with_parent() -> None:
    """From now on, kill this process when its parent ends; only Linux can do this."""
    if sys.platform == "linux":
        parent = os.getppid()
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # the parent ended before the request took effect
            os._exit(0)


def _prctl(what: int, value: int = 0) -> int:
    result: int = ctypes.CDLL(None, use_errno=True).prctl(what, value, 0, 0, 0)
    return result


def give_up_reading_memory() -> None:
    """Give up root's capability to read and write the memory of other processes, also for the programs that this
    process starts. Only Linux has it; without it, memory that is `unreadable` cannot be read. It concerns this thread
    and the threads that it starts, so this comes first in a process."""
    if sys.platform != "linux":
        return
    libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    libc.prctl(_PR_CAPBSET_DROP, _CAP_SYS_PTRACE, 0, 0, 0)
    sets = (ctypes.c_uint32 * 6)()  # effective, permitted and inheritable: capabilities 0 to 31, then 32 to 63
    if libc.capget(header, sets) == 0:
        for at in range(3):
            sets[at] &= ~(1 << _CAP_SYS_PTRACE)
        libc.capset(header, sets)


@contextmanager
def unreadable() -> Iterator[None]:
    """A context in which other processes of the same user cannot read or write this process's memory (on Linux)."""
    if sys.platform != "linux":
        yield
        return
    before = _prctl(_PR_GET_DUMPABLE)
    _prctl(_PR_SET_DUMPABLE, 0)
    try:
        yield
    finally:
        _prctl(_PR_SET_DUMPABLE, before)


def reads_memory(pid: int) -> bool | None:
    """Return whether this process can read the memory of another one; None if the system has no /proc."""
    try:
        os.close(os.open(f"/proc/{pid}/mem", os.O_RDONLY))
    except FileNotFoundError:
        return None
    except OSError:
        return False
    return True


def require_original(pid: int) -> None:
    """End this process at once if a user's code forked it from process `pid`: a fork must not answer instead of the
    original."""
    if os.getpid() != pid:
        os._exit(1)


def end(process: subprocess.Popen[bytes]) -> None:
    """Kill the child, its process group, and descendants outside of the group; then reap the child."""
    left = descendants(process.pid)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in left:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_REAPING)


def shared_memory(size: int = 0) -> int:
    """Create anonymous memory of `size` bytes and return its descriptor, which can be passed to a child."""
    if hasattr(os, "memfd_create"):
        number = os.memfd_create("ffn")
    else:
        import tempfile

        with tempfile.TemporaryFile() as file:
            number = os.dup(file.fileno())
    os.ftruncate(number, size)
    return number


def exit_code(process: subprocess.Popen[bytes]) -> int:
    """Wait for a child that has closed its connection, and return its exit code; negative means a signal. The child is
    not reaped, so that the id of its group stays in use."""
    if not hasattr(os, "waitid"):  # macOS before Python 3.13
        return process.wait()
    status = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    if status is None:
        return 0
    return status.si_status if status.si_code == os.CLD_EXITED else -status.si_status


def has_ended(process: subprocess.Popen[bytes], patience: float) -> bool:
    """Return True if the child ends within `patience` seconds. It is not reaped."""
    until = time.monotonic() + patience
    while True:
        if not hasattr(os, "waitid"):
            over = process.poll() is not None
        else:
            over = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        if over or time.monotonic() > until:
            return over
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Return whether a process that need not be a child runs; a zombie does not."""
    if Path("/proc/self/stat").exists():
        return text(ROOT / f"proc/{pid}/stat").rpartition(")")[2].split()[:1] not in ([], ["Z"], ["X"])
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def ending(code: int | None) -> str:
    """Return how a process ended, in words; None means that it was still running."""
    if code is None:
        return "closed its connection"
    if code == KILLED:
        return "was killed (signal 9), probably for lack of memory"
    if code < 0:
        return f"was ended by signal {-code}" + (f" ({_DEATHS[code]})" if code in _DEATHS else "")
    return f"ended with exit code {code}"


MOST_OUTPUT = 64 << 10  # bytes per source
_CHUNK = 1 << 16
_LAST_CHUNKS = 16  # the most that is read from the pipe at the end; an escaped process may still be writing
_PATIENCE = 1.0  # seconds for writing the remaining output to stderr


@dataclass
class PrintedBytes:
    """The bytes that each source has printed; `source` is the current source, worded as in the note about it."""

    source: str = "the worker"
    most: int = MOST_OUTPUT
    counts: dict[str, int] = field(default_factory=dict)

    def passed(self, chunk: bytes) -> tuple[bytes, str]:
        """Return (the part of a chunk to show, a note if the output is cut in this chunk)."""
        source, before = self.source, self.counts.get(self.source, 0)
        self.counts[source] = before + len(chunk)
        if before > self.most:
            return b"", ""
        if before + len(chunk) <= self.most:
            return chunk, ""
        return chunk[: self.most - before], f"note: the output of {source} was cut after {self.most >> 10} KiB\n"


@contextmanager
def passed_on(printed: PrintedBytes) -> Iterator[int]:
    """Yield a descriptor for a child's stdout and stderr. What the child prints appears on our stderr, up to a limit.

    Everything is read, so that the child never blocks. On exit, the output that is left in the pipe is passed on,
    without waiting for processes that still have the descriptor open.
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
        os.close(stopping)  # makes the thread end
        thread.join(_PATIENCE)


def _pass_on(reading: int, waiting: int, printed: PrintedBytes) -> None:
    """Pass on output until the other end of `waiting` is closed, then the output left in the pipe. Closes both
    descriptors."""
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
    """Pass on what is in the pipe; return True if there may be more."""
    try:
        chunk = os.read(reading, _CHUNK)
    except OSError:  # the pipe is empty
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


# Fields that count memory. File pages are excluded, since they can be dropped and read again. Pages shared with other
# processes count in full in _COUNTED; in _SHARES, only this process's share of them counts.
_COUNTED = ("RssAnon:", "RssShmem:", "VmSwap:")
_SHARES = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")


def descendants(pid: int, root: Path = ROOT) -> list[int]:
    """Return the descendants of a process, started by any of its threads; none for a zombie, whose children were given
    to another process."""
    found: list[int] = []
    left = [pid]
    while left:
        for process in _children(left.pop(), root):
            if process not in found:
                found.append(process)
                left.append(process)
    return found


def processor_times(threads: bool = True) -> dict[str, int]:
    """Return the nanoseconds that each process that this one has started has run, by `process ID`; those that have
    ended count together. With `threads`, also what each thread of this process has run, by its id. Empty if the system
    does not report them."""
    if not Path("/proc/self/task").exists():
        return {}
    import resource  # not on Windows

    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    times = {f"process {pid}": sum(busy_threads(str(pid)).values()) for pid in descendants(os.getpid())}
    times[ENDED] = int(1e9 * (ended.ru_utime + ended.ru_stime))
    return times | (busy_threads() if threads else {})


def sleeps(known: Collection[str], threads: bool = True) -> int:
    """Return how often the descendants of this process and, with `threads`, its own threads have gone to sleep, except
    those that are `known` by their names in `processor_times`; 0 if the system does not report it."""
    mine = {thread: f"self/task/{thread}" for thread in (busy_threads() if threads else ())}
    others = {f"process {pid}": str(pid) for pid in descendants(os.getpid())}
    count = 0
    for name, place in {**mine, **others}.items():
        lines = text(ROOT / f"proc/{place}/status").splitlines() if name not in known else []
        count += sum(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches:"))
    return count


def used_memory(pid: int, root: Path = ROOT, *, shared_once: bool = False) -> int | None:
    """Return the bytes of memory used by a process and its descendants; None if the system does not report them.

    Memory that a fork still shares is counted for both processes. With `shared_once` it is counted once, but the system
    takes far longer to report it.
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
