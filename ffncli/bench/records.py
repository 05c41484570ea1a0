"""What a benchmark is made of, as frozen data: the case, the method, what a process is asked and what it answers.

Units are nested: process > placement > round > block. Nothing here needs torch; records travel between processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from ffncli.block.recipe import FFNSpec
from ffncli.kernels.choice import KernelChoice
from ffncli.show.text import plural

Pass: TypeAlias = Literal["forward", "forward+backward"]
Cache: TypeAlias = Literal["warm", "shared", "cold-weights", "flush"]
Status: TypeAlias = Literal["ok", "skipped", "failed", "wrong", "oom"]
Verdict: TypeAlias = Literal["faster", "slower", "same", "inconclusive"]
Doing: TypeAlias = Literal["starting", "loading", "compiling", "checking", "timing"]

# Arms that are no kernels of the user's; their names in the rounds file.
TWIN = "(aa)"  # the baseline once more, with buffers of its own
ANCHOR = "(anchor)"  # torch-free work: a numpy GEMM and a memory copy
GEMM = "(gemm)"  # the bare matrix products of the same shapes, in torch
OWN_ARMS = (TWIN, ANCHOR, GEMM)

# Arms of --by-step: the whole block, their baseline, and `step gate` and so on, a step alone.
BLOCK, STEP = "block", "step "


@dataclass(frozen=True)
class Case:
    """One point of the grid. `cache` is what was asked for; what was possible is in the answer (`TimedUnit.cache`).

    `source` is what was typed, `spec` the block that it means, `label` how results call it: unlike blocks have unlike
    labels. The weights are drawn: time does not depend on them.
    """

    source: str
    label: str
    spec: FFNSpec
    tokens: int
    dtype: str = "fp32"
    passes: Pass = "forward"
    cache: Cache = "warm"
    device: str = "cpu"
    threads: int = 1

    @property
    def key(self) -> str:
        """The case's name, unique in a grid: `512x2048:swiglu, 32 tokens, fp32, forward, warm, cpu, 2 threads`."""
        threads = f"{self.threads} {plural('thread', self.threads)}"
        return ", ".join(
            (self.label, f"{self.tokens} tokens", self.dtype, self.passes, self.cache, self.device, threads)
        )


@dataclass(frozen=True)
class Method:
    """How to measure. Times in seconds.

    `precision` is the half-width wanted of the interval of a ratio, `max_time` bounds the measuring of one case over
    all processes, `margin` decides between `same` and `faster` or `slower`.
    """

    processes: int = 5
    precision: float = 0.01
    max_time: float = 20.0
    margin: float = 0.02
    placements: int = 3  # at least, in each process
    rounds: int = 4  # at least, in each placement
    block: float | None = None  # at least; None: 2 ms on a CPU, 1 ms on a GPU
    seed: int = 0
    allocator: Literal["fixed", "system"] = "fixed"
    math_mode: Literal["highest", "high", "medium"] = "highest"  # torch's float32 matmul precision
    sustained: bool = False
    by_step: bool = False
    load_time: float = 180.0  # at most, for a user's file to be loaded; a C++ extension compiles then


@dataclass(frozen=True)
class Stage:
    """What a worker does at a case, with which kernel; empty: none, or all of them in turn."""

    process: int
    case: Case
    doing: Doing = "starting"
    kernel: str = ""


@dataclass(frozen=True)
class Job:
    """What one worker process does: every case with every kernel.

    `gone` holds, with the case's key, what became of kernels that have ended a worker at that case: they are not run
    there again.
    """

    process: int
    cases: tuple[Case, ...]
    kernels: tuple[KernelChoice, ...]
    baseline: str | None
    method: Method
    gone: tuple[tuple[str, Outcome], ...] = ()


@dataclass(frozen=True)
class TimedBlock:
    """`inner` calls of one arm, timed together. `seconds` is the time of all of them.

    `flags`: `preempted`, `throttled`, `stolen`, and counts such as `faults=12` (page faults in the block).
    """

    process: int
    case: str
    placement: int
    round: int
    position: int
    kernel: str
    inner: int
    seconds: float
    flags: tuple[str, ...] = ()

    @property
    def per_call(self) -> float:
        """Seconds of one call."""
        return self.seconds / self.inner


@dataclass(frozen=True)
class Outcome:
    """What became of one kernel of a case in one process; errors are against float64 on the same rounded inputs.

    `error_max` = max|a−b| / max|b|, `error_rel` = ‖a−b‖ / ‖b‖. `compile_s` are the seconds of its build where that
    compiles. A kernel whose status is not ok in any process is not timed in the result. `computes` is what it declares
    to compute in; empty: the case's dtype.
    """

    kernel: str
    status: Status = "ok"
    note: str = ""
    error_max: float | None = None
    error_rel: float | None = None
    compile_s: float | None = None
    peak_memory_bytes: int | None = None
    computes: str = ""


@dataclass(frozen=True)
class Roof:
    """What this machine can do, measured in the same process: the best GEMM of any shape, and the best of a copy and a
    sum. `llc_bytes` is the last-level cache, whose bytes are not bound by the memory.
    """

    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    llc_bytes: int | None = None


@dataclass(frozen=True)
class TimedUnit:
    """One case as one process measured it: the smallest piece of finished work.

    `environment` holds the machine and the versions as columns of the results name them; `spent` the seconds of
    preparing (start, verification, warm-up), of timed blocks with their lead-in, and of the rest.
    """

    process: int
    case: str
    baseline: str
    cache: Cache
    outcomes: tuple[Outcome, ...]
    blocks: tuple[TimedBlock, ...]
    roof: Roof = Roof()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    spent: Mapping[str, float] = field(default_factory=dict)
