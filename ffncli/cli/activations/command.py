"""`ffn activations`: the command, checks that exit with 1, and plots of curves, slopes and differences."""

import math
from collections.abc import Sequence
from dataclasses import replace

from ffncli.block.analysis.curve import curve, samples
from ffncli.block.analysis.difference import minus
from ffncli.block.analysis.gated import UNITS
from ffncli.cli.activations.page import answer, excess_text, stated_value
from ffncli.cli.common.options import OutputOptions, PlotOptions, lines_note, prompt_text
from ffncli.cli.common.spread import spread
from ffncli.errors import ExitCode, FFNError, option
from ffncli.options import conflicts
from ffncli.run.activations.comparison import Comparison, compared
from ffncli.run.activations.question import CONFLICTS, DataQuestion, FunctionsQuestion, require_same_kind
from ffncli.show.output import Output
from ffncli.show.plots.plot import Plot, Series

MOST_CURVES = 8  # per frame
_LEAVES = 2.5  # times the median height: higher curves would flatten the others


@spread
def command(*, question: FunctionsQuestion, plot: PlotOptions, data: DataQuestion, show: OutputOptions) -> None:
    """Compare activations: values, slopes, bounds, differences, statistics for a normal input.

    Examples:
      ffn activations gelu silu --plot                     # values and curves
      ffn activations gelu_tanh --against gelu             # largest difference
      ffn activations swiglu --iso-params --d-model 512    # d_ff for equal size
      ffn activations --source ./my-model -p "Hello world" # on real inputs
    """
    output = show.output()
    conflicts.check(CONFLICTS, question, plot, data)
    require_same_kind(question, with_source=data.source is not None)
    if data.source is not None:
        _show_data(question, data, output)
        return
    plot.check(show.force, show.out)
    comparison = compared(question, data.device)
    page = answer(comparison)
    if plot.wanted or output.format == "html":
        names, units = question.chosen_names()
        curves = curve_plots(names, comparison.at, question.reference())
        page = plot.extended(page, [*curves, *unit_plots(units, comparison.at, comparison.ups)], output)
    output.show(page)
    _judge_differences(comparison)
    _judge_claims(comparison)


def _show_data(question: FunctionsQuestion, data: DataQuestion, output: Output) -> None:
    """Show the inputs of the model's activations, and compare the named activations with the model's own."""
    from ffncli.cli.activations.data_page import data_answer, remarks
    from ffncli.run.activations.call import activations_of

    if isinstance(data.prompt, tuple):
        raise FFNError(f"{option('prompt')} takes one prompt, got {len(data.prompt)}", "ffn trace takes several")
    if data.prompt is not None:
        typed, data = data.prompt, replace(data, prompt=prompt_text(data.prompt))
        output.notes(*lines_note(typed, str(data.prompt)))
    dtype = None if question.dtype is None else str(question.dtype)
    examined = activations_of(data, question.chosen_names()[0], dtype)
    output.notes(*remarks(examined, data))
    output.show(data_answer(examined, data))


def _judge_differences(comparison: Comparison) -> None:
    """Raise FFNError (exit 1) if a difference exceeds the tolerance; for gated units, only differences at the shown
    points count. Called after the page is shown."""
    tolerance = comparison.question.tolerance
    if tolerance is None:
        return
    over = [one.difference for one in comparison.differences if one.difference.exceeds(tolerance)]
    against, beyond = comparison.question.unit, [excess_text(one) for one in over]
    if over:
        against = over[0].against
    for one, apart in zip(comparison.unit_differences, comparison.value_differences, strict=True):
        most = max((math.inf if size != size else abs(size) for size in apart), default=0.0)
        beyond += [f"{one.name} by {most:.3g}"] if most > tolerance else []
    if beyond:
        what = f"more than {option('tolerance')} {tolerance:g} from {against}: {', '.join(beyond)}"
        raise FFNError(what, code=ExitCode.FAILED)


def _judge_claims(comparison: Comparison) -> None:
    """Raise FFNError (exit 1) if a stated value is wrong. Called after the page is shown."""
    wrong = [one for one in comparison.checked if not one.right]
    if wrong:
        values = ", ".join(f"{one.name}({one.x:g}) = {stated_value(one)}, not {one.text}" for one in wrong[:5])
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        many = f"{len(wrong)} of {len(comparison.checked)}"
        raise FFNError(f"{many} stated values are wrong: {values}{more}", code=ExitCode.FAILED)


# --- plots ------------------------------------------------------------------------------------------------------------


def curve_plots(names: Sequence[str], at: Sequence[float], against: str | None = None) -> list[Plot]:
    """Plot the values, then the slopes, of canonical names, between the smallest and the largest of the points `at`.

    More than 8 curves are split over several frames, both for values and for slopes. With `against`, a canonical name,
    its curve is added, and plots of the differences from it come last.
    """
    names = list(dict.fromkeys(names))
    if against:  # last, so that the other curves look the same with and without it
        names = [*(name for name in names if name != against), against]
    curves = [curve(name) for name in names]
    frames = [curves[i : i + MOST_CURVES] for i in range(0, len(curves), MOST_CURVES)]
    plots = []
    for title, y, slope in (("Values", "f(x)", False), ("Slopes", "slope of f at x", True)):
        for some in frames:
            lines = [Series(c.name, samples(c, *_span(at), slope)) for c in some]
            frame, out = _frame(lines)
            beyond = f" ({' and '.join(out)} leave{'s' * (len(out) == 1)} the frame)" if out else ""
            plots.append(Plot(title + beyond, "x", y, lines, frame=frame))
    if against:
        others = [name for name in names if name != against]
        plots += [difference_plot(others[i : i + MOST_CURVES], against, at) for i in range(0, len(others), MOST_CURVES)]
    return plots


def unit_plots(names: Sequence[str], at: Sequence[float], ups: Sequence[float]) -> list[Plot]:
    """Plot gated units against the gate, and their slopes ∂y/∂gate, for each value of up, with 8 curves per frame."""
    plots = []
    pairs = [(UNITS[name], up) for name in names for up in ups]
    for title, y, slope in (("Gated units", "y", False), ("Slopes by the gate", "∂y/∂gate", True)):
        for start in range(0, len(pairs), MOST_CURVES):
            lines = [
                Series(
                    unit.name if len(ups) == 1 else f"{unit.name} at up {up:g}",
                    samples(unit.over_gate(up), *_span(at), slope),
                )
                for unit, up in pairs[start : start + MOST_CURVES]
            ]
            plots.append(Plot(f"{title} at up = {', '.join(f'{up:g}' for up in ups)}", "gate", y, lines))
    return plots


def difference_plot(names: Sequence[str], against: str, at: Sequence[float]) -> Plot:
    """For each canonical name except `against`, plot its f(x) minus g(x), where g is `against`; the range is the same
    as in `curve_plots`."""
    other, others = curve(against), (name for name in dict.fromkeys(names) if name != against)
    lines = [Series(name, samples(minus(curve(name), other), *_span(at))) for name in others]
    return Plot(f"Difference from {against}", "x", f"f(x) - {against}(x)", lines)


def _span(at: Sequence[float]) -> tuple[float, float]:
    """Return the smallest and the largest of the points; a single point is widened by 1 to each side."""
    low, high = min(at), max(at)
    return (low, high) if low < high else (low - 1.0, high + 1.0)


def _frame(lines: Sequence[Series]) -> tuple[tuple[float, float] | None, list[str]]:
    """Return (a y-axis range that suits most curves, the few curves that leave it), or (None, [])."""
    ranges = [_range(line) for line in lines]
    heights = sorted(high - low for low, high in ranges)
    limit = _LEAVES * heights[len(heights) // 2]  # the median, which a few steep curves cannot move
    inside = [(low, high) for low, high in ranges if high - low <= limit]
    if limit == 0 or 2 * len(inside) <= len(ranges) or len(inside) == len(ranges):
        return None, []
    out = [line.name for line, (low, high) in zip(lines, ranges, strict=True) if high - low > limit]
    return (min(low for low, _ in inside), max(high for _, high in inside)), out


def _range(line: Series) -> tuple[float, float]:
    values = [y for _, y in line.points if math.isfinite(y)]
    return min(values, default=0.0), max(values, default=0.0)
