"""`ffn bench`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from typer import Exit

from ffncli.bench.benchmark import BenchQuestion
from ffncli.bench.records import Method
from ffncli.bench.request.grid import BenchRequest, build_request, require_resumable
from ffncli.bench.request.machines import GridPart, LauncherChoice
from ffncli.bench.request.options import (
    KernelOptions,
    LauncherOptions,
    MethodOptions,
    ParallelOptions,
    ResultOptions,
    SuiteOptions,
    certificate_files,
    require_compatible,
)
from ffncli.block.shard import Ranks
from ffncli.cli.common.options import OutputOptions, PlotOptions
from ffncli.cli.common.spread import spread
from ffncli.errors import ExitCode, FFNError, Terminated, shown_path
from ffncli.models.dimensions import Dimensions
from ffncli.options.accept import listed
from ffncli.options.conflicts import given
from ffncli.options.opt import Opt, Options, options_of
from ffncli.run.ranks.environment import require_ranks, split_asked_for, torchrun
from ffncli.run.user.time_limit import set_load_time
from ffncli.show.output import Output
from ffncli.show.parts import Answer
from ffncli.show.text import plural
from ffncli.system.packages import require_installed

if TYPE_CHECKING:
    from ffncli.bench.results.journal import Journal
    from ffncli.bench.results.row import ResultRow
    from ffncli.bench.suite import Result

# for `ffn bench` without options: about 30 s
FIRST_LOOK = Method(processes=3, precision=0.03, max_time=12.0)
_SHORT = "a first look, shorter than other runs; for a longer run: ffn bench --max-time 60s"
_ASKED = (  # the options that a run's journal stores, in this order
    *options_of(Dimensions), "tokens", "batch", "seq_len", "dtype", "passes", "cache", "device", "threads", "routing",
    "input", *options_of(KernelOptions), *options_of(ParallelOptions), *options_of(MethodOptions), "source", "suite",
)  # fmt: skip


_ListKernels = Annotated[
    bool,
    Opt(
        "--list-kernels",
        group="What to measure",
        help="List the built-in kernels: how each computes the block, its dtypes, devices and needs.",
    ),
]


@spread
def command(
    *,
    list_kernels: _ListKernels = False,
    question: BenchQuestion,
    split: ParallelOptions,
    method: MethodOptions,
    result: ResultOptions,
    public: SuiteOptions,
    launcher: LauncherOptions,
    plot: PlotOptions,
    show: OutputOptions,
) -> None:
    """Verify kernels, then time them: ratios that anyone can reproduce.

    Examples:
      ffn bench 512x2048:swiglu --quick                  # the built-in kernels
      ffn bench 512x2048:swiglu -k eager,mine.py:mlp     # your kernel
      ffn bench llama-2-7b -n 1,32 --shard 1/2           # half of a grid
      ffn bench --save new.csv                           # for ffn compare
    """
    output = show.output()
    set_load_time(method.load_time)  # limits loading SOURCE; the parent limits a worker's loading
    path, cluster = result.resume, launcher.cluster
    extra = {"plot": plot.plot, "plot_file": plot.plot_file, "list_kernels": list_kernels}
    require_compatible(question, split, result, public, launcher, extra)
    if list_kernels:
        require_installed("torch")
        from ffncli.cli.bench.page import kernels_answer
        from ffncli.kernels import kernel_list

        output.show(kernels_answer(kernel_list(*listed(question.device)[:1])))
        return
    if public.admit is not None:
        _admit(Path(os.path.expanduser(public.admit)), public.suite or "", output)
        return
    plot.check(show.force, show.out)
    if cluster is None and path is None:
        require_installed("torch", "numpy")  # before the note on where results go
    place = torchrun()
    if result.selftest:
        _selftest(question, method.method_over(Method(processes=4, max_time=10.0)), output)
        return
    if cluster is not None and place is not None:
        raise FFNError("--launcher contradicts torchrun", "a slot measures on one rank; submit torchrun yourself")
    ranks = split_asked_for(split.tp, split.ep) if path is None else None  # a resumed run has its own ranks
    if place is not None and not place.first:
        from ffncli.bench.rank_launches import follow_ranks

        raise Exit(follow_ranks(place))
    if path is not None:
        _resume(Path(os.path.expanduser(path)), asked(question, split), result, cluster, plot, output)
        return
    request, notes = _requested(question, split, ranks, result, cluster)
    require_ranks(ranks)
    _begin(request, notes, question, plot, show, output)


def asked(*records: Options) -> dict[str, str]:
    """Return a run's options as its journal stores them: a dict from each option to its value as a string."""
    options, names = given(*records), {"passes": "pass"}
    return {f"--{names.get(n, n).replace('_', '-')}": _text_of(options[n]) for n in _ASKED if n in options}


def _text_of(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(word.strip() for part in value for word in _text_of(part).split(","))
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def _requested(
    question: BenchQuestion, split: ParallelOptions, ranks: Ranks | None, result: ResultOptions,
    cluster: LauncherChoice | None,
) -> tuple[BenchRequest, tuple[str, ...]]:  # fmt: skip
    """Return (the request of a new run, notes on it). Without any option the run is a quick first look."""
    options = asked(question, split)
    first_look = not options and not given(result)
    more: dict[str, Any] = {
        "fail_if_slower": result.fail_if_slower, "strict": result.strict, "asked": options,
        "certificates": certificate_files(result.certificate), "cluster": cluster,
    }  # fmt: skip
    kernels = listed(question.kernel)
    if question.suite is None:
        how = FIRST_LOOK if first_look else question.method_over()
        grid = replace(question, ranks=ranks or Ranks())
        request, notes = build_request(grid, kernels, question.baseline, how, **more)
    else:
        from ffncli.bench.request.suite import public_suite, suite_request, track_of

        suite, track = public_suite(question.suite), track_of(listed(question.device))
        request, notes = suite_request(suite, track, kernels, question.method_over(suite.method(track)), **more)
    return request, (*((_SHORT,) if first_look else ()), *notes)


def _begin(
    request: BenchRequest, notes: Sequence[str], question: BenchQuestion, plot: PlotOptions, show: OutputOptions,
    output: Output,
) -> None:  # fmt: skip
    """Start a new run of all cases, or of the part that --shard names."""
    from ffncli.bench.suite import default_path, new_run

    part = question.part
    target = default_path(part) if question.save is None else Path(os.path.expanduser(question.save))
    with new_run(target, request, show.force, part) as journal:
        if part is not None:
            output.note(_part_note(part, len(journal.request.cases), len(request.cases)))
        output.notes(*notes, f"results go to {shown_path(target)}")
        _measure(journal, journal.request, plot, output)


def _admit(path: Path, suite: str, output: Output) -> None:
    """Show which conditions a result meets. Raises FFNError (exit 1) if it does not meet all of them."""
    from ffncli.bench.public.admission import admit
    from ffncli.cli.bench.page import admission_answer, refused_admission

    require_installed("torch", "numpy")
    admission = admit(path, suite)
    output.show(admission_answer(admission))
    if problem := refused_admission(admission):
        raise problem


def _selftest(question: BenchQuestion, how: Method, output: Output) -> None:
    """Measure known differences and show whether the gate detects them. Raises FFNError (exit 1) if it does not."""
    from ffncli.bench.selftest import selftest, selftest_request
    from ffncli.cli.bench.page import failed_selftest, selftest_answer
    from ffncli.cli.bench.progress import unit_progress

    request = selftest_request(question, how)
    with unit_progress(request, 0, output) as shown:
        outcome = selftest(request, shown)
    output.show(selftest_answer(outcome))
    if problem := failed_selftest(outcome):
        raise problem


def _part_note(part: GridPart, cases: int, all_cases: int) -> str:
    """Return text such as `part 3/8: 8 of 60 cases`."""
    if not cases:
        return f"part {part} has no cases: the {all_cases} {plural('case', all_cases)} of the grid went to other parts"
    return f"part {part}: {cases} of {all_cases} {plural('case', all_cases)}"


def _resume(
    path: Path,
    options: dict[str, str],
    result: ResultOptions,
    cluster: LauncherChoice | None,
    plot: PlotOptions,
    output: Output,
) -> None:
    """Continue a run. An option that is given again must have the same value as when the run started; only the options
    for the gate and the machines may change."""
    from ffncli.bench.suite import resumed

    with resumed(path) as journal:
        stored = journal.request
        for option, value in options.items():
            if stored.asked.get(option) != value:
                before = stored.asked.get(option)
                why = f"the run began with {before}" if before else "the run began without it"
                name = "SOURCE" if option == "--source" else option
                raise FFNError(f"{name} {value} cannot be resumed: {why}", "leave it out: --resume FILE is enough")
        gate = stored.fail_if_slower if result.fail_if_slower is None else result.fail_if_slower
        if cluster is not None and stored.cluster is None:
            raise FFNError("--launcher cannot be resumed: the run began on this machine", "leave it out")
        if stored.cluster is not None and torchrun() is not None:
            raise FFNError("a run with --launcher cannot be resumed under torchrun", "resume it without torchrun")
        require_ranks(split_asked_for(stored.ranks.tp, stored.ranks.ep))
        judged = replace(stored, fail_if_slower=gate, strict=stored.strict or result.strict)
        request = journal.request = replace(judged, cluster=cluster or stored.cluster)
        require_resumable(request, {"plot": plot.plot, "plot_file": plot.plot_file})
        output.note(f"{journal.count} of {request.units} units are already finished")
        _measure(journal, request, plot, output)


def _measure(journal: Journal, request: BenchRequest, plot: PlotOptions, output: Output) -> None:
    """Run the remaining units, show all results, and raise the FFNError that sets the exit code."""
    from ffncli.bench.rank_launches import lead_ranks
    from ffncli.bench.suite import run
    from ffncli.cli.bench.progress import unit_progress

    if request.cluster is not None:
        _show(_measure_elsewhere(journal, request, output), journal, request, plot, output)
        return
    require_installed("torch", "numpy")
    with lead_ranks(request, torchrun()) as launches:
        with _kept(journal, request, output), unit_progress(request, journal.count, output) as shown:
            finished = run(journal, shown, launches=launches)
        _show(finished, journal, request, plot, output)


def _show(finished: Result, journal: Journal, request: BenchRequest, plot: PlotOptions, output: Output) -> None:
    """Show the results, and raise the FFNError that sets the exit code."""
    from ffncli.bench.judge.gate import failure, gated
    from ffncli.cli.bench.page import answer

    judged = gated(finished.rows, request)
    page = answer(finished.rows, request, judged, journal.files, journal.spent)
    if output.format == "html":
        from ffncli.pages.results import results_parts

        page = replace(page, pages=lambda: [results_parts(Path(journal.files.csv), "run")])
    output.show(_with_plots(page, finished.rows, plot, output) if plot.wanted else page)
    if problem := failure(finished.rows, request, judged):
        raise problem


def _measure_elsewhere(journal: Journal, request: BenchRequest, output: Output) -> Result:
    """Run the remaining units on the machines of a launcher."""
    from ffncli.bench.launchers.deal import run_on_cluster
    from ffncli.cli.bench.progress import cluster_progress

    with _kept(journal, request, output), cluster_progress(request, output) as shown:
        return run_on_cluster(journal, shown)


def _with_plots(page: Answer, rows: Sequence[ResultRow], plot: PlotOptions, output: Output) -> Answer:
    """Add the ratios' intervals as bars, and plots of speed against the swept size. A plot file contains these plots,
    or the intervals if no size was swept. If nothing was timed, print a note."""
    from ffncli.bench.judge.curves import speed_sweeps
    from ffncli.bench.results.plots import ratio_plot
    from ffncli.cli.common.sweep_page import ratio_bars, speed_plots

    sweeps = speed_sweeps(rows)
    page = replace(page, parts=[*page.parts, *ratio_bars(rows)]) if plot.plot else page
    if not sweeps and not ratio_bars(rows):
        output.note("nothing to plot: no ratio was measured")
        return page
    return plot.extended(page, speed_plots(sweeps), output, [] if sweeps else ratio_plot(rows))


@contextmanager
def _kept(journal: Journal, request: BenchRequest, output: Output) -> Iterator[None]:
    """Report which results are kept if a run ends early: in the error, or in a note if torchrun's agent reports the
    error."""

    def kept() -> str:
        if not journal.count:
            return "nothing was finished"
        if not journal.files.journal.exists():
            return "nothing is kept: its files were removed while it ran"
        name = shown_path(journal.files.csv)
        return f"{journal.count} of {request.units} units kept in {name}; resume with `ffn bench --resume {name}`"

    try:
        yield
    except (KeyboardInterrupt, Terminated) as stop:
        place = torchrun()
        if place is not None and place.has_agent:
            output.note(kept())
            raise
        interrupted = isinstance(stop, KeyboardInterrupt)
        what, code = ("interrupted", ExitCode.INTERRUPTED) if interrupted else ("terminated", ExitCode.TERMINATED)
        raise FFNError(f"{what}: {kept()}", code=code) from None
    except FFNError as error:
        if not journal.count:
            raise
        raise FFNError(error.message, "; ".join(filter(None, (error.hint, kept()))), error.code) from None
