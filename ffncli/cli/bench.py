"""`ffn bench`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ffncli.bench.grid import Grid, Request, cases
from ffncli.bench.journal import Journal
from ffncli.bench.named import named
from ffncli.bench.records import BLOCK, Case
from ffncli.cli.bench_options import GridOptions, MethodOptions, ResultOptions, asked, words
from ffncli.cli.options import BenchSource, DimensionOptions, OutputOptions, TokenListOptions, spread
from ffncli.errors import ExitCode, FFNError, Terminated, shown_path
from ffncli.show.output import Output
from ffncli.show.text import plural


@spread
def command(
    *,
    source: BenchSource = None,
    dimensions: DimensionOptions,
    tokens: TokenListOptions,
    grid: GridOptions,
    method: MethodOptions,
    result: ResultOptions,
    show: OutputOptions,
) -> None:
    """Verify, then time kernels: ratios that anyone can reproduce.

    Try: ffn bench, ffn bench llama-2-7b --tokens 1,32 --dtype bf16, ffn bench 512x2048:swiglu --kernel mine.py:mlp
    """
    output = show.output()
    given = asked([dimensions, tokens, grid, method], {"source": source})
    if method.selftest:
        from ffncli.cli.bench_selftest import selftest

        selftest(_selftested(source, dimensions, tokens, grid, method, result), output)
        return
    path = result.resumed()
    if path is not None:
        _resume(path, given, result, output)
        return
    request, notes = _request(source, dimensions, tokens, grid, method, result, given)
    from ffncli.bench.suite import begun, default_path

    target = default_path() if result.save is None else Path(result.save).expanduser()
    with begun(target, request, show.force) as journal:
        output.notes(*notes, f"results go to {shown_path(target)}")
        _measure(journal, request, output)


def _request(
    source: str | None,
    dimensions: DimensionOptions,
    tokens: TokenListOptions,
    grid: GridOptions,
    method: MethodOptions,
    result: ResultOptions,
    given: dict[str, str],
) -> tuple[Request, tuple[str, ...]]:
    """(what the options ask for, defaults filled in, what is to be said of it). Raises FFNError for what cannot be."""
    chosen = method.method()
    if chosen.by_step and (grid.kernel or grid.baseline):
        raise FFNError("--by-step contradicts --kernel and --baseline", "it times steps, not kernels")
    if chosen.by_step and (chosen.sustained or set(words(grid.passes)) - {"forward"}):
        raise FFNError("--by-step times the forward pass, in short blocks", "leave out --pass and --sustained")
    kernels = named(grid.kernel, grid.baseline) if not chosen.by_step else named(["eager"], None)
    devices = words(grid.device) or (_default_device(),)
    _demand_gpu(devices, chosen.sustained)
    wanted = Grid(
        source, dimensions.dimensions(), tokens.numbers(), words(grid.dtype), words(grid.passes), words(grid.cache),
        devices, grid.threads or (), chosen.seed,
    )  # fmt: skip
    notes = list(kernels.notes)
    found = cases(wanted, notes.append)
    if chosen.by_step:
        kernels = replace(kernels, names=(BLOCK,), baseline=BLOCK)
    request = Request(found, kernels.texts, kernels.names, kernels.baseline, chosen, result.fail_if_slower,
                      result.strict, given, kernels.files, os.getcwd())  # fmt: skip
    _demand_gate(request)
    return request, tuple(notes)


def _demand_gate(request: Request) -> None:
    """Raises FFNError for a gate that could never fail."""
    if request.fail_if_slower is None:
        return
    if request.method.by_step:
        raise FFNError("--by-step contradicts --fail-if-slower", "it times steps, not kernels")
    if request.method.processes == 1:
        raise FFNError("--fail-if-slower needs several --processes", "one process says nothing about the next")


def _resume(path: Path, given: dict[str, str], result: ResultOptions, output: Output) -> None:
    """Go on; options that were given must be those that the run began with, but for what judges it."""
    from ffncli.bench.suite import resumed

    with resumed(path) as journal:
        stored = journal.request
        for option, value in given.items():
            if stored.asked.get(option) != value:
                was = stored.asked.get(option)
                said = f"the run began with {was}" if was else "the run began without it"
                name = "SOURCE" if option == "--source" else option
                raise FFNError(f"{name} {value} cannot be resumed: {said}", "leave it out: --resume FILE alone goes on")
        gate = stored.fail_if_slower if result.fail_if_slower is None else result.fail_if_slower
        request = replace(stored, fail_if_slower=gate, strict=stored.strict or result.strict)
        _demand_gate(request)
        output.note(f"{journal.count} of {request.units} units are there already")
        _measure(journal, request, output)


def _measure(journal: Journal, request: Request, output: Output) -> None:
    """Run what is left, show all of it, and raise what the exit code says."""
    from ffncli.bench.suite import run
    from ffncli.cli.bench_page import answer, failure, gated

    with _kept(journal, request), told(request, journal.count, output) as tell:
        found = run(journal, tell)
    judged = gated(found.rows, request)
    output.show(answer(found.rows, request, judged, journal.files, journal.spent))
    if problem := failure(found.rows, request, judged):
        raise problem


@contextmanager
def _kept(journal: Journal, request: Request) -> Iterator[None]:
    """Says what is kept when a run ends before its time."""

    def kept() -> str:
        if not journal.count:
            return "nothing was finished"
        name = shown_path(journal.files.csv)
        return f"{journal.count} of {request.units} units kept in {name}; resume with `ffn bench --resume {name}`"

    try:
        yield
    except KeyboardInterrupt:
        raise FFNError(f"interrupted: {kept()}", code=ExitCode.INTERRUPTED) from None
    except Terminated:
        raise FFNError(f"terminated: {kept()}", code=ExitCode.TERMINATED) from None
    except FFNError as error:
        if not journal.count:
            raise
        raise FFNError(error.message, "; ".join(filter(None, (error.hint, kept()))), error.code) from None


@contextmanager
def told(request: Request, done: int, output: Output) -> Iterator[Callable[[int, Case], None]]:
    """Progress: a bar with the time left in a terminal, else a line now and then. Yields what is told of units."""
    from time import monotonic

    from ffncli.show.output import print_error
    from ffncli.show.progress import progress, seconds_text, shows_bar

    longest = len(request.cases) * request.method.max_time + request.method.processes * 5
    if longest > 60 and not done:
        counted = f"{len(request.cases)} {plural('case', len(request.cases))}"
        most = f"at most about {seconds_text(longest)}, less where --precision is reached"
        output.note(f"{counted} in {request.method.processes} processes: {most}")
    count, begun, step = done, monotonic(), max(1, request.units // 10)
    bar = shows_bar(output.quiet)
    with progress(request.units, "measuring", output.quiet, output.color) as advance:
        advance(done)

        def tell(process: int, case: Case) -> None:
            nonlocal count
            count += 1
            advance(1)
            if not (bar or output.quiet) and (count % step == 0 or count == request.units):
                left = (monotonic() - begun) / (count - done) * (request.units - count)
                print_error(
                    f"process {process + 1} of {request.method.processes}, {count} of {request.units} units done"
                    + (f", about {seconds_text(left)} left" if count < request.units else "")
                )

        yield tell


def _selftested(
    source: str | None,
    dimensions: DimensionOptions,
    tokens: TokenListOptions,
    grid: GridOptions,
    method: MethodOptions,
    result: ResultOptions,
) -> Request:
    """The question whose answer is known: eager, the same once more, and the same slower by 5 %."""
    if set(words(grid.passes)) - {"forward"}:
        raise FFNError("--selftest slows the forward pass, and times no other", "leave out --pass")
    if grid.kernel or grid.baseline or result != ResultOptions() or method.by_step:
        raise FFNError("--selftest brings its own kernels, and writes no results", "leave the other options out")
    kernels = named(["eager", "again=slowed:1:eager", "slowed=slowed:1.05:eager"], "eager")
    chosen = method.method()
    if method.processes is None and not method.quick:
        chosen = replace(chosen, processes=4)
    if chosen.processes == 1:
        raise FFNError("--selftest needs several --processes", "one process says nothing about the next")
    if method.max_time is None:
        chosen = replace(chosen, max_time=10.0)
    devices = words(grid.device) or (_default_device(),)
    _demand_gpu(devices, chosen.sustained)
    threads = grid.threads or (1,)
    wanted = Grid(
        source, dimensions.dimensions(), tokens.numbers(), words(grid.dtype), words(grid.passes), words(grid.cache),
        devices, threads, chosen.seed,
    )  # fmt: skip
    return Request(cases(wanted), kernels.texts, kernels.names, "eager", chosen, 0.02)


# --- GPUs -------------------------------------------------------------------------------------------------------------


def _driver() -> bool:
    """Whether anything says that there may be a GPU: only then is torch worth asking."""
    return sys.platform == "win32" or any(
        Path(name).exists() for name in ("/dev/nvidia0", "/proc/driver/nvidia/version", "/dev/dxg", "/dev/kfd")
    )


def _default_device() -> str:
    """A GPU where torch has one, else the CPU."""
    if not _driver():
        return "cpu"
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _demand_gpu(devices: tuple[str, ...], sustained: bool) -> None:
    """Raises FFNError (exit 3) for a GPU that is not there."""
    if sustained and not any(device.startswith("cuda") for device in devices):
        raise FFNError("--sustained needs --device cuda", "a CPU's blocks are long enough for its clock")
    if any(device.startswith("cuda") for device in devices) and not _driver():
        raise FFNError("--device cuda: there is no GPU here (no driver)", "use --device cpu", ExitCode.ENVIRONMENT)
