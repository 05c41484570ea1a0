"""`python -m ffncli.bench.timing.worker FD`: one process of a benchmark; it receives a Job and returns units.

Messages: ("began", key), ("stage", doing, kernel) as that changes (records.Stage), and ("unit", TimedUnit) for every
case in turn, then ("finished",); or ("refused", error, hint, exit code) for a package that does not load or a device
that torch cannot use. A case that cannot be measured is a unit too, whose outcomes say why; a worker that ends without
"finished" was killed, killed itself, or has lost its referee. ("spoiled", arm, reason) is its last message after a
capture of a CUDA graph that failed: another worker gets the case.
"""

from __future__ import annotations

import sys
import time
from multiprocessing.connection import Connection

from ffncli.errors import FFNError
from ffncli.system.child import settle
from ffncli.system.gpu import gpu_errors
from ffncli.system.packages import package_error

_BEGAN = time.perf_counter()


def main(arguments: list[str]) -> int:
    """Serve one job over the inherited descriptor given as the only argument; returns 0, even if nobody listens."""
    settle()
    try:
        with Connection(int(arguments[0])) as connection:
            try:
                serve(connection)
            except Exception as error:
                refusal = error if isinstance(error, FFNError) else package_error(error)
                if refusal is None:
                    raise
                connection.send(("refused", refusal.message, refusal.hint, int(refusal.code)))
    except (EOFError, BrokenPipeError, ConnectionResetError):  # the parent is gone
        return 0
    return 0


def serve(connection: Connection) -> None:
    """Receive a job and run its cases in order, returning each before the next one starts.

    Raises FFNError (exit 3) for a device that torch cannot use.
    """
    job = connection.recv()
    # Before torch: its OpenMP binds this thread to one core, and OpenBLAS's threads, which are started when numpy is
    # loaded, would inherit that and all run there (a GEMM of two threads took 10 times as long).
    import numpy  # noqa: F401
    import torch

    from ffncli.bench.judge.memory_need import memory_need
    from ffncli.bench.machine.device_memory import release
    from ffncli.bench.machine.devices import use_in_worker
    from ffncli.bench.referee.process import referee_process  # torch takes seconds
    from ffncli.bench.timing.cheating.entry_points import EntryPoints
    from ffncli.bench.timing.cuda_clock import clock_for
    from ffncli.bench.timing.cuda_graphs import SpoiledCapture
    from ffncli.bench.timing.measure_case import measure_case

    with referee_process(job, connection) as referee:
        entry_points = EntryPoints() if any(choice.file for choice in job.kernels) else None
        start = time.perf_counter() - _BEGAN
        for case in job.cases:
            use_in_worker(case.device)
            with gpu_errors(case.device, torch):
                clock = clock_for(case.device)
            connection.send(("began", case.key))

            def tell(doing: str, name: str) -> None:
                connection.send(("stage", doing, name))

            try:
                unit = measure_case(
                    case, job, clock, start=start, tell=tell, referee=referee, entry_points=entry_points
                )
            except SpoiledCapture as spoiled:
                connection.send(("spoiled", spoiled.arm, str(spoiled)))
                return
            connection.send(("unit", unit))
            release(case.device, memory_need(case, 1).weights)
            if referee is not None and referee.gone:  # the next worker has one again, and the rest of the cases
                return
            start = 0.0
    connection.send(("finished",))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
