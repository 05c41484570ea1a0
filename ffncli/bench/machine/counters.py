"""Counters: what the operating system did during a block of calls, read outside the timed section."""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from ffncli.system.cgroup import text

try:
    import resource
except ImportError:  # not on Windows
    resource = None  # type: ignore[assignment]

SLICE = 0.01  # s; a preempted thread waits for some milliseconds, the length of a scheduler's slice
WAITED = 0.01  # fraction of a block, waiting for a core
STOLEN = 0.1  # fraction of the busy time between two readings; a single stolen tick in ten may be chance
WAITING = 0.9  # fraction of threads × wall time
CLOCK = 0.75  # fraction of the rated clock
BUSY = 0.1  # s for which threads waited for a core, per second
OTHERS = 0.05  # processor time of other threads, as a fraction of the timing thread's
_RARELY = 0.1  # s between two readings of files that are slow to read and count in ticks of 10 ms
_SELDOM = 0.5  # s between two readings of values that change slowly


@dataclass(frozen=True)
class Snapshot:
    """Counts so far; None if the system does not provide them, or if reading them would disturb the process.

    `waited` is the seconds that this process's threads were ready to run but had no core. `stolen` is the fraction of
    all processors' busy time that other virtual machines took between the last two readings of those times. `load` is
    set if it exceeds the number of cores. `clock` is the fraction of the rated clock.
    """

    preemptions: int | None = 0
    faults: int = 0
    cpu_seconds: float | None = 0.0  # of all threads
    thread_seconds: float = 0.0  # of this thread
    throttled: int | None = None
    stolen: float | None = None
    load: float | None = None
    clock: float | None = None
    waited: float | None = None


class Counters(Protocol):
    """Reads counts before and after a block, and interprets them."""

    def read(self) -> Snapshot:
        """Return the present counts."""

    def flags(self, before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
        """Return flags for a block of `seconds` on `threads` threads (0: ignore its processor time)."""


def flags(before: Snapshot, after: Snapshot, seconds: float, threads: int) -> tuple[str, ...]:
    """Return `preempted`, `throttled`, `stolen`, and figures: `waited=`, `faults=`, `cpu=`, `others=`, `load=`,
    `clock=`.

    A block counts as preempted if involuntary context switches cost more than WAITED of its time; most switches are to
    kernel threads, which take microseconds. If the waiting time is unknown, one switch per SLICE of the block's time is
    enough. `cpu` is the fraction of threads × wall time in which threads were busy.
    """
    labels = []
    switches = _difference(before.preemptions, after.preemptions)
    cpu = _difference(before.cpu_seconds, after.cpu_seconds)
    waited = _difference(before.waited, after.waited)
    preempted = (switches or 0) * SLICE >= seconds if waited is None else waited > WAITED * seconds
    if preempted and switches != 0:
        labels.append("preempted")
        if waited is not None:
            labels.append(f"waited={waited:.6f}")
    if before.throttled is not None and after.throttled is not None and after.throttled > before.throttled:
        labels.append("throttled")
    if after.stolen is not None and after.stolen > STOLEN:
        labels.append("stolen")
    if cpu is not None and after.faults > before.faults:
        labels.append(f"faults={after.faults - before.faults}")
    if cpu is not None and threads > 0 and seconds > 0 and cpu < WAITING * threads * seconds:
        labels.append(f"cpu={cpu / (threads * seconds):.2f}")
    thread = after.thread_seconds - before.thread_seconds
    others = (cpu or 0.0) - thread
    if threads == 1 and others > OTHERS * thread > 0:
        labels.append(f"others={others / thread:.2f}")
    if after.load is not None:
        labels.append(f"load={after.load:.1f}")
    if after.clock is not None and after.clock < CLOCK:
        labels.append(f"clock={after.clock:.2f}")
    return tuple(labels)


def _difference(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


class SystemCounters:
    """Counts of this process (getrusage), its cgroup and the machine. Linux provides all counts; other systems provide
    fewer, without raising.

    With `launching`, only the waiting times of the threads that launch a GPU's work are read. Other threads do not
    delay that work, and on 128 cores, reading every thread takes as long as half a block.

    A system call that returns processor time lets the scheduler take the core of the calling thread at once, if its
    slice is over, instead of at the next tick, together with the cores of the other threads. On a busy machine,
    `threads` that wait for each other then lose step, and their calls take five times as long. So if they have waited
    for long, only their waiting time is read.
    """

    def __init__(self, launching: bool = False, threads: int = 1) -> None:
        self._throttle = _throttle_file()
        self._stat = Path("/proc/stat") if Path("/proc/stat").exists() else None
        self._stat_read = self._slow_read = -1.0
        self._stat_every = _RARELY
        self._ticks: tuple[int, int] | None = None
        self._stolen: float | None = None  # the last reading applies to every block until the next reading
        self._slow: tuple[float | None, float | None] = (None, None)
        self._rated = _fastest_clock("base_frequency")
        self._waiting = _Waiting(_launches if launching else None)
        self._in_step, self._busy = threads > 1, False  # busy: only the waiting time is read
        self._looked = self._waited = 0.0  # when that was chosen, and the waiting time then

    def read(self) -> Snapshot:
        """Return the present counts, within microseconds; counts that are slow to read are only read again after a
        while."""
        now = time.monotonic()
        if self._stat is not None and now - self._stat_read >= self._stat_every:
            ticks = _ticks(self._stat)
            self._stolen, self._ticks, self._stat_read = _share_stolen(self._ticks, ticks), ticks, now
            self._stat_every = max(_RARELY, 50 * (time.monotonic() - now))  # milliseconds on hundreds of cores
        if now - self._slow_read >= _SELDOM:
            fastest = _fastest_clock("scaling_cur_freq") if self._rated else None
            share = fastest / self._rated if fastest and self._rated else None
            self._slow, self._slow_read = (_load_above_cores(), share), now
            self._waiting.look_for_threads()
        load, clock = self._slow
        throttled = _throttled(self._throttle) if self._throttle else None
        waited = self._waiting.read()
        if self._in_step and waited is not None and now - self._looked >= _RARELY:
            self._busy = waited - self._waited > BUSY * (now - self._looked)
            self._looked, self._waited = now, waited
        if self._busy:
            return Snapshot(None, 0, None, 0.0, throttled, self._stolen, load, clock, waited)
        if resource is None:
            return Snapshot(0, 0, time.process_time(), time.thread_time(), throttled, self._stolen, load, clock, waited)
        use = resource.getrusage(resource.RUSAGE_SELF)
        cpu = use.ru_utime + use.ru_stime
        faults = use.ru_minflt + use.ru_majflt
        thread = time.thread_time()
        return Snapshot(use.ru_nivcsw, faults, cpu, thread, throttled, self._stolen, load, clock, waited)

    flags = staticmethod(flags)


class _Waiting:
    """The time for which this process's threads waited for a core (Linux: schedstat); reading takes about 1.5 µs per
    thread.

    The files stay open. The waiting time of a finished thread still counts, so that the sum never decreases. `only`
    selects threads by their folders in /proc (default: all).
    """

    def __init__(self, only: Callable[[Path], bool] | None = None) -> None:
        self._only = only
        self._files: dict[str, BinaryIO] = {}
        self._waited: dict[str, float] = {}

    def look_for_threads(self) -> None:
        folder = Path("/proc/self/task")
        try:
            for thread in set(os.listdir(folder)) - set(self._waited):
                if self._only and not self._only(folder / thread):
                    continue
                self._files[thread] = open(folder / thread / "schedstat", "rb", buffering=0)  # noqa: SIM115
                self._waited[thread] = 0.0
        except OSError:
            return

    def read(self) -> float | None:
        for thread, file in list(self._files.items()):
            try:
                self._waited[thread] = int(os.pread(file.fileno(), 100, 0).split()[1]) * 1e-9
            except (OSError, ValueError, IndexError):  # the thread has ended
                self._files.pop(thread).close()
        return sum(self._waited.values()) if self._waited else None


def _launches(thread: Path) -> bool:
    """Return True if a thread launches a GPU's work: the main thread, and torch's thread for the backward pass."""
    return thread.name == str(os.getpid()) or text(thread / "comm").startswith("pt_autograd")


def _throttle_file() -> Path | None:
    """Return the nearest cpu.stat file of this cgroup (version 2 or 1) that has throttling counts; None if there is no
    quota."""
    for line in text(Path("/proc/self/cgroup")).splitlines():
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers and "cpu" not in controllers.split(","):
            continue
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/cpu", "/sys/fs/cgroup/cpu,cpuacct"):
            for path in (Path(root) / group.strip("/") / "cpu.stat", Path(root) / "cpu.stat"):
                stat = text(path)
                if "nr_throttled" in stat:
                    return None if "nr_periods 0\n" in stat else path  # no period has passed, so there is no quota
    return None


def _throttled(path: Path) -> int | None:
    """Return how often the cgroup used up its quota."""
    for line in text(path).splitlines():
        name, _, count = line.partition(" ")
        if name == "nr_throttled" and count.isdigit():
            return int(count)
    return None


def _ticks(path: Path) -> tuple[int, int] | None:
    """Return (stolen ticks, busy ticks including stolen) of all processors. The file's columns are user, nice, system,
    idle, iowait, irq, softirq and steal."""
    try:
        with path.open() as file:
            counts = [int(field) for field in file.readline().split()[1:9]]
    except (OSError, ValueError):
        return None
    return (counts[7], sum(counts) - counts[3] - counts[4]) if len(counts) == 8 else None


def _share_stolen(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    """Return the stolen fraction of the busy ticks between two readings; None if it is unknown."""
    if before is None or after is None or after[1] <= before[1]:
        return None
    return (after[0] - before[0]) / (after[1] - before[1])


def _load_above_cores() -> float | None:
    """Return the load of the last minute if it exceeds the number of cores by more than 0.5."""
    try:
        load = os.getloadavg()[0]
    except (OSError, AttributeError):
        return None
    return load if load > (os.cpu_count() or 1) + 0.5 else None


def _fastest_clock(name: str) -> int | None:
    """Read the file called `name` of each processor that this process may use (at most 8, as others may be idle).
    Return the largest number, in kHz; None if the system does not have these files."""
    cores = sorted(os.sched_getaffinity(0))[:8] if hasattr(os, "sched_getaffinity") else []
    texts = (text(Path(f"/sys/devices/system/cpu/cpu{core}/cpufreq/{name}")) for core in cores)
    return max((int(clock) for clock in texts if clock.isdigit()), default=None)
