"""The records of a benchmark, as frozen data: the case, the method, the job of a process and its results.

The levels are nested: process > placement > round > block. Nothing here needs torch. Records travel between processes
and through the journal; their annotations limit the values that a record may contain when it is read
(models/files/json_records.py).
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias

from ffncli.block.recipe import FFNSpec
from ffncli.block.shard import Ranks
from ffncli.kernels.choice import KernelChoice
from ffncli.models.files.json_records import Count, Form, Positive, Range
from ffncli.options.accept import MAX_SIZE
from ffncli.options.shared import Pass
from ffncli.show.text import plural

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
Time: TypeAlias = Annotated[float, Range(0, 1e9, above=True)]  # a duration, in seconds
Flag: TypeAlias = Annotated[str, Form(r"[a-z-]{1,40}(=-?[0-9]{1,15}(\.[0-9]{1,20})?(e[+-][0-9]{1,2})?)?")]
Share: TypeAlias = Annotated[float, Range(0)]
Rate: TypeAlias = Annotated[float, Range(1, 1e24)]  # per second

GRAVEST: tuple[Status, ...] = ("wrong", "oom", "failed", "skipped", "ok")
LEAST_TIME = 1e-12  # minimum s of a call: a time of zero has no logarithm
FIRST_CALL = 5  # multiplies the limit of a call while a kernel is built and first called, which may include compilation
LEAST_MEMORY = 200_000_000  # minimum limit in bytes; Python and torch alone take about 160 MB

# Arms that are not the user's kernels, by their names in the rounds file.
TWIN = "(aa)"  # the baseline built again, with its own buffers
ANCHOR = "(anchor)"  # work without torch: a numpy GEMM and a memory copy
GEMM = "(gemm)"  # only the matrix products, of the same shapes, in torch
COLLECTIVES = "(collectives)"  # over ranks: only the block's communication, on the same tensors, without its computing
OWN_ARMS = (TWIN, ANCHOR, GEMM, COLLECTIVES)
COMPUTE = " (compute)"  # over ranks: the suffix of an arm that is a kernel without its collectives

DISTURBANCES = frozenset({"preempted", "throttled", "stolen"})  # flags of a block that other work disturbed
# Flags of a block on one thread: the thread's processor time in its calls, in s; the processor time of other threads as
# a share of it, if that matters; the lower quartile of the seconds per call.
THREAD, OTHER_THREADS, QUARTILE = "thread", "others", "quartile"
CORE_WAIT = "waited"  # flag of a preempted block: the s for which its threads waited for a core
# Flags of a block on a GPU: another stream was still working when the timed stream had finished; the seconds that the
# host took to launch the block's calls.
OTHER_STREAM, HOST_SECONDS = "other-stream", "host"

# Arms of --by-step: the whole block, which is their baseline, and single steps, named `step gate` and so on.
BLOCK, STEP = "block", "step "
MODEL = "model"  # the baseline of --in-model: the whole model with its own FFNs


@dataclass(frozen=True)
class Case:
    """One point of the grid. `cache` is the requested mode; the mode that was used is in the result
    (`TimedUnit.cache`).

    `source` is the text as typed, `spec` is the block that it describes, and `label` is the block's unique name in
    results. The weights are random, because time does not depend on them.

    `routing` is how an MoE block's tokens are spread over its experts: `uniform`, `zipf:1.2`, `text` or a saved trace;
    if empty, the router decides. `input` is a file of real x; if empty, x is normally distributed random numbers. The
    fields ending in `_sha256` are the digests of both files.

    `ranks` is how the block is split over processes; `threads` is the number of threads in each process.
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
        """The split over ranks, as in results: `tp2`; empty on one rank."""
        return str(self.ranks) if self.ranks.world_size > 1 else ""

    @property
    def of_rank(self) -> "Case":
        """The case that one rank runs: with all tokens or, with expert parallelism, with its part of the tokens."""
        return self if self.ranks.ep == 1 else replace(self, tokens=self.tokens // self.ranks.ep)

    @property
    def data(self) -> tuple[str, ...]:
        """The data that is not random, in words: `routing zipf:1.2`, `input x.safetensors`."""
        texts = {"routing": self.routing, "input": self.input}
        return tuple(f"{name} {text}" for name, text in texts.items() if text)


@dataclass(frozen=True)
class Method:
    """How to measure. Times are in seconds.

    `precision` is the requested half-width of a ratio's interval; `max_time` limits the measuring time of one case over
    all processes; `margin` separates `same` from `faster` and `slower`.
    """

    processes: Annotated[int, Range(1, 1000)] = 5
    precision: Above = 0.01
    max_time: Time = 20.0
    margin: Share = 0.02
    placements: Positive = 3  # minimum in each process
    rounds: Positive = 4  # minimum in each placement
    block: Time | None = None  # minimum; None: 2 ms on a CPU, 1 ms on a GPU
    seed: Annotated[int, Range(0, 2**63 - 1)] = 0
    allocator: Literal["fixed", "system"] = "fixed"
    math_mode: Literal["highest", "high", "medium"] = "highest"  # torch's float32 matmul precision
    sustained: bool = False
    by_step: bool = False
    in_model: bool = False
    launch: Launch = "auto"  # how a GPU's calls are launched: replayed from CUDA graphs, or one by one
    load_time: Time = 180.0  # maximum for loading a user's file, which may compile a C++ extension
    call_time: Time | None = None  # maximum for a call (times FIRST_CALL for the first); None: by the block's size
    memory_limit: Positive | None = None  # maximum bytes of a worker; None: most of the free memory
    calibrate: Calibrate = "quick"  # the kernels that `auto` tries: only kernels that need no compilation, or all
    isolate: bool = False  # workers give up rights that they do not need (system/isolation.py)

    def refereed_apart(self, case: Case) -> bool:
        """Return True if a separate process computes the reference results of a case. This is so if processes can be
        forked, except on a GPU, with --by-step and with --in-model."""
        return sys.platform.startswith("linux") and case.device == "cpu" and not (self.by_step or self.in_model)


@dataclass(frozen=True)
class Stage:
    """What a worker is doing in a case, and with which kernel; `kernel` is empty for no kernel, or for all kernels one
    after the other."""

    process: int
    case: Case
    doing: Doing = "starting"
    kernel: str = ""


@dataclass(frozen=True)
class Job:
    """The job of one worker process: every case with every kernel.

    `gone` holds (case key, outcome) for kernels that are not run on that case again: they have ended a worker, or are
    slow and their verdict is certain. `plain` holds (case key, reason) for cases that an earlier worker could not
    replay from CUDA graphs. `chosen` holds (case key, name, kernel) for names that stand for `auto`, with the kernel
    that an earlier worker chose.
    """

    process: int
    cases: tuple[Case, ...]
    kernels: tuple[KernelChoice, ...]
    baseline: str | None
    method: Method
    gone: "tuple[tuple[str, Outcome], ...]" = ()
    plain: tuple[tuple[str, str], ...] = ()
    chosen: tuple[tuple[str, str, str], ...] = ()

    def chosen_in(self, case: Case) -> dict[str, str]:
        """Return a mapping from each name that stands for `auto` to the kernel chosen for this case."""
        return {name: kernel for key, name, kernel in self.chosen if key == case.key}

    def gone_in(self, case: Case) -> "dict[str, Outcome]":
        """Return the outcomes of the kernels that are not run on this case."""
        return {outcome.kernel: outcome for key, outcome in self.gone if key == case.key}

    @property
    def ranks(self) -> Ranks:
        """The ranks over which all cases split their blocks."""
        return self.cases[0].ranks if self.cases else Ranks()

    @property
    def wanted_baseline(self) -> str:
        """The requested baseline, or else `eager` if it is measured; otherwise empty: not yet known."""
        if self.baseline is not None:
            return self.baseline
        return "eager" if any(choice.label == "eager" for choice in self.kernels) else ""


@dataclass(frozen=True)
class TimedBlock:
    """`inner` calls of one arm, timed together. `seconds` is the time of all calls.

    `flags` are as in the rounds file: `preempted`, `throttled`, `stolen`, and values such as `faults=12` (page faults
    in the block).
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
        """Seconds per call."""
        return self.seconds / self.inner

    def figure(self, name: str) -> float | None:
        """Return the value of the flag `name=value`, or None if the block has no such flag."""
        values = (flag.partition("=")[2] for flag in self.flags if flag.startswith(f"{name}="))
        return next(map(float, values), None)


@dataclass(frozen=True)
class Outcome:
    """The outcome of one kernel of a case in one process; errors are relative to float64 on the same rounded inputs.

    `error_max` = max|a−b| / max|b|, `error_rel` = ‖a−b‖ / ‖b‖. `compile_s` is the seconds that its build took, if it
    needs compilation. A kernel whose status is not ok in some process gets no time in the result. `computes` is the
    number format that the kernel declares (empty: the case's dtype). `chosen` is the kernel that `auto` stands for.

    In a model, `error_max` is the largest error over its FFNs, `logits_error` is the error of the logits relative to
    the unchanged model, and `logits_limit` is the error that rounding may cause. `ended_worker` is true if the kernel
    crashed its worker, or the worker was killed because of the kernel.
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
    """The referee's finding about one kernel in a case, which the referee itself sends to the worker's parent.

    `outcome` is `wrong` or, if every answer was right, `ok`. `answers` counts the outputs that were checked in full;
    `samples` counts the samples of timed calls that the referee received.
    """

    outcome: Outcome
    answers: Count = 0
    samples: Count = 0


@dataclass(frozen=True)
class CaseReport:
    """The referee's findings on one case, on its kernels and on TWIN, the baseline's copy."""

    case: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class Roof:
    """The limits of this machine, measured in the same process: the best GEMM of any shape, and the best memory
    bandwidth of copies and reads. `llc_bytes` is the size of the last-level cache: memory bandwidth does not limit
    work on data that fits into it."""

    flops_per_s: Rate | None = None
    bytes_per_s: Rate | None = None
    llc_bytes: Count | None = None


@dataclass(frozen=True)
class TimedUnit:
    """One case as measured by one process: the smallest piece of finished work.

    `environment` holds the machine and the versions, by the names of the CSV columns. `spent` holds the seconds of
    preparation (start, verification, warm-up), of timed blocks with their lead-in, and of everything else. `launch` is
    how a GPU's calls were launched, `graphs` or `plain`; it is empty on a CPU, and if nothing was timed.
    `plain_because` is the reason why the calls could not be captured, if graphs were suitable for the case.

    With a prescribed routing, `tokens_per_expert` is the number of tokens that each expert received, and
    `experts_touched` the number of experts that received at least one token, both averaged over calls.

    `referee` is where the reference results were computed: in a separate process, which reported its own findings, or
    in the worker. `isolated` is how its worker was isolated; empty if it was not.
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
    isolated: str = ""


def model_with(label: str) -> str:
    """Return the name in results of a model with this kernel in place of its FFNs."""
    return f"{MODEL}+{label}"


def not_captured(why: str) -> str:
    """Return the text of a note about an arm that CUDA graphs cannot capture."""
    return f"cannot be captured: {why}"
