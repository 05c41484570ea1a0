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
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from ffncli.bench.activity import ACTIVITY, SIZE
from ffncli.bench.launch import labels
from ffncli.bench.records import Job
from ffncli.errors import ExitCode, FFNError
from ffncli.system.child import require_original, settle
from ffncli.system.gpu import gpu_errors
from ffncli.system.host import affinity
from ffncli.system.packages import package_error

if TYPE_CHECKING:
    from ffncli.bench.referee.process import RefereeProcess

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
        ACTIVITY.share(mmap(memory, SIZE), labels(job))
    # Before torch, whose OpenMP binds this thread to one core: OpenBLAS counts this thread's cores when numpy is
    # loaded, and never starts more threads than that.
    import numpy  # noqa: F401

    cores = affinity()
    from ffncli.bench.referee.process import referee_process  # torch takes seconds
    from ffncli.bench.timing.settings import start_blas_threads

    with referee_process(job, connection, reports) as referee:
        start_blas_threads(cores)
        if job.ranks.world_size == 1:
            done = _measure_all(job, connection, referee)
        else:
            done = _measure_over_ranks(job, connection, referee)
        if done:
            _send(connection, ("finished",))


def _measure_all(job: Job, connection: Connection, referee: RefereeProcess | None) -> bool:
    """Every case in turn; False where another worker is to have the rest."""
    import torch

    from ffncli.bench.machine.devices import use_in_worker
    from ffncli.bench.machine.machine import release
    from ffncli.bench.timing.cheating.entry_points import EntryPoints
    from ffncli.bench.timing.cuda_clock import clock_for
    from ffncli.bench.timing.cuda_graphs import SpoiledCapture
    from ffncli.bench.timing.measure_case import measure_case
    from ffncli.bench.timing.outcomes import DeviceLost

    if job.method.in_model:
        return _measure_models(job, connection)
    entry_points = EntryPoints() if any(choice.file for choice in job.kernels) else None
    start = time.perf_counter() - _BEGAN
    for case in job.cases:
        use_in_worker(case.device)
        with gpu_errors(case.device, torch):
            clock = clock_for(case.device)
        _send(connection, ("began", case.key))
        try:
            tell = partial(_tell, connection)
            unit = measure_case(case, job, clock, start=start, tell=tell, referee=referee, entry_points=entry_points)
        except DeviceLost as lost:
            _send(connection, ("lost", lost.kernel, str(lost)))
            os._exit(ExitCode.ENVIRONMENT)  # at once: what else torch does on such a GPU raises, or never returns
        except SpoiledCapture as spoiled:
            _send(connection, ("spoiled", spoiled.arm, str(spoiled)))
            return False
        _send(connection, ("unit", unit))
        release(case.device)
        if referee is not None and referee.gone:  # the next worker has one again, and the rest of the cases
            return False
        start = 0.0
    return True


def _measure_models(job: Job, connection: Connection) -> bool:
    """Every case in turn: a whole model, alone and with kernels in place of its FFNs."""
    from ffncli.bench.machine.devices import use_in_worker
    from ffncli.bench.timing.in_model.measure_model import measure_model

    start = time.perf_counter() - _BEGAN
    for case in job.cases:
        use_in_worker(case.device)
        _send(connection, ("began", case.key))
        _send(connection, ("unit", measure_model(case, job, start=start, tell=partial(_tell, connection))))
        start = 0.0
    return True


def _measure_over_ranks(job: Job, connection: Connection, referee: RefereeProcess | None) -> bool:
    """Every case in turn, as one of the ranks that the job's block is split over; False where a kernel broke."""
    from ffncli.bench.machine.machine import release
    from ffncli.bench.timing.ranks.case_run import KernelBroke, measure_over_ranks
    from ffncli.bench.timing.ranks.channel import RankChannel, waiting_limit
    from ffncli.run.ranks.join import joined

    start, limit = time.perf_counter() - _BEGAN, waiting_limit(job)
    try:
        with joined(job.ranks, job.cases[0].device, limit) as group:
            channel = RankChannel(group, limit)
            for case in job.cases:
                _send(connection, ("began", case.key))
                unit = measure_over_ranks(case, job, channel, start, partial(_tell, connection), referee)
                _send(connection, ("unit", unit))
                release(case.device)
                start = 0.0
    except KernelBroke as broke:
        _send(connection, ("broke", broke.kernel, str(broke)))
        return False
    return True


def _tell(connection: Connection, doing: str, name: str) -> None:
    _send(connection, ("stage", doing, name))


def _send(connection: Connection, message: tuple[Any, ...]) -> None:
    require_original(_PROCESS)
    connection.send(message)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
