"""`ffn compare`: compares checkpoints, results, or two traces, or plots the sweep of one result."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ffncli.bench.comparison import (
    CompareQuestion,
    compare_results,
    compared_checkpoints,
    history_of,
    kind_of,
    paths_of,
    sides,
)
from ffncli.bench.judge.curves import SpeedPoint, SpeedSweep, require_sweeps
from ffncli.bench.results.csv_file import is_results, read_rows
from ffncli.cli.common.options import OutputOptions, PlotOptions, prompt_text
from ffncli.cli.common.result_lines import interval
from ffncli.cli.common.spread import spread
from ffncli.cli.common.sweep_page import speed_plots
from ffncli.cli.compare.history_page import failure as failure_of_history
from ffncli.cli.compare.history_page import history_answer, history_plots
from ffncli.cli.compare.results_page import answer, failure, not_gated, open_question
from ffncli.errors import ExitCode, FFNError, option, shown
from ffncli.options.accept import listed
from ffncli.options.conflicts import given
from ffncli.options.opt import Opt, Options
from ffncli.show.color import progress
from ffncli.show.output import Output
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.text import finite, in_percent, plural

if TYPE_CHECKING:
    from ffncli.run.corpus.compare_routes import RoutesComparison
    from ffncli.run.saved.compare import TensorRow, TraceComparison
    from ffncli.run.saved.saved import Saved

_SWEEP_COLUMNS = ("axis", "size", "kernel", "baseline", "speed", "speed_low", "speed_high", "verdict", "block", "where")
_SPEED = {
    "speed": "the baseline's time divided by the kernel's in the same rounds: 1.25 is a quarter faster; speed_low to"
    " speed_high is its 95 % confidence interval"
}


@dataclass(frozen=True, kw_only=True)
class VerdictOptions(Options):
    """Additional conditions for the exit code."""

    strict: Annotated[
        bool, Opt("--strict", group="Results of ffn bench", daily=True, help="Exit 4 if a row is inconclusive.")
    ] = False


@spread
def command(*, question: CompareQuestion, verdict: VerdictOptions, plot: PlotOptions, show: OutputOptions) -> None:
    """Compare two checkpoints (what was done to one?), two results of ffn bench, two saved traces, or two files of
    routes. Exit 1 if they differ, or if a kernel fails --fail-if-slower. With --history, show many results over time;
    with --plot, draw the sweep of one.

    Examples:
      ffn compare ./base ./tuned --expect finetuned        # two checkpoints
      ffn compare main.csv branch.csv --fail-if-slower 3%  # two results
      ffn compare --history 'results/*.csv'                # many results
      ffn compare base.npz new.npz                         # two traces, or routes
    """
    output = show.output()
    plot.check(show.force, show.out)
    if question.history is not None:
        _show_history(question, plot, output)
        return
    options = [name for name in given(question, verdict) if name not in ("base", "new")]
    if plot.wanted:
        _plot(question, options, plot, output)
        return
    kind = kind_of(question, options)
    if kind == "a checkpoint":
        _compare_checkpoints(question, output, show)
        return
    base, new = sides(question)
    if kind == "routes":
        _compare_routes(base[0], new[0], output)
        return
    if kind == "a saved trace":
        _compare_traces(base[0], new[0], question.tolerance, output)
        return
    comparison = compare_results(base, new, question.rules)
    failed = failure(comparison) if question.fail_if_slower is not None else ""
    undecided = open_question(comparison) if verdict.strict else ""
    error_follows = _same_screen(output) and bool(failed or undecided)
    output.show(answer(base, new, comparison, output.format, verdict=not error_follows))
    # If the results are not comparable, the page's verdict already says that nothing was gated.
    if (left := not_gated(comparison)) and comparison.comparable:
        output.note(left)
    if failed:
        raise FFNError(failed, code=ExitCode.FAILED)
    if undecided:
        narrower = "measure with more --processes to narrow the intervals"
        hint = narrower if comparison.inconclusive else "measure all cases of BASE"
        raise FFNError(undecided, hint, ExitCode.INCONCLUSIVE)


def _same_screen(output: Output) -> bool:
    """Return True if page and error appear on the same terminal, so that the page can leave out the error's message."""
    return output.path is None and all(stream and stream.isatty() for stream in (sys.stdout, sys.stderr))


# --- many results -----------------------------------------------------------------------------------------------------


def _show_history(question: CompareQuestion, plot: PlotOptions, output: Output) -> None:
    """Show all results as lines over time. Raises FFNError (exit 1) if a line's last change is a slowdown of more than
    --fail-if-slower."""
    history = history_of(question)
    failed = failure_of_history(history)
    answer = history_answer(history, verdict=not (failed and _same_screen(output)))
    output.show(plot.extended(answer, history_plots(history), output))
    if failed:
        raise FFNError(failed, code=ExitCode.FAILED)


# --- the sweep of one result ------------------------------------------------------------------------------------------


def _plot(question: CompareQuestion, options: Sequence[str], plot: PlotOptions, output: Output) -> None:
    """Plot the sweeps of one result. Raises FFNError for two sides, and for options that compare two sides."""
    if question.base is None or question.new is not None:
        raise FFNError(f"{option('plot')} draws one result of ffn bench", "leave out NEW")
    paths = paths_of(listed(question.base))
    if not all(map(is_results, paths)):
        name = shown(",".join(listed(question.base)), 200)
        raise FFNError(f"{name} is not a result of ffn bench", f"{option('plot')} draws only those")
    if options:
        raise FFNError(f"{option(options[0])} compares two files", "add NEW, or leave out the option")
    sweeps = require_sweeps([row for path in paths for row in read_rows(path)])
    output.show(plot.extended(sweep_answer(paths, sweeps), speed_plots(sweeps), output))


def sweep_answer(paths: Sequence[Path], sweeps: Sequence[SpeedSweep]) -> Answer:
    """Build the answer: the sweeps in JSON, one row per size and kernel in CSV."""
    name = ",".join(map(str, paths))
    rows = [
        (one.axis, point.size, curve.kernel, one.baseline, point.speed, point.speed_low, point.speed_high,
         point.verdict, one.block, one.where)
        for one in sweeps for curve in one.curves for point in curve.points
    ]  # fmt: skip
    parts: list[Part] = []
    for one in sweeps:
        remark = ", ".join(filter(None, (one.block, one.where)))
        parts += [Heading(f"speed against {one.baseline}", remark), _sweep_table(one)]
    if any(row[7] == "inconclusive" for row in rows):
        parts.append(Line("?: inconclusive", quiet=True))
    body = {"base": name, "sweeps": [asdict(one) for one in sweeps]}
    return Answer("compare", body, Table(_SWEEP_COLUMNS, rows), parts, _SPEED)


def _sweep_table(sweep: SpeedSweep) -> Table:
    """Show one line per size and one column per kernel; the baseline has no column, since its speed is always 1."""
    curves = [curve for curve in sweep.curves if curve.kernel != sweep.baseline]
    points = {(curve.kernel, point.size): point for curve in curves for point in curve.points}
    sizes = sorted({point.size for curve in sweep.curves for point in curve.points})
    rows = [(size, *(_speed(points.get((curve.kernel, size))) for curve in curves)) for size in sizes]
    return Table((sweep.axis, *(curve.kernel for curve in curves)), rows, side_by_side=True)


def _speed(point: SpeedPoint | None) -> str | None:
    """Return text such as `1.25 [1.22, 1.28]`, with `?` if the verdict is inconclusive."""
    if point is None:
        return None
    ends = interval(point.speed_low, point.speed_high)
    return f"{point.speed:.3f}{ends}{' ?' if point.verdict == 'inconclusive' else ''}"


# --- two checkpoints --------------------------------------------------------------------------------------------------


def _compare_checkpoints(question: CompareQuestion, output: Output, show: OutputOptions) -> None:
    """Show what was done to a checkpoint. Raises FFNError (exit 1) if it is not what was expected or allowed."""
    from ffncli.cli.compare.checkpoints_page import checkpoints_answer

    if isinstance(question.prompt, str):
        question = replace(question, prompt=prompt_text(question.prompt))
    bar = partial(progress, what="values", quiet=output.quiet, color=show.color_choice())
    result = compared_checkpoints(question, note=output.note, bar=bar)
    output.notes(*result.notes)
    output.show(checkpoints_answer(result, result.passed or not _same_screen(output)), result.first.detail)
    if not result.passed:
        expected = "" if question.expect is None else f"expected {question.expect}, found {result.first.finding}: "
        raise FFNError(f"{expected}{result.first.detail}", code=ExitCode.FAILED)


# --- two traces -------------------------------------------------------------------------------------------------------


def _compare_traces(base: Path, new: Path, tolerance: float | None, output: Output) -> None:
    """Show where two traces first differ, and why. Raises FFNError (exit 1) if they differ. Needs torch."""
    from ffncli.run.saved.compare import compare
    from ffncli.run.saved.saved import open_saved

    saved = [open_saved(path) for path in (base, new)]
    comparison = compare(saved[0], saved[1], tolerance)
    output.show(traces_answer(saved[0], saved[1], comparison, verdict=not _same_screen(output)))
    if comparison.first is not None:
        raise FFNError(verdict_of(comparison.row(comparison.first)), "; ".join(comparison.causes), ExitCode.FAILED)


def traces_answer(base: Saved, new: Saved, comparison: TraceComparison, verdict: bool = True) -> Answer:
    """Return the comparison as JSON, as CSV (one row per step, then per weight) and as a page.

    Without `verdict` the page omits which step differs first and why, because the error message contains it.
    """
    from ffncli.run.saved.compare import CONVENTIONS

    body = {"base": base.where, "new": new.where, **asdict(comparison)}
    columns = tuple(f.name for f in fields(comparison.rows[0]))
    every = [*comparison.rows, *comparison.weights]
    rows = Table(columns, [tuple(getattr(row, name) for name in columns) for row in every])
    parts: list[Part] = [Heading(f"{base.where} against {new.where}", "BASE is the reference")]
    parts += [Line(f"{m.field}: {m.base} in BASE, {m.new} in NEW", quiet=True) for m in comparison.mismatches]
    parts.append(_steps_table(comparison.rows, "step", comparison.first))
    if comparison.weights:
        parts.append(_steps_table(comparison.weights, "weight", None))
    if comparison.first is None:
        back = sum(row.op == "gradient" for row in comparison.rows)
        gradients = f" and {back} gradients" if back else ""
        parts.append(Heading(f"all {len(comparison.rows) - back} steps{gradients} agree"))
        if other := [row.step for row in comparison.weights if not row.agrees]:
            parts.append(Line(f"though weights differ: {', '.join(other)}"))
    elif verdict:
        parts.append(Heading(verdict_of(comparison.row(comparison.first))))
        parts += [Line(cause) for cause in comparison.causes]
    return Answer("compare", body, rows, parts, CONVENTIONS)


def _steps_table(rows: tuple[TensorRow, ...], first_column: str, first: str | None) -> Table:
    columns = (first_column, "max error", "relative", "ulps", "worst element", "base", "new", "ok")
    cells = [
        (row.step, row.max_error, finite(row.relative_error), row.ulps, row.worst, row.base, row.new, row.agrees)
        for row in rows
    ]
    return Table(columns, cells, emphasis=frozenset(at for at, row in enumerate(rows) if row.step == first))


def verdict_of(row: TensorRow) -> str:
    """Return text such as `up differs first: up[0,3] is 1.5 in BASE, 1.25 in NEW ...`."""
    at = f"{row.step} differs first: {row.worst} is {row.base!r} in BASE, {row.new!r} in NEW"
    if row.nonfinite:
        return f"{at} ({row.nonfinite:,} values are finite in only one trace)"
    if finite(row.relative_error) is None:
        return f"{at}; the whole step is 0 in BASE, so there is no relative error"
    near = row.base is not None and row.new is not None and abs(row.new - row.base) <= abs(row.base)
    ulps = (
        f", {row.ulps:.4g} ulps of {row.dtype}" if near and row.ulps is not None else ""
    )  # if the values are far apart, ulps are meaningless
    return f"{at}; relative error {row.relative_error:.3g} > {row.tolerance:g}{ulps}"


# --- two files of routes ----------------------------------------------------------------------------------------------


def _compare_routes(base: Path, new: Path, output: Output) -> None:
    """Show which tokens went to other experts. Raises FFNError (exit 1) if any did. Needs torch."""
    from ffncli.run.corpus.compare_routes import compare_routes
    from ffncli.run.corpus.routes import read_routes

    both = [read_routes(path) for path in (base, new)]
    for note in dict.fromkeys(note for routes in both for note in routes.notes):
        output.note(note)
    comparison = compare_routes(*both)
    output.show(routes_answer(comparison))
    if comparison.tokens_touched:
        raise FFNError(_routes_verdict(comparison), code=ExitCode.FAILED)


def routes_answer(comparison: RoutesComparison) -> Answer:
    """Return the comparison as JSON, as CSV (a row per layer) and as a page with the flips by the widest margin."""
    from ffncli.run.corpus.compare_routes import CONVENTIONS

    rows = [asdict(row) for row in comparison.rows]
    csv = Table(tuple(rows[0]), [tuple(row.values()) for row in rows])
    columns = (
        "layer",
        "tokens",
        "flips",
        "%",
        "tokens touched",
        "median margin",
        "largest",
        "weights differ",
        "ids replayed",
    )
    cells = [
        (str(r.layer), r.tokens, r.flips, in_percent(r.flips / r.choices if r.choices else None), r.tokens_touched,
         r.median_margin, r.largest_margin, r.weights_error, r.ids_replayed_error)
        for r in comparison.rows
    ]  # fmt: skip
    parts: list[Part] = [Heading(f"{comparison.base} against {comparison.new}", "BASE is the reference")]
    parts += [Line(text, quiet=True) for text in comparison.mismatches]
    parts.append(Table(columns, cells))
    if any(row.ids_replayed_error is not None for row in comparison.rows):
        left = "ids replayed: what is left of the weights' difference if NEW takes BASE's experts"
        parts.append(Line(f"{left}; with BASE's weights, nothing", quiet=True))
    if padding := max(row.padding for row in comparison.rows):
        parts.append(Line(f"up to {padding:,} tokens of a layer have no choices in one of the files", quiet=True))
    if comparison.flips:
        widest = sorted(comparison.flips, key=lambda f: -max(f.margin_base or 0.0, f.margin_new or 0.0))[:_MOST_FLIPS]
        names = ("layer", "token", "BASE", "NEW", "margin in BASE", "margin in NEW")
        flips = [(str(f.layer), f.token, f.base_expert, f.new_expert, f.margin_base, f.margin_new) for f in widest]
        parts.append(Table(names, flips, "Choices that differ, the widest margins first"))
    parts.append(Heading(_routes_verdict(comparison)))
    return Answer("compare", asdict(comparison), csv, parts, CONVENTIONS)


_MOST_FLIPS = 8


def _routes_verdict(comparison: RoutesComparison) -> str:
    flips, choices = sum(row.flips for row in comparison.rows), sum(row.choices for row in comparison.rows)
    if not comparison.tokens_touched:
        return f"all {choices:,} choices of {len(comparison.rows)} {plural('layer', len(comparison.rows))} agree"
    touched = f"{comparison.tokens_touched:,} of {comparison.tokens:,} tokens"
    return f"{flips:,} of {choices:,} choices differ, at {touched}"
