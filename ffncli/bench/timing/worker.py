"""`python -m ffncli.bench.timing.worker FD REPORTS [MEMORY]` is one process of a benchmark: it does a Job and returns
the Job's units.

The worker sends ("ready",) when it waits for its job; then ("began", key), ("stage", doing, kernel) whenever the stage
changes (records.Stage), and ("unit", TimedUnit) for every case, then ("finished",). Other last messages: ("refused",
error, hint, exit code) if a package does not load or torch cannot use a device; ("lost", kernel, why) if that kernel
has made its GPU unusable for this process; ("broke", kernel, why) if a kernel raised on one of several ranks while all
were timing it; ("spoiled", arm, reason) if the capture of a CUDA graph failed, and another worker must run the case. A
case that cannot be measured also gets a unit, whose outcomes say why. A worker that ends without a last message was
killed, killed itself, or has lost its referee. MEMORY, which the worker shares with its parent, shows which kernel's
code is running (bench/activity.py).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from mmap import mmap
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from ffncli.bench.activity import SIZE
from ffncli.bench.launch import labels
from ffncli.bench.records import Job, TimedUnit
from ffncli.bench.timing.reporter import REPORTER
from ffncli.errors import ExitCode, FFNError
from ffncli.system.child import require_original, see_users_folders, settle
from ffncli.system.gpu import gpu_errors
from ffncli.system.host import affinity
from ffncli.system.packages import package_error

if TYPE_CHECKING:
    from ffncli.bench.referee.process import RefereeProcess

Send: TypeAlias = Callable[[tuple[Any, ...]], None]
_BEGAN, _PROCESS = time.perf_counter(), os.getpid()


def main(arguments: list[str]) -> int:
    """Serve one job over the inherited file descriptor that is the first argument; return 0, even if the parent has
    ended.

    The second argument is the file descriptor on which the referee reports each case; the third is the descriptor of
    the activity's memory.
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
        return ExitCode.ENVIRONMENT  # a kernel has closed our connections, which the parent notices
    return 0


def serve(connection: Connection, reports: Connection, memory: int | None = None) -> None:
    """Receive a job and run its cases in order, returning each before the next one starts.

    Raises FFNError (exit 3) for a device that torch cannot use.
    """
    # Import numpy before torch. When numpy is loaded, OpenBLAS counts the cores that this thread may use, and it never
    # starts more threads than that; torch's OpenMP would already have bound this thread to one core.
    import numpy  # noqa: F401

    cores = affinity()
    with on_any_core(cores):
        import ffncli.bench.timing.measure_case  # noqa: F401  # with torch: all that takes long to import
        from ffncli.bench.referee.process import referee_process

    started = time.perf_counter() - _BEGAN
    connection.send(("ready",))
    job = connection.recv()
    if memory is not None:
        REPORTER.share(mmap(memory, SIZE), labels(job))

    def send(message: tuple[Any, ...]) -> None:
        require_original(_PROCESS)
        connection.send(message)

    with REPORTER.speaking(send), referee_process(job, connection, reports) as referee:
        start_blas_threads(cores)
        if _measure(job, send, referee, started):
            send(("finished",))


@contextmanager
def on_any_core(cores: Iterable[int]) -> Iterator[None]:
    """Import torch on any of these cores, and return to the core to which its OpenMP binds this thread.

    It does so as soon as it is loaded, in every worker to the same core: two workers that start at once would share it,
    and take twice as long.
    """
    import ctypes
    from importlib.util import find_spec

    torch = find_spec("torch")
    folders = torch.submodule_search_locations if torch else None
    library = next(Path(folders[0]).glob("lib/libgomp*"), None) if folders else None
    if library is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    ctypes.CDLL(str(library))
    bound = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, bound)


def start_blas_threads(cores: Iterable[int]) -> None:
    """Start the threads of numpy's BLAS so that they may run on all of these cores.

    OpenBLAS ends its threads when the process forks, and restarts them at the next matmul, on the cores of the thread
    that calls the matmul. By then, OpenMP has bound that thread to a single core, which all BLAS threads would share:
    a matmul on two threads took twenty times as long.
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


def _measure(job: Job, send: Send, referee: RefereeProcess | None, start: float) -> bool:
    """Measure one case after another; return False if another worker must run the remaining cases. `start` is the
    seconds that the process took to start."""
    entry_points = None
    if job.ranks.world_size == 1 and not job.method.in_model and any(choice.file for choice in job.kernels):
        from ffncli.bench.timing.cheating.entry_points import EntryPoints

        entry_points = EntryPoints()
    see_users_folders()
    if job.ranks.world_size > 1:
        return _measure_over_ranks(job, send, referee, start)
    if job.method.in_model:
        from ffncli.bench.timing.modes.in_model import measure_model

        return _each_case(job, send, partial(measure_model, job=job), start)
    from ffncli.bench.timing.measure_case import measure_case

    measure = partial(measure_case, job=job, referee=referee, entry_points=entry_points)
    return _each_case(job, send, measure, start, referee)


def _measure_over_ranks(job: Job, send: Send, referee: RefereeProcess | None, start: float) -> bool:
    """Measure every case as one of the ranks over which the job's blocks are split; return False if a kernel broke."""
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
    """Send the unit that `measure` returns for each case; `start` is the seconds before the first case. Return False if
    another worker must run the remaining cases: after a failed capture, or if the referee has ended (the next
    worker starts a new referee)."""
    import torch

    from ffncli.bench.machine.devices import use_in_worker
    from ffncli.bench.machine.machine import release
    from ffncli.bench.timing.gpu.cuda_clock import clock_for
    from ffncli.bench.timing.gpu.cuda_graphs import SpoiledCapture
    from ffncli.bench.timing.outcomes import DeviceLost

    for case in job.cases:
        if job.ranks.world_size == 1:  # with several ranks, the devices are already in use
            use_in_worker(case.device)
            with gpu_errors(case.device, torch):
                clock_for(case.device)
        send(("began", case.key))
        try:
            unit = measure(case, start=start)
        except DeviceLost as lost:
            send(("lost", lost.kernel, str(lost)))
            os._exit(ExitCode.ENVIRONMENT)  # at once: further torch code on this GPU raises or hangs
        except SpoiledCapture as spoiled:
            send(("spoiled", spoiled.arm, str(spoiled)))
            return False
        send(("unit", unit))
        if case is not job.cases[-1]:
            release(case.device)
        if referee is not None and referee.gone:
            return False
        start = 0.0
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
