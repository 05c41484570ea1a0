"""Workers: a separate process for every repetition, started with every setting fixed before torch is loaded."""

from __future__ import annotations

import io
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from ffncli.bench.records import CaseReport, Job
from ffncli.errors import FFNError
from ffncli.models.files.json_records import record_of
from ffncli.system.child import end, exit_code
from ffncli.system.files import remove_process_folders

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
    variables |= {name: variables.get(name) or value for name, value in (_OPENMP | _OPENBLAS).items()}
    variables |= dict.fromkeys(_THREADS, str(threads))
    if gpu:
        variables |= {name: variables.get(name) or value for name, value in _LAUNCH_QUEUES.items()}
    if allocator == "fixed":
        variables |= {name: variables.get(name) or value for name, value in _ALLOCATOR.items()}
    variables.setdefault("PYTHONHASHSEED", "0")  # the order of sets, so of imports and allocations
    return variables


_RECORDS = frozenset({"TimedUnit", "TimedBlock", "Outcome", "Roof"})  # what a worker's messages are made of
_REPORT = 10.0  # s; the report is sent before the unit


class _Messages(pickle.Unpickler):
    """Messages of a process in which a user's code runs: they hold records and plain values, and run nothing."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "ffncli.bench.records" and name in _RECORDS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a worker's message must not hold {module}.{name}")


@dataclass
class Worker:
    """A running worker; `receive` raises EOFError when it is gone. `reports` is the line of its referee."""

    process: subprocess.Popen[bytes]
    connection: Connection
    reports: Connection

    def receive(self, patience: float | None = None) -> tuple[Any, ...] | None:
        """Its next message; None if none arrives within that many seconds.

        If it holds anything but records and plain values, a text that says so.
        """
        if patience is not None and not self.connection.poll(patience):
            return None
        data = self.connection.recv_bytes()
        try:
            message = _Messages(io.BytesIO(data)).load()
        except pickle.UnpicklingError as error:
            message = str(error)
        return message if isinstance(message, tuple) else (message,)

    def report(self, case: str) -> CaseReport | None:
        """What its referee found in that case; None if the referee has ended, or says nothing in time."""
        return report_on(self.reports, case)

    def ended(self) -> int:
        """Its exit code once it has closed the line; negative is a signal. It is not reaped: its group keeps its id."""
        return exit_code(self.process)


def report_on(reports: Connection, case: str) -> CaseReport | None:
    """The report on that case that comes over the line of a referee; those on other cases are passed over."""
    with suppress(EOFError, OSError, ValueError, RecursionError, FFNError):
        while reports.poll(_REPORT):
            raw = json.loads(reports.recv_bytes())
            report: CaseReport = record_of(CaseReport, raw, "the referee's report")
            if report.case == case:
                return report
    return None


@contextmanager
def worker(job: Job, threads: int, command: Sequence[str] = WORKER, directory: str | None = None) -> Iterator[Worker]:
    """A worker at that job, in that directory (default: ours). On any exit from the block, the worker and everything it
    started are killed. Raises OSError if it cannot be started."""
    ours, theirs = socket.socketpair()
    reports, referees = socket.socketpair()
    process = None
    try:
        with theirs, referees:
            numbers = (theirs.fileno(), referees.fileno())
            process = subprocess.Popen(
                [*command, *map(str, numbers)],
                env=environment(threads, job.method.allocator, gpu=any(case.device != "cpu" for case in job.cases)),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=sys.__stderr__.fileno() if sys.__stderr__ else subprocess.DEVNULL,
                pass_fds=numbers,
                process_group=0,  # Ctrl-C is handled here, and its children are killed with it
            )
        with Connection(ours.detach()) as connection, Connection(reports.detach()) as line:
            with suppress(OSError):  # already gone: its exit code shows why
                connection.send(job)
            yield Worker(process, connection, line)
    finally:
        ours.close()
        reports.close()
        if process is not None:
            end(process)
            remove_process_folders(process.pid)  # a kernel's file at a git commit was copied for it
