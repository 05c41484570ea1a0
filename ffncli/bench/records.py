"""What a benchmark is made of, as frozen data: the case, the method, the job of a process and its answer.

Units are nested: process > placement > round > block. Nothing here needs torch; records travel between processes, and
through the journal: their annotations say what one that is read may hold (models/files/json_records.py).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from ffncli.block.recipe import FFNSpec
from ffncli.block.shard import Ranks
from ffncli.kernels.choice import KernelChoice
from ffncli.models.files.json_records import Count, Form, Positive, Range
from ffncli.options.accept import MAX_SIZE
from ffncli.show.text import plural

Pass: TypeAlias = Literal["forward", "forward+backward"]
Cache: TypeAlias = Literal["warm", "shared", "cold-weights", "flush"]
Status: TypeAlias = Literal["ok", "skipped", "failed", "wrong", "oom"]
Verdict: TypeAlias = Literal["faster", "slower", "same", "inconclusive"]
Launch: TypeAlias = Literal["auto", "graphs", "plain"]
Refereed: TypeAlias = Literal["process", "worker"]
Launched: TypeAlias = Literal["", "graphs", "plain"]
Calibrate: TypeAlias = Literal["quick", "full"]
Doing: TypeAlias = Literal["starting", "loading", "compiling", "checking", "timing"]

Above: TypeAlias = Annotated[float, Range(0, above=True)]
Seconds: TypeAlias = Annotated[float, Range(0, 1e9)]
Time: TypeAlias = Annotated[float, Range(0, 1e9, above=True)]  # one that something takes, in seconds
Flag: TypeAlias = Annotated[str, Form(r"[a-z-]{1,40}(=-?[0-9]{1,15}(\.[0-9]{1,20})?(e[+-][0-9]{1,2})?)?")]
Share: TypeAlias = Annotated[float, Range(0)]
Rate: TypeAlias = Annotated[float, Range(1, 1e24)]  # per second

GRAVEST: tuple[Status, ...] = ("wrong", "oom", "failed", "skipped", "ok")
LEAST_TIME = 1e-12  # s of a call; none takes less, and a time of zero has no logarithm
FIRST_CALL = 5  # times the limit of a call, for building a kernel and its first call: it may compile
LEAST_MEMORY = 200_000_000  # bytes of a limit; Python and torch take some 160 MB before any kernel runs

# Arms that are not the user's kernels; their names in the rounds file.
TWIN = "(aa)"  # the baseline once more, with buffers of its own
ANCHOR = "(anchor)"  # torch-free work: a numpy GEMM and a memory copy
GEMM = "(gemm)"  # the bare matrix products of the same shapes, in torch
COLLECTIVES = "(collectives)"  # over ranks: what a block sends, of the same tensors, without its computing
OWN_ARMS = (TWIN, ANCHOR, GEMM, COLLECTIVES)
COMPUTE = " (compute)"  # over ranks: the end of the name of an arm which is a kernel without its collectives

# Flags of a block on a GPU: work that its clock did not see was left; the seconds in which the host launched its calls.
OTHER_STREAM, HOST_SECONDS = "other-stream", "host"

# Arms of --by-step: the whole block, their baseline, and `step gate` and so on, a step alone.
BLOCK, STEP = "block", "step "
MODEL = "model"  # the baseline of --in-model: the whole model with its own FFNs


@dataclass(frozen=True)
class Case:
    """One point of the grid. `cache` is the requested mode; the mode in use is in the answer (`TimedUnit.cache`).

    `source` is the text as typed, `spec` the block that it means, `label` its name in results: different blocks have
    different labels. The weights are random: time does not depend on them.

    `routing` is how a mixture's tokens are spread over its experts: `uniform`, `zipf:1.2`, `text` or a saved trace;
    empty: as the router happens to choose. `input` is a file of real x; empty: normal random numbers. Of both files
    there is the sha256.

    `ranks` is how the block is split over processes; `threads` is the number of each of them.
    """

    source: str
    label: str
    spec: FFNSpec
    tokens: Annotated[int, Range(1, MAX_SIZE)]
    dtype: str = "fp32"
    passes: Pass = "forward"
    cache: Cache = "warm"
    device: str = "cpu"
    threads: Annotated[int, Range(1, 100_000)] = 1
    routing: str = ""
    input: str = ""
    routing_sha256: str = ""
    input_sha256: str = ""
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def key(self) -> str:
        """The case's name, unique in a grid: `512x2048:swiglu, 32 tokens, fp32, forward, warm, cpu, 2 threads`."""
        threads = f"{self.threads} {plural('thread', self.threads)}"
        parts = (self.label, f"{self.tokens} tokens", self.dtype, self.passes, self.cache, self.device, threads)
        return ", ".join((*parts, *filter(None, [self.layout]), *self.data))

    @property
    def layout(self) -> str:
        """How it is split, as in results: `tp2`; empty on one rank."""
        return str(self.ranks) if self.ranks.world_size > 1 else ""

    @property
    def of_rank(self) -> Case:
        """What one rank is given: all tokens, or with expert parallelism those of its place on that dimension."""
        return self if self.ranks.ep == 1 else replace(self, tokens=self.tokens // self.ranks.ep)

    @property
    def data(self) -> tuple[str, ...]:
        """What x is where it is not random, in words: `routing zipf:1.2`, `input x.safetensors`."""
        texts = {"routing": self.routing, "input": self.input}
        return tuple(f"{name} {text}" for name, text in texts.items() if text)


@dataclass(frozen=True)
class Method:
    """How to measure. Times in seconds.

    `precision` is the requested half-width of the interval of a ratio, `max_time` bounds the measuring of one case over
    all processes, `margin` decides between `same` and `faster` or `slower`.
    """

    processes: Annotated[int, Range(1, 1000)] = 5
    precision: Above = 0.01
    max_time: Time = 20.0
    margin: Share = 0.02
    placements: Positive = 3  # at least, in each process
    rounds: Positive = 4  # at least, in each placement
    block: Time | None = None  # at least; None: 2 ms on a CPU, 1 ms on a GPU
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    allocator: Literal["fixed", "system"] = "fixed"
    math_mode: Literal["highest", "high", "medium"] = "highest"  # torch's float32 matmul precision
    sustained: bool = False
    by_step: bool = False
    in_model: bool = False
    launch: Launch = "auto"  # how calls reach a GPU: replayed from CUDA graphs, or each by itself
    load_time: Time = 180.0  # at most, for loading a user's file; a C++ extension compiles then
    call_time: Time | None = None  # at most, for a call (FIRST_CALL times for the first); None: by the block's size
    memory_limit: Positive | None = None  # bytes at most, of a worker; None: most of what is free
    calibrate: Calibrate = "quick"  # how `auto` chooses: without kernels that would have to compile first, or with all

    def refereed_apart(self, case: Case) -> bool:
        """Whether the right answers of a case are in a process of their own: where one can be forked, unless on a GPU,
        step by step or in a model."""
        return sys.platform.startswith("linux") and case.device == "cpu" and not (self.by_step or self.in_model)


@dataclass(frozen=True)
class Stage:
    """What a worker is doing in a case, and with which kernel; empty: none, or all of them in turn."""

    process: int
    case: Case
    doing: Doing = "starting"
    kernel: str = ""


@dataclass(frozen=True)
class Job:
    """The job of one worker process: every case with every kernel.

    `gone` has, with the case's key, the outcome of kernels that have ended a worker in that case: they are not run
    in it again. `plain` has, with a case's key, why an earlier worker found that it cannot be replayed. `chosen` has,
    with a case's key, the name of a kernel that is `auto` and the one that an earlier worker chose for it.
    """

    process: int
    cases: tuple[Case, ...]
    kernels: tuple[KernelChoice, ...]
    baseline: str | None
    method: Method
    gone: tuple[tuple[str, Outcome], ...] = ()
    plain: tuple[tuple[str, str], ...] = ()
    chosen: tuple[tuple[str, str, str], ...] = ()

    def chosen_in(self, case: Case) -> dict[str, str]:
        """The names of kernels that are `auto` → the kernel that each stands for in this case."""
        return {name: kernel for key, name, kernel in self.chosen if key == case.key}

    def gone_in(self, case: Case) -> dict[str, Outcome]:
        """The outcomes of the kernels that have ended a worker in this case."""
        return {outcome.kernel: outcome for key, outcome in self.gone if key == case.key}

    @property
    def ranks(self) -> Ranks:
        """Over how many ranks the blocks of all its cases are split."""
        return self.cases[0].ranks if self.cases else Ranks()

    @property
    def wanted_baseline(self) -> str:
        """The requested baseline; else eager if that is among the kernels; else none is known yet (empty)."""
        if self.baseline is not None:
            return self.baseline
        return "eager" if any(choice.label == "eager" for choice in self.kernels) else ""


@dataclass(frozen=True)
class TimedBlock:
    """`inner` calls of one arm, timed together. `seconds` is the time of all of them.

    `flags`, as the rounds file has them: `preempted`, `throttled`, `stolen`, and figures such as `faults=12` (page
    faults in the block).
    """

    process: Count
    case: str
    placement: Count
    round: Count
    position: Count
    kernel: str
    inner: Positive
    seconds: Seconds
    flags: tuple[Flag, ...] = ()

    @property
    def per_call(self) -> float:
        """Seconds of one call."""
        return self.seconds / self.inner

    def figure(self, name: str) -> float | None:
        """The value of the flag `name=value`; None if the block has no such flag."""
        values = (flag.partition("=")[2] for flag in self.flags if flag.startswith(f"{name}="))
        return next(map(float, values), None)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one kernel of a case in one process; errors are against float64 on the same rounded inputs.

    `error_max` = max|a−b| / max|b|, `error_rel` = ‖a−b‖ / ‖b‖. `compile_s` are the seconds of its build where that
    compiles. A kernel whose status is not ok in any process is not timed in the result. `computes` is what it declares
    to compute in; empty: the case's dtype. `chosen` is the kernel that `auto` stands for.

    In a model, `error_max` is the largest over its FFNs, and `logits_error` that of the logits against the model's own;
    `logits_limit` is what rounding may cause. `ended_worker`: its worker died of it, or was killed for it.
    """

    kernel: str
    status: Status = "ok"
    note: str = ""
    error_max: Share | None = None
    error_rel: Share | None = None
    compile_s: Seconds | None = None
    peak_memory_bytes: Count | None = None
    computes: str = ""
    chosen: str = ""
    logits_error: Share | None = None
    logits_limit: Share | None = None
    ended_worker: bool = False


@dataclass(frozen=True)
class Finding:
    """What the referee found about one kernel in a case, told to the worker's parent by the referee itself.

    `outcome` is `wrong` or, if every answer was right, `ok`. `answers` counts the outputs that were judged as a whole,
    `samples` the samples of timed calls that were handed over.
    """

    outcome: Outcome
    answers: Count = 0
    samples: Count = 0


@dataclass(frozen=True)
class CaseReport:
    """The referee's findings in one case; a kernel may be TWIN."""

    case: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Roof:
    """What this machine can do, measured in the same process: the best GEMM of any shape, and the best of copies and
    reads of memory. `llc_bytes` is the last-level cache, whose bytes are not bound by the memory.
    """

    flops_per_s: Rate | None = None
    bytes_per_s: Rate | None = None
    llc_bytes: Count | None = None


@dataclass(frozen=True)
class TimedUnit:
    """One case as one process measured it: the smallest piece of finished work.

    `environment` has the machine and the versions under the columns' names; `spent` the seconds of
    preparing (start, verification, warm-up), of timed blocks with their lead-in, and of everything else. `launch` is
    how calls reached a GPU, `graphs` or `plain`; empty on a CPU, and where nothing was timed. `plain_because` says why
    the calls of a case that graphs suit could not be captured.

    With a prescribed routing, `tokens_per_expert` is how many each expert received, and `experts_touched` how many
    experts received any, both the mean of a call.

    `referee` is who had the right answers: a process apart, which told its findings itself, or the worker.
    """

    process: Count
    case: str
    baseline: str
    cache: Cache
    outcomes: tuple[Outcome, ...]
    blocks: tuple[TimedBlock, ...]
    roof: Roof = Roof()
    environment: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    spent: Mapping[str, Seconds] = field(default_factory=dict)
    launch: Launched = ""
    tokens_per_expert: tuple[Share, ...] = ()
    experts_touched: Share | None = None
    referee: Refereed = "worker"
    plain_because: str = ""


def model_with(label: str) -> str:
    """The name in results of a model with that kernel in place of its FFNs."""
    return f"{MODEL}+{label}"


def not_captured(why: str) -> str:
    """What a note says about an arm that CUDA graphs cannot hold."""
    return f"cannot be captured: {why}"
