"""Other work on the machine, made on purpose: what a shared machine, a hypervisor or a container does to a measurement.

with under("busy", pid): ...

Every kind has two forms: what is tuned is tuned on the one and judged on the other.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.other_job import ONE
from benchmarks.script import ROOT, environment

LOADS = ("quiet", "busy", "busy2", "bursts", "memory", "stopped", "quota")
CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
_CGROUP = Path("/sys/fs/cgroup/cpu/ffn-under-load")  # version 1; elsewhere there is no quota
_PERIOD = 100_000  # µs


@contextmanager
def under(load: str, worker: int, tuning: bool = False, seed: int = 0) -> Iterator[None]:
    """Make this load while the `with` block runs; `worker` is the process that is measured."""
    with ExitStack() as stack:
        count = {"busy": CORES, "busy2": 2 * CORES, "bursts": CORES, "memory": 1}.get(load, 0)
        for at in range(count):
            stack.enter_context(_job(load, tuning, seed + at))
        if load == "stopped":
            stack.enter_context(_stopping(worker, tuning, seed))
        if load == "quota":
            stack.enter_context(_quota(worker, 0.8 if tuning else 0.6))
        yield


def has_quota() -> bool:
    """Whether a quota can be set here."""
    return os.access(_CGROUP.parent, os.W_OK) and (_CGROUP.parent / "cpu.cfs_quota_us").exists()


@contextmanager
def _job(load: str, tuning: bool, seed: int) -> Iterator[None]:
    words = [sys.executable, "-m", "benchmarks.loads", str(os.getpid()), load, str(int(tuning)), str(seed)]
    job = subprocess.Popen(words, cwd=ROOT, env=environment() | ONE)
    try:
        yield
    finally:
        job.kill()
        job.wait()


@contextmanager
def _stopping(worker: int, tuning: bool, seed: int) -> Iterator[None]:
    """Stop the worker and its descendants at random and let them go on, as a hypervisor does to a virtual processor."""
    over, draw = threading.Event(), random.Random(seed)
    runs, stops = (0.03, 0.01) if tuning else (0.06, 0.02)  # mean s

    def stop_and_go() -> None:
        while not over.wait(draw.expovariate(1 / runs)):
            family = list(_family(worker))
            for number, seconds in ((signal.SIGSTOP, min(draw.expovariate(1 / stops), 0.2)), (signal.SIGCONT, 0.0)):
                for process in family:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(process, number)
                time.sleep(seconds)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _family(process: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield process
    for path in Path(f"/proc/{process}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in path.read_text("ascii").split():
                yield from _family(int(child))


@contextmanager
def _quota(worker: int, cores: float) -> Iterator[None]:
    """Give the worker a share of the processors' time: once it is used up, it waits for the next period."""
    _CGROUP.mkdir(exist_ok=True)
    (_CGROUP / "cpu.cfs_period_us").write_text(str(_PERIOD))
    (_CGROUP / "cpu.cfs_quota_us").write_text(str(int(cores * _PERIOD)))
    (_CGROUP / "cgroup.procs").write_text(str(worker))
    yield  # the group is empty once the worker has ended, and is used again


# --- the jobs ---------------------------------------------------------------------------------------------------------


def _spin() -> None:
    sum(range(20_000))


def _products() -> Callable[[], None]:
    import numpy as np

    a = np.random.default_rng(0).standard_normal((256, 256), dtype=np.float32)
    return lambda: (a @ a, None)[1]


def _copies(reads: bool) -> Callable[[], None]:
    import numpy as np

    source, target = np.ones(16 << 20, np.float32), np.empty(16 << 20, np.float32)
    return (lambda: (source.sum(), None)[1]) if reads else (lambda: np.copyto(target, source))


def main(parent: int, load: str, tuning: bool, seed: int) -> None:
    """Work until the parent is gone."""
    work, draw = _spin, random.Random(seed)
    if load == "memory":
        work = _copies(reads=tuning)
    elif tuning:
        work = _products()
    longest = 0.1 if tuning else 0.5  # s of a burst, and of the pause after it
    until = time.perf_counter()
    while os.getppid() == parent:
        work()
        if load == "bursts" and time.perf_counter() > until:
            time.sleep(draw.uniform(0.02, longest))
            until = time.perf_counter() + draw.uniform(0.02, longest)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "1", int(sys.argv[4]))
