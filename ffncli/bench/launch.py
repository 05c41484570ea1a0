"""Start workers: a separate process for every repetition, in which every setting is fixed before torch is loaded."""

import io
import json
import os
import pickle
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from mmap import mmap
from multiprocessing.connection import Connection, wait
from typing import Any

from ffncli.bench import activity
from ffncli.bench.activity import Activity
from ffncli.bench.records import CaseReport, Job
from ffncli.errors import FFNError
from ffncli.models.files.json_records import record_of
from ffncli.system.child import (
    PrintedBytes,
    end,
    exit_code,
    has_ended,
    module_command,
    passed_on,
    shared_memory,
    used_memory,
)
from ffncli.system.files import remove_process_folders
from ffncli.system.host import affinity
from ffncli.system.isolation import isolated

WORKER = module_command("ffncli.bench.timing.worker")

# How threads wait: torch's usual setting, with libgomp's default written out, so threads spin for a moment, then sleep.
# Settings of the user are kept; either way, the results record the settings.
_OPENMP = {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "300000"}
# A thread bound to its core does not queue behind its neighbour (p99 of a 0.5 ms GEMM while a process is busy: 4.6 ms
# bound, 16 ms unbound). Not set for a GPU: the binding puts the main thread on the first core, and torch's backward
# thread and the driver's and NVML's threads inherit that one core. Launches on a GPU depend on these threads, and that
# core may be on the socket farther from the GPU.
_BINDING = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores"}
# Freed memory stays with the process: otherwise every call would request memory for its outputs from the system again,
# page by page. Because of those page faults, one kernel took 0.89 of another kernel's time (0.98 without page faults).
_ALLOCATOR = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
# By default, OpenBLAS's threads spin for 2^26 ticks, about 27 ms, after each numpy matmul. They would still spin
# during the blocks of the next arms, and those blocks took twice as long and scattered five times as much. With 2^16
# ticks, the threads are asleep before the next block.
_OPENBLAS = {"OPENBLAS_THREAD_TIMEOUT": "16"}
# How many launches the host may run ahead of a GPU: four times the default of about a thousand, so that a long block of
# short calls does not wait for a full queue.
_LAUNCH_QUEUES = {"CUDA_SCALE_LAUNCH_QUEUES": "4x"}
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")
_UNSET = ("OMP_DYNAMIC", "MKL_DYNAMIC", "GOMP_CPU_AFFINITY", "KMP_AFFINITY", "OMP_THREAD_LIMIT")


def environment(
    threads: int, allocator: str, given: Mapping[str, str] | None = None, gpu: bool = False
) -> dict[str, str]:
    """Return the environment variables for a worker: the `given` variables (default: this process's), with our settings
    added except those that are given. Thread counts are always set.

    `allocator` is `fixed`, or `system` for the default malloc. `gpu` is true if the worker's cases run on a GPU.
    """
    variables = dict(os.environ if given is None else given)
    for name in _UNSET:
        variables.pop(name, None)
    ours = _OPENMP | _OPENBLAS | (_LAUNCH_QUEUES if gpu else _BINDING) | (_ALLOCATOR if allocator == "fixed" else {})
    variables |= {name: variables.get(name) or value for name, value in ours.items()}
    variables |= dict.fromkeys(_THREADS, str(threads))
    variables.setdefault("PYTHONHASHSEED", "0")  # fixes the order of sets, and so the order of imports and allocations
    return variables


_MOST_WAITING = 8  # workers that wait for their jobs; each has some 150 MB of its own
_READY = 60.0  # s that a worker may take to import torch before another one gets its job
_PATIENCE = 5.0  # s that a worker may take to exit after its last message
_RECORDS = frozenset({"TimedUnit", "TimedBlock", "Outcome", "Roof"})  # the types that a worker's messages may contain
_LONGEST = 1 << 28  # maximum bytes of a message
_STALL = 10  # maximum seconds between the parts of a message; stray bytes may look like the start of a message
_REPORT = 10.0  # s; the referee sends its report before the worker sends the unit


class _Messages(pickle.Unpickler):
    """Unpickles messages of a process that runs user code: only records and plain values, so nothing is executed."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "ffncli.bench.records" and name in _RECORDS:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"a worker's message must not hold {module}.{name}")


@dataclass
class Worker:
    """A running worker; `receive` raises EOFError when the worker has ended.

    `reports` is the connection to its referee; `shared` is the memory of its activity; `printed` counts the bytes that
    it prints, by source.
    """

    process: subprocess.Popen[bytes]
    connection: Connection
    reports: Connection
    shared: mmap
    printed: PrintedBytes = field(default_factory=PrintedBytes)
    activity: Activity = field(default_factory=Activity)

    def begin(self, job: Job) -> None:
        """Send the worker its job, for which it has been waiting."""
        self.activity.share(self.shared, labels(job))
        with suppress(OSError):  # the worker has already ended; its exit code shows why
            self.connection.send(job)

    def receive(self, patience: float | None = None) -> tuple[Any, ...] | None:
        """Return the worker's next message, or None if none arrives within `patience` seconds. Raises EOFError if the
        worker has ended, even if a process that the worker started keeps the connection open.

        If the message contains anything but records and plain values, return an error message instead.
        """
        if patience is not None and not self.connection.poll(patience):
            # Polled again, as the last message may have arrived before the process ended.
            if has_ended(self.process, 0.0) and not self.connection.poll(0.0):
                raise EOFError
            return None
        data = self.connection.recv_bytes(_LONGEST)
        try:
            message = _Messages(io.BytesIO(data)).load()
        except pickle.UnpicklingError as error:
            message = str(error)
        return message if isinstance(message, tuple) else (message,)

    def memory(self, shared_once: bool = False) -> int | None:
        """Return the bytes used by the worker and everything it started (`used_memory`); None if unknown."""
        return used_memory(self.process.pid, shared_once=shared_once)

    def ended(self) -> int | None:
        """Return the worker's exit code once it has closed the connection (negative for a signal), or None if it is
        still running. The process is not reaped, so its group keeps its id."""
        return exit_code(self.process) if has_ended(self.process, _PATIENCE) else None

    def report(self, case: str) -> CaseReport | None:
        """Return the referee's findings on this case (see `report_on`)."""
        return report_on(self.reports, case)


def report_on(reports: Connection, case: str) -> CaseReport | None:
    """Read from a referee's connection until the report on this case arrives, skipping reports on other cases. Return
    None if the referee has ended, or does not report in time."""
    with suppress(EOFError, OSError, ValueError, RecursionError, FFNError):
        while reports.poll(_REPORT):
            raw = json.loads(reports.recv_bytes(_LONGEST))
            report: CaseReport = record_of(CaseReport, raw, "the referee's report")
            if report.case == case:
                return report
    return None


class WorkerPool:
    """Starts workers, several at once: each needs a core for more than a second until it has imported torch, and waits
    for its job afterwards, without using a core. So nothing is timed while a worker starts, and on two cores the starts
    take half as long."""

    def __init__(
        self, processes: int, command: Sequence[str], directory: str | None, printed: PrintedBytes | None = None
    ) -> None:
        self.processes, self.command, self.directory, self.printed = processes, command, directory, printed
        self._waiting: dict[tuple[bool, int], list[tuple[ExitStack, Worker]]] = {}  # by their environment

    @contextmanager
    def worker(self, job: Job, threads: int) -> Iterator[Worker]:
        """Yield a worker with this job; see the function `worker`. Raises OSError if none can be started."""
        waiting = self._waiting.setdefault((_uses_gpu(job), threads), [])
        if not waiting:
            self._start(job, threads, waiting)
        ends, one = waiting.pop(0)
        with ends:
            one.begin(job)
            yield one

    def close(self) -> None:
        """End the workers that are still waiting."""
        for waiting in self._waiting.values():
            for ends, _ in waiting:
                ends.close()
        self._waiting = {}

    def _start(self, job: Job, threads: int, waiting: list[tuple[ExitStack, Worker]]) -> None:
        """Start as many workers as the processes to come need and the cores can start at once; wait until all are
        ready."""
        for _ in range(max(1, min(self.processes - job.process, len(affinity()), _MOST_WAITING))):
            ends = ExitStack()
            try:
                start = _worker(job, threads, self.command, self.directory, self.printed)
                waiting.append((ends, ends.enter_context(start)))
            except OSError:
                if not waiting:
                    raise
                break  # those that have started can work
        silent, until = {one.connection for _, one in waiting}, time.monotonic() + _READY
        while silent and len(waiting) > 1 and (left := until - time.monotonic()) > 0:
            silent -= {*wait(silent, left)}  # ready, or ended


@contextmanager
def worker(
    job: Job,
    threads: int,
    command: Sequence[str] = WORKER,
    directory: str | None = None,
    printed: PrintedBytes | None = None,
    more: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Start a worker for this job in `directory` (default: the current one), with `more` environment variables. On any
    exit from the `with` block, the worker and everything it started are killed. The worker's output appears on stderr,
    up to the limit of `printed`. Raises OSError if the worker cannot be started."""
    with _worker(job, threads, command, directory, printed, more) as one:
        one.begin(job)
        yield one


@contextmanager
def _worker(
    job: Job,
    threads: int,
    command: Sequence[str],
    directory: str | None,
    printed: PrintedBytes | None,
    more: Mapping[str, str] | None = None,
) -> Iterator[Worker]:
    """Start a worker that waits for this job, or for another with the same device and method."""
    printed = printed or PrintedBytes()
    ours, theirs = socket.socketpair()
    reports, referees = socket.socketpair()
    for end_of_line in (ours, reports):
        end_of_line.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _STALL, 0))
    memory = shared_memory(activity.SIZE)
    process = None
    try:
        with isolated(job.method.isolate) as before, passed_on(printed) as output:
            try:
                with theirs, referees:
                    numbers = (theirs.fileno(), referees.fileno(), memory)
                    process = _process(job, threads, (*before, *command), directory, numbers, output, more or {})
                with Connection(ours.detach()) as connection, Connection(reports.detach()) as line:
                    yield Worker(process, connection, line, mmap(memory, activity.SIZE), printed)
            finally:
                if process is not None:
                    end(process)
    finally:
        ours.close()
        reports.close()
        os.close(memory)
        if process is not None:
            remove_process_folders(process.pid)  # copies of kernels' files at a git commit


def labels(job: Job) -> tuple[str, ...]:
    """Return the labels of a job's kernels, in the order of their indices in an Activity."""
    return tuple(choice.label for choice in job.kernels)


def _uses_gpu(job: Job) -> bool:
    return any(case.device != "cpu" for case in job.cases)


def _process(
    job: Job,
    threads: int,
    command: Sequence[str],
    directory: str | None,
    numbers: tuple[int, int, int],
    output: int,
    more: Mapping[str, str],
) -> subprocess.Popen[bytes]:
    """Start the process, which inherits the connections and the activity's memory as the file descriptors `numbers`."""
    return subprocess.Popen(
        [*command, *map(str, numbers)],
        env={**environment(threads, job.method.allocator, gpu=_uses_gpu(job)), **more},
        cwd=directory,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        pass_fds=numbers,
        process_group=0,  # so that Ctrl-C reaches only this process, which kills the worker and its children
    )
