"""Workers: a separate process for every repetition, started with every setting fixed before torch is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection
from typing import Any

from ffncli.bench import activity
from ffncli.bench.activity import Activity, RunningCode
from ffncli.bench.records import Job
from ffncli.system.child import end, exit_code, has_ended, shared_memory
from ffncli.system.child_output import PrintedBytes, passed_on
from ffncli.system.files import remove_process_folders
from ffncli.system.process_tree import used_memory

WORKER = (sys.executable, "-m", "ffncli.bench.timing.worker")

# How threads wait and where they run. A user's own settings are kept; either way the results record them.
# A thread bound to its core does not queue behind its neighbour (p99 of a 0.5 ms GEMM next to a busy one: 4.6
# ms, else 16). Waiting is torch's usual setting, libgomp's default written out: it spins for a moment, then sleeps.
_OPENMP = {
    "OMP_PROC_BIND": "true",
    "OMP_PLACES": "cores",
    "OMP_WAIT_POLICY": "active",
    "GOMP_SPINCOUNT": "300000",
}
# Freed memory stays with the process: otherwise every call requests its outputs from the system again, page by page
# (none of the page faults remain that made one kernel measure 0.89 of another, 0.98 without them).
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
# OpenBLAS's threads spin for 2^26 ticks by default, about 27 ms, after each product of numpy's: into the blocks of the
# next arms, which took twice as long and scattered five times as much. After 2^16 ticks they sleep in time.
_OPENBLAS = {"OPENBLAS_THREAD_TIMEOUT": "16"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_UNSET = ("OMP_DYNAMIC", "MKL_DYNAMIC", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_THREAD_LIMIT")


def environment(threads: int, allocator: str, given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables for a worker, on top of the `given` ones (default: ours).

    `allocator` is `fixed`, or `system` for the default malloc.
    """
    variables = dict(os.environ if given is None else given)
    for name in _UNSET:
        variables.pop(name, None)
    variables |= {name: variables.get(name) or value for name, value in (_OPENMP | _OPENBLAS).items()}
    variables |= dict.fromkeys(_THREADS, str(threads))
    if allocator == "fixed":
        variables |= {name: variables.get(name) or value for name, value in _ALLOCATOR.items()}
    variables.setdefault("PYTHONHASHSEED", "0")  # the order of sets, so of imports and allocations
    return variables


_PATIENCE = 5.0  # s between the end of a worker's messages and its own


@dataclass
class Worker:
    """A running worker; `receive` raises EOFError when it is gone. `printed` counts what it prints, by its source."""

    process: subprocess.Popen[bytes]
    connection: Connection
    activity: Activity
    printed: PrintedBytes = field(default_factory=PrintedBytes)

    def receive(self, patience: float | None = None) -> tuple[Any, ...] | None:
        """Its next message; None if none arrives within that many seconds. Raises EOFError too if it has ended while a
        process that it started holds the line open."""
        if patience is not None and not self.connection.poll(patience):
            if has_ended(self.process, 0.0) and not self.connection.poll(0.0):
                raise EOFError
            return None
        message = self.connection.recv()
        return message if isinstance(message, tuple) else (message,)

    def running(self) -> RunningCode:
        """The kernel whose code it runs."""
        return self.activity.read()

    def memory(self) -> int | None:
        """Bytes that it uses, with all that it started; None where the system does not say."""
        return used_memory(self.process.pid)

    def ended(self) -> int | None:
        """Its exit code once it has closed the line; negative is a signal; None if it runs on. It is not reaped: its
        group keeps its id."""
        return exit_code(self.process) if has_ended(self.process, _PATIENCE) else None


@contextmanager
def worker(
    job: Job,
    threads: int,
    command: Sequence[str] = WORKER,
    directory: str | None = None,
    printed: PrintedBytes | None = None,
) -> Iterator[Worker]:
    """A worker at that job, in that directory (default: ours). On any exit from the block, the worker and everything it
    started are killed. What it prints appears on stderr, as much as `printed` allows. Raises OSError if it cannot be
    started."""
    printed = printed or PrintedBytes()
    ours, theirs = socket.socketpair()
    memory = shared_memory(activity.SIZE)
    process = None
    try:
        shown = Activity()
        shown.share(mmap(memory, activity.SIZE), labels(job))
        with passed_on(printed) as output:
            try:
                with theirs:
                    process = _process(job, threads, command, directory, (theirs.fileno(), memory), output)
                with Connection(ours.detach()) as connection:
                    with suppress(OSError):  # already gone: its exit code shows why
                        connection.send(job)
                    yield Worker(process, connection, shown, printed)
            finally:
                if process is not None:
                    end(process)
    finally:
        ours.close()
        os.close(memory)
        if process is not None:
            remove_process_folders(process.pid)  # a kernel's file at a git commit was copied for it


def labels(job: Job) -> tuple[str, ...]:
    """The kernels of a job, as an Activity numbers them."""
    return tuple(choice.label for choice in job.kernels)


def _process(
    job: Job, threads: int, command: Sequence[str], directory: str | None, numbers: tuple[int, int], output: int
) -> subprocess.Popen[bytes]:
    """The process, which has the line and the memory of its activity under these numbers."""
    return subprocess.Popen(
        [*command, *map(str, numbers)],
        env=environment(threads, job.method.allocator),
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=numbers,
        process_group=0,  # Ctrl-C is handled here, and its children are killed with it
    )
