"""The options of `ffn bench` other than those that define its cases, and the rules for options that contradict or need
each other."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Any, get_args

from ffncli.bench.records import FIRST_CALL, LEAST_MEMORY, MODEL, Calibrate, Launch, Method
from ffncli.bench.request.machines import MOST_SLOTS, PART, GridPart, LauncherChoice, cluster_of
from ffncli.models.dimensions import Dimensions
from ffncli.options.accept import (
    NATURAL,
    PATH,
    PATHS,
    SECONDS,
    TEXT,
    TEXTS,
    Accepts,
    byte_count,
    choice,
    listed,
    percentage,
    several,
    whole,
)
from ffncli.options.conflicts import Conflict, check, given
from ffncli.options.opt import COMPUTE, Opt, Options, options_of
from ffncli.options.shared import ExpertParallel, TensorParallel
from ffncli.options.shared import Path as FilePath
from ffncli.show.text import bytes_text

_what = partial(Opt, group="What to measure")
_how = partial(Opt, group="How to measure")
_compute = partial(Opt, group=COMPUTE)
_result = partial(Opt, group="Checks and results")
_KERNELS = several(TEXT, "names such as 'eager' or 'mine.py:mlp'", least=0)
_QUICK: dict[str, Any] = {"processes": 3, "precision": 0.03}
_machines = partial(Opt, group="Other machines")
_suite = partial(Opt, group="Public suite")


def _memory(value: Any) -> int:
    size = byte_count(value)
    if size < LEAST_MEMORY:
        raise ValueError
    return size


Certificates = Annotated[
    FilePath | Iterable[FilePath] | None,
    _result(
        "--certificate", metavar="FILE", accepts=PATHS, repeat=True,
        help="Certificates of your kernels, from ffn verify --referee; the results refer to them.",
    ),
]  # fmt: skip
Save = Annotated[
    FilePath | None,
    _result(
        "--save", metavar="FILE.csv", accepts=PATH, daily=True,
        help="Result file. [default: in benchmarks/results/ if it exists, else your state folder]",
    ),
]  # fmt: skip
Suite = Annotated[
    str | None,
    _suite(
        "--suite", metavar="NAME", completes="suites",
        help="Measure the cases of the public suite ffn-1: 6 on a CPU, 12 with --device cuda. You choose the kernels;"
        " cases, seed and baseline are fixed.",
    ),
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class KernelOptions(Options):
    """The kernels of every case, and the part of the cases to measure."""

    kernel: Annotated[
        str | Sequence[str] | None,
        _what(
            "-k", "--kernel", metavar="NAME,...", accepts=_KERNELS, repeat=True, daily=True, completes="kernels",
            help="Kernels to time: eager, packed, ..., all, auto (the fastest here), or your [label=]file.py:name (runs"
            " that file); main:file.py:name is the file at a git commit. [default: all that need no compiling]",
        ),
    ] = None  # fmt: skip
    baseline: Annotated[
        str | None,
        _what(
            "--baseline", metavar="NAME", daily=True, completes="kernels",
            help="Kernel that the others are compared with. [default: eager, else the first]",
        ),
    ] = None  # fmt: skip
    shard: Annotated[
        str | GridPart | None,
        _what(
            "--shard", metavar="I/N", accepts=PART,
            help="Measure part I of N of the cases, as in 3/8; ffn merge joins the parts.",
        ),
    ] = None  # fmt: skip

    @property
    def part(self) -> GridPart | None:
        """The part of the cases to measure; None for all cases."""
        return self.shard if isinstance(self.shard, GridPart) else None


@dataclass(frozen=True, kw_only=True)
class ParallelOptions(Options):
    """The ranks over which every block is split."""

    tp: TensorParallel = None
    ep: ExpertParallel = None


@dataclass(frozen=True, kw_only=True)
class MethodOptions(Options):
    """How and how long to measure."""

    precision: Annotated[
        float | None,
        _how(
            "--precision", metavar="X%", accepts=percentage(0.5), daily=True,
            help="Stop a case once each ratio is known to within X%. [default: 1%]",
        ),
    ] = None  # fmt: skip
    max_time: Annotated[
        float | None,
        _how(
            "--max-time", metavar="TIME", accepts=SECONDS, daily=True,
            help="Time limit per case, as in 20s or 2m, over all processes. [default: 20s]",
        ),
    ] = None  # fmt: skip
    load_time: Annotated[
        float | None,
        _how(
            "--load-time", metavar="TIME", accepts=SECONDS,
            help="Time limit for loading your Python file. [default: 3m]",
        ),
    ] = None  # fmt: skip
    call_time: Annotated[
        float | None,
        _how(
            "--call-time", metavar="TIME", accepts=SECONDS,
            help=f"Time limit for one call of a kernel; {FIRST_CALL} times as long for the first, which may compile."
            " [default: 2m, more for large blocks]",
        ),
    ] = None  # fmt: skip
    memory_limit: Annotated[
        int | None,
        _how(
            "--memory-limit",
            metavar="SIZE",
            accepts=Accepts(f"a size from {bytes_text(LEAST_MEMORY)}, as in 512MB or 4GiB", _memory),
            help="Limit on the memory of a process that runs kernels, as in 8GB. [default: 90 % of what is free]",
        ),
    ] = None
    processes: Annotated[
        int | None,
        _how(
            "--processes", metavar="N", accepts=whole(1, 1000),
            help="Number of fresh processes; the interval is computed across them. [default: 5]",
        ),
    ] = None  # fmt: skip
    quick: Annotated[
        bool, _how("--quick", daily=True, help="Same as --processes 3 --precision 3%; either can be overridden.")
    ] = False
    seed: Annotated[
        int | None,
        _compute(
            "--seed", metavar="N", accepts=NATURAL,
            help="Seed of weights, inputs and the order of timing. [default: 0]",
        ),
    ] = None  # fmt: skip
    allocator: Annotated[
        str | None,
        _compute(
            "--allocator", metavar="NAME", accepts=choice("fixed", "system"),
            help="fixed sets malloc's thresholds, system leaves them unchanged. [default: fixed]",
        ),
    ] = None  # fmt: skip
    math_mode: Annotated[
        str | None,
        _compute(
            "--math-mode", metavar="NAME", accepts=choice("highest", "high", "medium"),
            help="Precision of float32 matmuls: highest, high or medium. [default: highest]",
        ),
    ] = None  # fmt: skip
    launch: Annotated[
        str | None,
        _how(
            "--launch", metavar="NAME", accepts=choice(*get_args(Launch)),
            help="How calls reach a GPU: graphs replays them from CUDA graphs, plain launches each call by itself."
            " [default: auto, which is graphs for small cases whose kernels can all be captured]",
        ),
    ] = None  # fmt: skip
    calibrate: Annotated[
        str | None,
        _how(
            "--calibrate", metavar="NAME", accepts=choice(*get_args(Calibrate)),
            help="How --kernel auto chooses: quick skips kernels that must compile first; full tries all."
            " [default: quick]",
        ),
    ] = None  # fmt: skip
    isolate: Annotated[
        bool,
        _how(
            "--isolate",
            help="Run kernels in processes that can write only to a folder of their own and cannot signal others"
            " (Linux).",
        ),
    ] = False
    sustained: Annotated[
        bool, _how("--sustained", help="On a GPU, also time blocks of 300 ms, at the clock speed of sustained work.")
    ] = False
    by_step: Annotated[bool, _how("--by-step", help="Time every step of the block by itself.")] = False
    in_model: Annotated[
        bool,
        _how(
            "--in-model",
            help="Time the forward pass of a whole model, whose directory is SOURCE: unchanged, and with kernels in"
            " place of its FFNs.",
        ),
    ] = False

    def method_over(self, default: Method | None = None) -> Method:
        """Return the method: options override `quick`, which overrides `default`."""
        values = {name: getattr(self, name) for name in options_of(MethodOptions) if name != "quick"}
        asked = {name: value for name, value in values.items() if value is not None and value is not False}
        return replace(default or Method(), **(_QUICK if self.quick else {}) | asked)


@dataclass(frozen=True, kw_only=True)
class ResultOptions(Options):
    """The purpose of a run, the file for the results, and the conditions under which the run fails."""

    selftest: Annotated[
        bool, _how("--selftest", help="Test the benchmark: it must detect a 5 % slowdown and raise no false alarm.")
    ] = False
    fail_if_slower: Annotated[
        float | None,
        _result(
            "--fail-if-slower", metavar="X%", accepts=percentage(10.0), daily=True,
            help="Exit 1 if a kernel is slower than the baseline by more than X%.",
        ),
    ] = None  # fmt: skip
    strict: Annotated[bool, _result("--strict", help="Exit 4 if a verdict is inconclusive.")] = False
    certificate: Certificates = None
    save: Save = None
    resume: Annotated[
        FilePath | None, _result("--resume", metavar="FILE.csv", accepts=PATH, help="Continue an interrupted run.")
    ] = None


@dataclass(frozen=True, kw_only=True)
class SuiteOptions(Options):
    """The public suite to measure, and the check of its results."""

    suite: Suite = None
    admit: Annotated[
        FilePath | None,
        _suite(
            "--admit", metavar="FILE.csv", accepts=PATH,
            help="Check whether a result meets the conditions of the suite's table, without timing anything. Exit 1 if"
            " it does not.",
        ),
    ] = None  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LauncherOptions(Options):
    """The machines that measure the cases; by default, this machine."""

    launcher: Annotated[
        str | None,
        _machines(
            "--launcher", metavar="NAME", completes="launchers",
            help="Measure on other machines, one case at a time on each: slurm submits jobs (extra slurm), ray uses a"
            " running cluster (extra ray). Needs --device and --threads.",
        ),
    ] = None  # fmt: skip
    slots: Annotated[
        int | None,
        _machines(
            "--slots", metavar="N", accepts=whole(1, MOST_SLOTS),
            help="Cases to measure at once. [default: with ray one per GPU, or per machine if --device is cpu; with"
            " slurm 16 jobs]",
        ),
    ] = None  # fmt: skip
    launcher_option: Annotated[
        str | Sequence[str] | None,
        _machines(
            "--launcher-option", metavar="K=V", accepts=TEXTS, repeat=True,
            help="Option of the launcher; repeatable. With slurm any of sbatch's, as in partition=gpu or time=60"
            " (minutes), or cluster=local to try it on this machine; with ray address=HOST:6379.",
        ),
    ] = None  # fmt: skip

    @property
    def cluster(self) -> LauncherChoice | None:
        """The requested machines, None for this one. Raises FFNError for an unknown launcher or its options."""
        return cluster_of(self.launcher, self.slots, listed(self.launcher_option))


def certificate_files(certificate: FilePath | Iterable[FilePath] | None) -> tuple[str, ...]:
    """Return the certificate files; on the command line, one string may list several, separated by commas."""
    texts = [[text] if os.path.isfile(os.path.expanduser(text)) else text.split(",") for text in listed(certificate)]
    return tuple(name.strip() for names in texts for name in names)


# --- options that contradict or need each other -----------------------------------------------------------------------
# ------------------------------------------------------------------------------

DIMENSIONS = " ".join(options_of(Dimensions))
_OF_SUITE = (  # options that leave the cases, the weights, the arithmetic and the baseline unchanged
    "kernel device shard processes precision max_time quick load_time call_time memory_limit isolate fail_if_slower"
    " strict certificate save force resume launcher slots launcher_option plot plot_file admit"
)
CONFLICTS = (
    Conflict("list_kernels", allows="device", why="it measures nothing"),
    Conflict("admit", needs="suite", why="as in ffn bench --suite ffn-1 --admit FILE.csv"),
    Conflict("admit", allows="suite", why="it measures nothing"),
    Conflict("suite", allows=_OF_SUITE, why="a suite's cases, seed and baseline are fixed: leave it out"),
    Conflict("resume", contradicts="save", why="it continues the file that it names"),
    Conflict("resume", contradicts="certificate", why="the run keeps its original certificates"),
    Conflict("slots launcher_option", needs="launcher", why="it is about other machines: name slurm or ray"),
    Conflict("selftest", contradicts="tp ep launcher", why="it tests the benchmark on one rank, on this machine"),
    Conflict("selftest", contradicts="plot plot_file", why="it has no sweep to plot"),
    Conflict(
        "selftest",
        contradicts="kernel baseline shard isolate fail_if_slower strict certificate save resume by_step in_model",
        why="it has its own kernels and writes no results",
    ),
    Conflict("selftest", contradicts="passes!=forward", why="it slows down and times only the forward pass"),
    Conflict(
        "selftest fail_if_slower",
        contradicts="processes=1",
        why="one process cannot show process-to-process variation",
    ),
    Conflict("launcher", contradicts="tp ep", why="a slot measures on one rank; submit torchrun yourself"),
    Conflict(
        "launcher", needs="threads", unless="resume",
        why="the other machines may differ from this one; a case reserves as many cores as it has threads",
    ),
    Conflict(
        "launcher", needs="device", unless="resume",
        why="the other machines may differ from this one: cpu or cuda",
    ),
    Conflict("by_step", contradicts="kernel baseline fail_if_slower plot plot_file", why="it times steps, not kernels"),
    Conflict("by_step", contradicts="sustained passes!=forward", why="it times the forward pass, in short blocks"),
    Conflict("by_step", contradicts="launch=graphs", why="steps are launched one by one"),
    Conflict("in_model", needs="source", unless="resume", why="give a directory with config.json and safetensors"),
    Conflict(
        "in_model",
        contradicts="by_step sustained launch=graphs passes!=forward cache!=warm routing input tp ep " + DIMENSIONS,
        why="it times the forward pass of a whole model as stored in its directory",
    ),
    Conflict("in_model", contradicts=f"baseline!={MODEL}", why="the baseline is the unchanged model"),
    Conflict("in_model", contradicts="plot plot_file", why="its page shows the figures"),
    Conflict(
        "tp ep",
        contradicts="by_step sustained isolate launch=graphs passes!=forward",
        why="measure it on one rank",
    ),
    Conflict("launch=graphs", contradicts="device=cpu", why="CUDA graphs are a way to launch work on a GPU"),
    Conflict("calibrate=full", needs="kernel=auto", why="it sets how auto chooses: add auto to the kernels"),
)  # fmt: skip


def require_compatible(*records: Options | Mapping[str, Any]) -> None:
    """Raise FFNError for the first rule that these options break."""
    options: dict[str, Any] = {}
    for record in records:
        options |= given(record) if isinstance(record, Options) else record
    one_rank = {name for name in ("tp", "ep") if options.get(name) == 1}
    later = {"calibrate"}  # checked once the kernels are known: it requires the kernel `auto`
    check(CONFLICTS, {name: value for name, value in options.items() if name not in one_rank | later})
