"""`ffn approximate`: its rows as JSON, CSV and readable tables, and as curves of error against width."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.cli.common.options import OutputOptions, PlotOptions
from ffncli.cli.common.spread import spread
from ffncli.errors import Terminated
from ffncli.run.approximate.question import CONVENTIONS, TARGETS, FitQuestion, cases
from ffncli.run.engine.threads import set_threads
from ffncli.show.color import progress
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.plots.plot import Plot, Series
from ffncli.show.text import plural

if TYPE_CHECKING:
    from ffncli.run.approximate.approximate import Fit, FitRow, Overfitting


@spread
def command(*, question: FitQuestion, plot: PlotOptions, show: OutputOptions) -> None:
    """Train blocks of growing width to fit a function; show the error.

    Examples:
      ffn approximate --target sin --d-ff 1,4,16            # error by width
      ffn approximate --target abs --activation relu,gelu   # error by activation
      ffn approximate --noise 0.3 --d-ff 1x,4x,8x           # when it overfits
      ffn approximate --activation swiglu --d-ff 8 --plot   # the curves
    """
    output = show.output()
    plot.check(show.force, show.out)
    planned = cases(question)
    finished: list[Fit] = []
    stopped: BaseException | None = None
    try:
        with progress(len(planned) * question.steps, "training", show.quiet, show.color_choice()) as advance:
            set_threads()
            from ffncli.run.approximate.approximate import fits  # torch

            # adds the fits one by one, so that an interruption keeps the finished fits
            finished.extend(fits(question, planned, advance))
    except (KeyboardInterrupt, Terminated) as signal:  # show the finished rows before stopping
        if not finished:
            raise
        stopped = signal
        output.note(f"stopped: {len(finished)} of {len(planned)} rows are finished")
    rows = [fit.row for fit in finished]
    if lost := sum(row.diverged for row in rows):
        output.note(f"{lost} of {len(rows) * question.seeds} training runs diverged and are left out")
    page = answer(question, rows, len(planned), _overfitting(question, rows))
    output.show(plot.extended(page, plots(rows), output))
    if stopped:
        raise stopped


def _overfitting(question: FitQuestion, rows: Sequence[FitRow]) -> list[Overfitting]:
    """Return the verdicts on blocks that were fitted to noisy samples."""
    from ffncli.run.approximate.approximate import overfitting  # imports torch, which fitting has already loaded

    return overfitting(rows) if question.noise else []


def answer(question: FitQuestion, rows: Sequence[FitRow], planned: int, noisy: Sequence[Overfitting] = ()) -> Answer:
    """Build the answer: a row per block, the number of `planned` rows, verdicts on `noisy` fits."""
    targets = list(dict.fromkeys(row.target for row in rows))
    about = [_about(question, name) for name in targets]
    body: dict[str, Any] = {
        "targets": about, "seeds": question.seeds, "seed": question.seed, "steps": question.steps,
        "noise": question.noise, "rows_asked": planned, "complete": len(rows) == planned,
        "rows": [asdict(row) for row in rows], "overfitting": [asdict(one) for one in noisy],
    }  # fmt: skip
    names = tuple(body["rows"][0]) if rows else ()
    table = Table(names, [tuple(asdict(row).values()) for row in rows])
    parts: list[Part] = []
    for one in about:
        parts += _target(question, one, [row for row in rows if row.target == one["name"]], noisy)
    return Answer("approximate", body, table, parts, CONVENTIONS)


def plots(rows: Sequence[FitRow]) -> list[Plot]:
    """Plot error against width, one plot per target: the best seed's error, or with noise the median held-out error."""
    out = []
    for target in dict.fromkeys(row.target for row in rows):
        of_target = [row for row in rows if row.target == target]
        noisy = bool(of_target[0].noise)
        curves: dict[str, list[tuple[float, float]]] = {}
        for row in of_target:
            point = (float(row.d_ff_plain), _height(row.median_rmse if noisy else row.rmse))
            curves.setdefault(row.activation, []).append(point)
        lines = [Series(name, sorted(points)) for name, points in curves.items()]
        widths = [row.d_ff_plain for row in of_target]
        lines.append(
            Series(
                _straight(TARGETS[target].inputs),
                [(min(widths), _height(of_target[0].floor)), (max(widths), _height(of_target[0].floor))],
            )
        )
        y = "median held-out rmse" if noisy else "rmse of the best seed"
        x = "d_ff" + (" (gated: d_ff of the plain block of equal size)" if any(r.gated for r in of_target) else "")
        out.append(Plot(f"{target}: error against width", x, y, lines, log_x=True, log_y=True, marks=True))
    return out


def _straight(inputs: int) -> str:
    return "best line" if inputs == 1 else "best plane"


def _height(value: float | None) -> float:
    """Return a height for a log axis: NaN for an error of 0, which is not drawn."""
    return value if value else math.nan


def _about(question: FitQuestion, name: str) -> dict[str, Any]:
    target = TARGETS[name]
    return {"name": name, "formula": target.formula, "inputs": target.inputs, "domain": question.domain_of(target),
            "samples": question.samples_of(target)}  # fmt: skip


# --- tables -----------------------------------------------------------------------------------------------------------


def _target(
    question: FitQuestion, about: dict[str, Any], rows: Sequence[FitRow], overfitting: Sequence[Overfitting]
) -> list[Part]:
    """Show one target: its definition, one row per block, the same errors side by side, and verdicts on overfitting."""
    low, high = about["domain"]
    inputs = "a and b" if about["inputs"] == 2 else "x"
    where = f"{inputs} in [{', '.join(_ends(low, high))}], {about['samples']:,} samples"
    where += f" with noise {question.noise:g}" if question.noise else ""
    parts: list[Part] = [Heading(f"{about['name']}: {about['formula']}", f"{where}, {_counted(question.seeds)}")]
    parts.append(_errors(rows, _straight(about["inputs"]), bool(question.noise)))
    if any(row.gated and row.d_ff != row.d_ff_plain for row in rows):
        parts.append(Line("for: the plain width with the nearest number of parameters", quiet=True))
    verdicts = [one for one in overfitting if one.target == about["name"]]
    if not verdicts:
        return [*parts, *_summary(rows)]
    wider = sum(one.overfits for one in verdicts)
    return [
        *parts, *_summary(rows), Heading("Does a wider block overfit?", f"{wider} of {len(verdicts)} activations"),
        *(Line(_overfitting_text(one)) for one in verdicts),
    ]  # fmt: skip


def _overfitting_text(one: Overfitting) -> str:
    least = f"{one.activation}: held-out error is least at d_ff {one.best_d_ff:,} ({one.best_rmse:.3g})"
    if one.wider_d_ff is None or one.wider_rmse is None:
        return f"{least}, the widest: no overfitting"
    times = f"{one.wider_rmse / one.best_rmse:.2f} times that at d_ff {one.wider_d_ff:,}"
    if one.overfits:
        return f"{least} and {times}: overfits"
    if one.rises:
        return f"{least} and {times}, but it fits its samples no better: badly trained, not overfitting"
    return f"{least} and {times}: no notable overfitting"


def _ends(low: float, high: float) -> tuple[str, str]:
    """Format the ends of the domain with four digits, or as many as are needed to distinguish them."""
    for digits in range(4, 18):
        ends = f"{low:.{digits}g}", f"{high:.{digits}g}"
        if max(abs(float(ends[0]) - low), abs(float(ends[1]) - high)) <= 1e-3 * (high - low):
            break
    return ends


def _counted(seeds: int) -> str:
    return f"{seeds} {plural('seed', seeds)}"


def _width(row: FitRow, gated: bool) -> tuple[int | str, ...]:
    """Return d_ff and, in tables with gated blocks, the plain width that corresponds to it."""
    return (row.d_ff, row.d_ff_plain if row.gated else "") if gated else (row.d_ff,)


def _errors(rows: Sequence[FitRow], line: str, noisy: bool) -> Table:
    """Return the errors of each block; the last column, with the heading `line`, is the error of the best line or
    plane."""
    title = "rmse and max error of the best seed, median rmse over seeds"
    names, errors = ("rmse", "median", "max error"), [(r.rmse, r.median_rmse, r.max_error) for r in rows]
    if noisy:
        title = "rmse: medians over seeds, on the noisy samples and held out without noise"
        names, errors = ("train", "held-out", "best"), [(r.train_rmse, r.held_out_rmse, r.rmse) for r in rows]
    gated = any(row.gated for row in rows)
    columns = ("activation", "d_ff", *(("for",) if gated else ()), "params", *names, line)
    lines = [(r.activation, *_width(r, gated), r.params, *of, r.floor) for r, of in zip(rows, errors, strict=True)]
    return Table(columns, lines, title)


def _summary(rows: Sequence[FitRow]) -> list[Part]:
    """Tabulate errors by activation and width, if there are several of both."""
    widths = list(dict.fromkeys(row.d_ff_plain for row in rows))
    names = list(dict.fromkeys(row.activation for row in rows))
    if len(widths) < 2 or len(names) < 2:
        return []
    noisy = bool(rows[0].noise)
    errors = {(r.activation, r.d_ff_plain): r.median_rmse if noisy else r.rmse for r in rows}
    lines = [(name, *(errors.get((name, width)) for width in widths)) for name in names]
    title = f"{'median held-out' if noisy else 'best'} rmse by d_ff"
    return [Table((" ", *(f"{width:,}" for width in widths)), lines, title)]
