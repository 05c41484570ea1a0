"""`ffn compare`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ffncli.cli.common.option import option
from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.parsers import from_zero
from ffncli.cli.common.plot_options import PlotOptions
from ffncli.cli.common.spread import spread
from ffncli.cli.compare.options import CompareResultOptions
from ffncli.errors import ExitCode, FFNError, shown
from ffncli.show.output import Output

Base = Annotated[
    str, typer.Argument(metavar="BASE", help="Results of ffn bench (one or several: a.csv,b.csv), or a saved trace.")
]
New = Annotated[
    str | None,
    typer.Argument(metavar="NEW", help="The same kind of file, compared against BASE. With --plot BASE can be alone."),
]
Tolerance = Annotated[
    float | None,
    option(
        "Saved traces", "--tolerance", metavar="X", parser=from_zero("--tolerance"), daily=True,
        help="Largest relative error allowed. [default: by dtype, such as 1e-5 for fp32 and 1e-2 for bf16]",
    ),
]  # fmt: skip


@spread
def command(
    *,
    base: Base,
    new: New = None,
    results: CompareResultOptions,
    tolerance: Tolerance = None,
    plot: PlotOptions,
    show: OutputOptions,
) -> None:
    """Compare two results of ffn bench, or two saved traces: what changed, and with what certainty. Exit 1 if
    the traces differ, or if a kernel fails --fail-if-slower. With --plot, draw the sweep of one result.

    Examples:
      ffn compare main.csv branch.csv
      ffn compare main.csv branch.csv --fail-if-slower 3%  # a gate for CI
      ffn compare main.csv branch.csv --format md          # for a pull request
      ffn compare base.npz new.npz                         # two traces
    """
    output = show.output()
    plot.check(show.force, show.out)
    if new is None:
        _alone(base, results, tolerance, plot, output)
        return
    if plot.wanted:
        raise FFNError("--plot draws one result of ffn bench", "leave out NEW")
    sides = [_files(text, (base, new)) for text in (base, new)]
    from ffncli.bench.comparison import are_results

    if are_results(sides):
        if tolerance is not None:
            raise FFNError("--tolerance is for saved traces", "for results, --margin sets what counts as the same")
        _results(sides[0], sides[1], results, output)
    else:
        if option := results.first_set():
            raise FFNError(f"{option} is for results of ffn bench", "two saved traces are compared within --tolerance")
        _traces(sides[0], sides[1], tolerance, output)


def _alone(
    base: str, options: CompareResultOptions, tolerance: float | None, plot: PlotOptions, output: Output
) -> None:
    """The sweeps of one result, drawn. Raises FFNError if there is no second file and no plot is requested."""
    if not plot.wanted:
        raise FFNError("Missing argument 'NEW'", "give two files, or one result of ffn bench with --plot")
    paths = _files(base, (base,))
    from ffncli.bench.results.csv_file import is_results

    if not all(map(is_results, paths)):
        raise FFNError(f"{shown(base, 200)} is not a result of ffn bench", "--plot draws those alone")
    if option := options.first_set() or ("--tolerance" if tolerance is not None else ""):
        raise FFNError(f"{option} compares two files", "give NEW too, or leave it out")
    from ffncli.bench.judge.curves import require_sweeps
    from ffncli.bench.results.csv_file import read_rows
    from ffncli.cli.common.speed_plots import speed_plots
    from ffncli.cli.compare.sweep_page import answer

    sweeps = require_sweeps([row for path in paths for row in read_rows(path)])
    output.show(plot.extended(answer(paths, sweeps), speed_plots(sweeps), output))


def _results(base: Sequence[Path], new: Sequence[Path], options: CompareResultOptions, output: Output) -> None:
    from ffncli.bench.comparison import compare_results
    from ffncli.cli.compare.results_page import answer, failure, not_gated, open_question

    comparison = compare_results(base, new, options.rules())
    failed = failure(comparison) if options.fail_if_slower is not None else ""
    open_ = open_question(comparison) if options.strict else ""
    output.show(answer(base, new, comparison, output.format, verdict=not (_same_screen(output) and (failed or open_))))
    if (left := not_gated(comparison)) and comparison.comparable:  # otherwise the page's verdict says so
        output.note(left)
    if failed:
        raise FFNError(failed, code=ExitCode.FAILED)
    if open_:
        raise FFNError(open_, "more --processes narrow the intervals", ExitCode.INCONCLUSIVE)


def _traces(base: Sequence[Path], new: Sequence[Path], tolerance: float | None, output: Output) -> None:
    # From here on torch is needed.
    from ffncli.cli.compare.traces_page import answer, verdict_of
    from ffncli.run.saved.compare import compare
    from ffncli.run.saved.saved import open_saved

    saved = [open_saved(paths[0]) for paths in (base, new)]
    comparison = compare(saved[0], saved[1], tolerance)
    output.show(answer(saved[0], saved[1], comparison, verdict=not _same_screen(output)))
    if comparison.first is not None:
        raise FFNError(verdict_of(comparison.row(comparison.first)), "; ".join(comparison.causes), ExitCode.FAILED)


def _same_screen(output: Output) -> bool:
    """Whether page and error appear below each other, so that the page can leave out the error's text."""
    return output.path is None and all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))


def _files(text: str, both: Sequence[str]) -> tuple[Path, ...]:
    """The files of a side: one, or a comma-separated list. Raises FFNError for names that are not files."""
    whole = Path(os.path.expanduser(text))
    if os.path.isfile(whole):
        return (whole,)
    names = text.split(",")
    paths = tuple(Path(os.path.expanduser(name)) for name in names)
    missing = [name for name, path in zip(names, paths, strict=True) if not name or not os.path.isfile(path)]
    if missing and _are_activations(both):
        raise FFNError("ffn compare compares files", f"did you mean `ffn activations {' '.join(both)}`?")
    if missing:
        what = "is not a file" if os.path.exists(os.path.expanduser(missing[0])) else "does not exist"
        hint = "make results with ffn bench --save FILE.csv, a trace with ffn trace --save FILE"
        raise FFNError(f"{shown(missing[0], 200)} {what}", hint)
    return paths


def _are_activations(names: Sequence[str]) -> bool:
    from ffncli.block.activations import known_names

    return all(name.lower().replace("-", "_") in known_names() for name in names)
