"""`ffn bench`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ffncli.bench.request.build import build_request, require_gate
from ffncli.bench.request.grid import BenchRequest
from ffncli.bench.results.journal import Journal
from ffncli.cli.bench.options import GridOptions, MethodOptions, ResultOptions, asked
from ffncli.cli.common.options import BenchSource, DimensionOptions, OutputOptions, TokenListOptions
from ffncli.cli.common.spread import spread
from ffncli.errors import ExitCode, FFNError, Terminated, shown_path
from ffncli.show.output import Output


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

    Examples:
      ffn bench 512x2048:swiglu --quick                  # the built-in kernels
      ffn bench 512x2048:swiglu -k eager,mine.py:mlp     # your kernel
      ffn bench llama-2-7b -n 1,32 --dtype bf16          # a known model
      ffn bench --save new.csv                           # for ffn compare
    """
    output = show.output()
    options = asked([dimensions, tokens, grid, method], {"source": source})
    if method.selftest:
        from ffncli.cli.bench.selftest import request_for, show_selftest

        show_selftest(request_for(grid.grid(source, dimensions, tokens), grid, method, result), output)
        return
    path = result.resumed()
    if path is not None:
        _resume(path, options, result, output)
        return
    request, notes = build_request(
        grid.grid(source, dimensions, tokens), grid.kernel, grid.baseline, method.method(),
        fail_if_slower=result.fail_if_slower, strict=result.strict, asked=options,
        certificates=result.certificates(),
    )  # fmt: skip
    from ffncli.bench.suite import begun, default_path

    target = default_path() if result.save is None else Path(result.save).expanduser()
    with begun(target, request, show.force) as journal:
        output.notes(*notes, f"results go to {shown_path(target)}")
        _measure(journal, request, output)


def _resume(path: Path, options: dict[str, str], result: ResultOptions, output: Output) -> None:
    """Go on; options that were given must be those that the run began with, but for what judges it."""
    from ffncli.bench.suite import resumed

    with resumed(path) as journal:
        stored = journal.request
        for option, value in options.items():
            if stored.asked.get(option) != value:
                before = stored.asked.get(option)
                why = f"the run began with {before}" if before else "the run began without it"
                name = "SOURCE" if option == "--source" else option
                raise FFNError(f"{name} {value} cannot be resumed: {why}", "leave it out: --resume FILE alone goes on")
        gate = stored.fail_if_slower if result.fail_if_slower is None else result.fail_if_slower
        request = replace(stored, fail_if_slower=gate, strict=stored.strict or result.strict)
        require_gate(request)
        output.note(f"{journal.count} of {request.units} units are there already")
        _measure(journal, request, output)


def _measure(journal: Journal, request: BenchRequest, output: Output) -> None:
    """Run what is left, show all of it, and raise what the exit code says."""
    from ffncli.bench.judge.failure import failure, gated
    from ffncli.bench.suite import run
    from ffncli.cli.bench.page import answer
    from ffncli.cli.bench.progress import unit_progress

    with _kept(journal, request), unit_progress(request, journal.count, output) as shown:
        finished = run(journal, shown.finished, watch=shown.at)
    judged = gated(finished.rows, request)
    output.show(answer(finished.rows, request, judged, journal.files, journal.spent))
    if problem := failure(finished.rows, request, judged):
        raise problem


@contextmanager
def _kept(journal: Journal, request: BenchRequest) -> Iterator[None]:
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
