"""`python -m ffncli.bench.timing.worker FD REPORTS [MEMORY]`: one process of a benchmark; it returns a Job's units.

Messages: ("began", key), ("stage", doing, kernel) as that changes (records.Stage), and ("unit", TimedUnit) for every
case in turn, then ("finished",); or ("refused", error, hint, exit code) for a package that does not load or a device
that torch cannot use; or ("lost", kernel, why) if that kernel has left its GPU unusable for this process; or
("broke", kernel, why) if it raised on one of several ranks while all were timing it; or
("spoiled", arm, reason), its last message, after a capture of a CUDA graph that failed: another worker gets the case. A
case that cannot be measured is a unit too, whose outcomes say why; a worker that ends without "finished" was killed,
killed itself, or has lost its referee. MEMORY, which its parent shares, says which kernel's code runs
(bench/activity.py).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, TypeAlias

from ffncli.bench.activity import SIZE
from ffncli.bench.launch import labels
from ffncli.bench.records import Job, TimedUnit
from ffncli.bench.timing.reporter import REPORTER
from ffncli.errors import ExitCode, FFNError
from ffncli.system.child import require_original, settle
from ffncli.system.gpu import gpu_errors
from ffncli.system.host import affinity
from ffncli.system.packages import package_error

if TYPE_CHECKING:
    from ffncli.bench.referee.process import RefereeProcess

Send: TypeAlias = Callable[[tuple[Any, ...]], None]
_BEGAN, _PROCESS = time.perf_counter(), os.getpid()


def main(arguments: list[str]) -> int:
    """Serve one job over the inherited descriptor that the first argument numbers; returns 0, even if nobody listens.

    The second is its referee's, to report on every case; the third is that of the memory for its activity.
    """
    settle()
    try:
        with Connection(int(arguments[0])) as connection, Connection(int(arguments[1])) as reports:
            try:
                serve(connection, reports, int(arguments[2]) if len(arguments) > 2 else None)
            except Exception as error:
                refusal = error if isinstance(error, FFNError) else package_error(error)
                if refusal is None:
                    raise
                connection.send(("refused", refusal.message, refusal.hint, int(refusal.code)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        return 0
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return ExitCode.ENVIRONMENT  # a kernel has closed our lines: the parent sees that
    return 0


def serve(connection: Connection, reports: Connection, memory: int | None = None) -> None:
    """Receive a job and run its cases in order, returning each before the next one starts.

    Raises FFNError (exit 3) for a device that torch cannot use.
    """
    job = connection.recv()
    if memory is not None:
        REPORTER.share(mmap(memory, SIZE), labels(job))
    # Before torch, whose OpenMP binds this thread to one core: OpenBLAS counts this thread's cores when numpy is
    # loaded, and never starts more threads than that.
    import numpy  # noqa: F401

    cores = affinity()
    from ffncli.bench.referee.process import referee_process  # torch takes seconds

    send = partial(_send, connection)
    with REPORTER.speaking(send), referee_process(job, connection, reports) as referee:
        start_blas_threads(cores)
        if _measure(job, send, referee):
            send(("finished",))


def start_blas_threads(cores: Iterable[int]) -> None:
    """Start the threads of numpy's BLAS so that they may run on all of these cores.

    OpenBLAS ends its threads when the process forks, and starts them at its next product, on the cores of the thread
    that asks for it. OpenMP has bound that one to a single core by then, which all of them would share: a product of
    two threads took twenty times as long.
    """
    if not hasattr(os, "sched_setaffinity"):
        return
    import numpy

    bound, some = os.sched_getaffinity(0), numpy.ones((256, 256), numpy.float32)
    os.sched_setaffinity(0, cores)
    try:
        some @ some
    finally:
        os.sched_setaffinity(0, bound)


def _measure(job: Job, send: Send, referee: RefereeProcess | None) -> bool:
    """Every case in turn; False if another worker is to have the rest."""
    start = time.perf_counter() - _BEGAN
    if job.ranks.world_size > 1:
        return _measure_over_ranks(job, send, referee, start)
    if job.method.in_model:
        from ffncli.bench.timing.modes.in_model import measure_model

        return _each_case(job, send, partial(measure_model, job=job), start)
    from ffncli.bench.timing.cheating.entry_points import EntryPoints
    from ffncli.bench.timing.measure_case import measure_case

    entry_points = EntryPoints() if any(choice.file for choice in job.kernels) else None
    measure = partial(measure_case, job=job, referee=referee, entry_points=entry_points)
    return _each_case(job, send, measure, start, referee)


def _measure_over_ranks(job: Job, send: Send, referee: RefereeProcess | None, start: float) -> bool:
    """The same as one of the ranks that the job's block is split over; False where a kernel broke."""
    from ffncli.bench.timing.ranks.case_run import KernelBroke, measure_over_ranks
    from ffncli.bench.timing.ranks.channel import RankChannel, waiting_limit
    from ffncli.run.ranks.join import joined

    limit = waiting_limit(job)
    try:
        with joined(job.ranks, job.cases[0].device, limit) as group:
            channel = RankChannel(group, limit)
            return _each_case(job, send, partial(measure_over_ranks, job=job, channel=channel, referee=referee), start)
    except KernelBroke as broke:
        send(("broke", broke.kernel, str(broke)))
        return False


def _each_case(
    job: Job, send: Send, measure: Callable[..., TimedUnit], start: float, referee: RefereeProcess | None = None
) -> bool:
    """Send what `measure` returns for each case; `start` are the seconds before the first. False if another worker is
    to have the rest: after a capture that failed, and without the referee, which the next one has again."""
    import torch

    from ffncli.bench.machine.devices import use_in_worker
    from ffncli.bench.machine.machine import release
    from ffncli.bench.timing.gpu.cuda_clock import clock_for
    from ffncli.bench.timing.gpu.cuda_graphs import SpoiledCapture
    from ffncli.bench.timing.outcomes import DeviceLost

    for case in job.cases:
        if job.ranks.world_size == 1:  # else the ranks have joined on their devices
            use_in_worker(case.device)
            with gpu_errors(case.device, torch):
                clock_for(case.device)
        send(("began", case.key))
        try:
            unit = measure(case, start=start)
        except DeviceLost as lost:
            send(("lost", lost.kernel, str(lost)))
            os._exit(ExitCode.ENVIRONMENT)  # at once: what else torch does on such a GPU raises, or never returns
        except SpoiledCapture as spoiled:
            send(("spoiled", spoiled.arm, str(spoiled)))
            return False
        send(("unit", unit))
        release(case.device)
        if referee is not None and referee.gone:
            return False
        start = 0.0
    return True


def _send(connection: Connection, message: tuple[Any, ...]) -> None:
    require_original(_PROCESS)
    connection.send(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
