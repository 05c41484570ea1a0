"""The limits on a user's kernel, as the parent of a worker enforces them: time to load, time of a call, memory.

The limits catch code that never returns or takes all memory. They are far above the needs of honest kernels, and each
can be raised by an option. A kernel that exceeds a limit loses its own row; its worker is killed, and the other kernels
are measured again.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from ffncli.bench.activity import RunningCode
from ffncli.bench.judge.roofline import work_of
from ffncli.bench.records import FIRST_CALL, Case, Method, Outcome, Stage, Status
from ffncli.show.text import bytes_text, seconds_text, time_text
from ffncli.system.host import available_memory

_CALL = 120.0  # the least time limit of a call, in seconds
# Rates on all threads; any machine worth measuring on is faster.
_FLOPS_PER_S, _BYTES_PER_S = 1e9, 1e8
_OF_FREE = 0.9  # share of the memory that is free when a run begins
_BLAMED = 0.1  # a kernel is blamed only if its memory has grown by this share of the limit
_GROWING = 0.01  # after growth by this share of the limit, memory is read again soon, to see whose code runs then


def call_limit(case: Case, method: Method) -> float:
    """Return the seconds that a call or block of short calls may take: 2 minutes, or more if there is much work."""
    if method.call_time is not None:
        return method.call_time
    work = work_of(case)
    return max(_CALL, work.flops / _FLOPS_PER_S + work.bytes / _BYTES_PER_S)


def memory_limit(method: Method) -> int | None:
    """Return the limit in bytes for a worker and its children; None if the free memory is unknown."""
    if method.memory_limit is not None:
        return method.memory_limit
    free = available_memory()
    return None if free is None else int(_OF_FREE * free)


@dataclass(frozen=True)
class Excess:
    """A kernel that exceeded a limit or ended its worker in another way, and its status and note in these cases.

    `kernel` is empty if it is unknown.
    """

    kernel: str
    outcome: Outcome
    cases: tuple[Case, ...]


@dataclass
class WorkerLimits:
    """The limits on one worker. Tracks how long its kernel's code has been running and which kernel's code made its
    memory grow.

    Times are in seconds of the parent's clock. Call `excess` on each message from the worker, and from time to time
    between messages, or soon if `hurried` is true.
    """

    method: Method
    cases: Sequence[Case]
    most_memory: int | None
    since: float  # when the current code began to run
    running: RunningCode = field(default_factory=RunningCode)
    memory: int = 0
    hurried: bool = False
    growth: dict[str, int] = field(default_factory=dict)

    def excess(
        self, stage: Stage, now: float, entered: float, running: RunningCode, memory: int | None
    ) -> Excess | None:
        """Return the kernel that exceeds a limit at this stage, which began at the time `entered`; None if no kernel
        does."""
        if running != self.running:
            self.running, self.since = running, now
        late = self._late(stage, now - entered, now - max(entered, self.since))
        return late or self._large(stage, memory)

    def begin_case(self) -> None:
        """Forget the growth in the previous case, whose memory was freed."""
        self.growth.clear()

    def _late(self, stage: Stage, in_stage: float, in_call: float) -> Excess | None:
        if stage.doing == "loading":
            if in_stage <= self.method.load_time:
                return None
            why = f"did not load its file within {_seconds(self.method.load_time)} (--load-time allows more)"
            return _excess(stage.kernel, "failed", why, self.cases)  # it would fail to load in the other cases too
        limit = call_limit(stage.case, self.method)
        if not self.running.kernel or in_call <= limit * (FIRST_CALL if self.running.first else 1):
            return None
        if self.running.first:
            what = f"building it and its first call took more than {_seconds(FIRST_CALL * limit)}"
        else:
            how = "timed" if stage.doing == "timing" else "checked"
            what = f"a call took more than {_seconds(limit)} while it was {how}"
        return _excess(self.running.kernel, "failed", f"timed out: {what} (--call-time allows more)", (stage.case,))

    def _large(self, stage: Stage, memory: int | None) -> Excess | None:
        if memory is None or self.most_memory is None:
            return None
        grown, self.memory = memory - self.memory, memory
        # Growth is charged to the running kernel. Freed memory is credited to the running kernel if its memory had
        # grown, otherwise to the kernel whose memory grew most.
        running = self.running.kernel or stage.kernel
        if grown < 0 and self.growth.get(running, 0) <= 0:
            running = max(self.growth, key=lambda name: self.growth[name], default=running)
        self.growth[running] = max(0, self.growth.get(running, 0) + grown)
        self.hurried = memory > self.most_memory / 2 and grown > _GROWING * self.most_memory
        kernel = max((name for name in self.growth if name), key=lambda name: self.growth[name], default="")
        if memory <= self.most_memory or self.growth.get(kernel, 0) < _BLAMED * self.most_memory:
            return None  # ffncli's own memory, such as references, is checked before it is allocated
        why = f"used more than {bytes_text(self.most_memory)} of memory (--memory-limit allows more)"
        return _excess(kernel, "oom", why, self.cases if stage.doing == "loading" else (stage.case,))


def ended_worker(kernel: str, status: Status, why: str) -> Outcome:
    """Return the outcome of a kernel whose worker ended; `why` completes "the worker ..."."""
    return Outcome(kernel, status, f"the worker {why}", ended_worker=True)


def _excess(kernel: str, status: Status, why: str, cases: Sequence[Case]) -> Excess:
    return Excess(kernel, ended_worker(kernel, status, why), tuple(cases))


def _seconds(seconds: float) -> str:
    return str(time_text(seconds)) if seconds < 1 else seconds_text(seconds)
