"""Workers: a separate process for every repetition, started with every setting fixed before torch is loaded."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ffncli.bench.records import Job
from ffncli.system.child import end, exit_code
from ffncli.system.files import remove_process_folders

WORKER = (sys.executable, "-m", "ffncli.bench.timing.worker")

# How threads wait and where they run. A user's own settings are kept; either way the results record them.
# A thread bound to its core does not queue behind its neighbour (p99 of a 0.5 ms GEMM next to a busy one: 4.6
# ms, else 16). Waiting is torch's usual setting, libgomp's default written out: it spins for a moment, then sleeps.
_OPENMP = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
_BINDING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
# Not for a GPU: the binding puts the main thread on the first core, and torch's backward thread, the driver's and
# NVML's inherit that one core. They launch the kernels, and the core may be on the GPU's far socket.
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
# How many launches the host may be ahead of a GPU: four times the default of about a thousand, so that a long block of
# short calls does not end up waiting for a full queue.
_LAUNCH_QUEUES = {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_UNSET = ("OMP_DYNAMIC", "MKL_DYNAMIC", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_THREAD_LIMIT")


def environment(
    threads: int, allocator: str, given: Mapping[str, str] | None = None, gpu: bool = False
) -> dict[str, str]:
    """The environment variables for a worker, on top of the `given` ones (default: ours).

    `allocator` is `fixed`, or `system` for the default malloc. `gpu`: its cases are a GPU's.
    """
    variables = dict(os.environ if given is None else given)
    for name in _UNSET:
        variables.pop(name, None)
    ours = _OPENMP | _OPENBLAS | ({} if gpu else _BINDING)
    variables |= {name: variables.get(name) or value for name, value in ours.items()}
    variables |= dict.fromkeys(_THREADS, str(threads))
    if gpu:
        variables |= {name: variables.get(name) or value for name, value in _LAUNCH_QUEUES.items()}
    if allocator == "fixed":
        variables |= {name: variables.get(name) or value for name, value in _ALLOCATOR.items()}
    variables.setdefault("PYTHONHASHSEED", "0")  # the order of sets, so of imports and allocations
    return variables


@dataclass
class Worker:
    """A running worker; `receive` raises EOFError when it is gone."""

    process: subprocess.Popen[bytes]
    connection: Connection

    def receive(self, patience: float | None = None) -> tuple[Any, ...] | None:
        """Its next message; None if none arrives within that many seconds."""
        if patience is not None and not self.connection.poll(patience):
            return None
        message = self.connection.recv()
        return message if isinstance(message, tuple) else (message,)

    def ended(self) -> int:
        """Its exit code once it has closed the line; negative is a signal. It is not reaped: its group keeps its id."""
        return exit_code(self.process)


@contextmanager
def worker(job: Job, threads: int, command: Sequence[str] = WORKER, directory: str | None = None) -> Iterator[Worker]:
    """A worker at that job, in that directory (default: ours). On any exit from the block, the worker and everything it
    started are killed. Raises OSError if it cannot be started."""
    ours, theirs = socket.socketpair()
    process = None
    try:
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=environment(threads, job.method.allocator, gpu=any(case.device != "cpu" for case in job.cases)),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                process_group=0,  # Ctrl-C is handled here, and its children are killed with it
            )
        connection = Connection(ours.detach())
        with connection:
            with suppress(OSError):  # already gone: its exit code shows why
                connection.send(job)
            yield Worker(process, connection)
    finally:
        ours.close()
        if process is not None:
            end(process)
            remove_process_folders(process.pid)  # a kernel's file at a git commit was copied for it
