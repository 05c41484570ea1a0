"""Plots in a file, drawn by matplotlib: equal plots give equal bytes."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ffncli.errors import ExitCode, FFNError, clean
from ffncli.show.plots.plot import AnyPlot, IntervalPlot, MapPlot, Plot, Series, axis
from ffncli.system.files import written_whole
from ffncli.system.packages import extra_command

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

SUFFIXES = (".svg", ".png", ".pdf")
NEEDS = extra_command("plots")
_SIZE = (8.0, 4.2)  # inches, for one plot
_LARGEST = 1e300  # matplotlib's arithmetic overflows beyond this
# Okabe and Ito's colours, which can be told apart with any colour vision, and dashes that work without colour.
_COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9", "#7F7F7F")
_DASHES = (
    "-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (10, 3)), (0, (3, 1, 1, 1, 1, 1)), (0, (1, 4)), (0, (2, 2)),
)  # fmt: skip
_MARKS = "os^DvPX*"
# Text stays text in SVG, so that browsers can search it; names are not parsed as formulas; files contain no date and no
# version.
_STYLE = {
    "svg.fonttype": "none", "svg.hashsalt": "ffn", "pdf.fonttype": 42, "text.parse_math": False,
    "font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": "0.92",
}  # fmt: skip
_UNSIGNED: dict[str, dict[str, Any]] = {
    "svg": {"Date": None, "Creator": None},
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}


def write(path: Path, plots: Sequence[AnyPlot]) -> None:
    """Draw the plots, one below the other, into one SVG, PNG or PDF file, as its suffix says; the file is complete or
    absent.

    Raises FFNError (exit 3) if matplotlib is missing, or if the file cannot be written.
    """
    kind = path.suffix[1:].lower()
    picture = drawn(plots, kind)
    with written_whole(path) as file:
        file.write(picture)


def drawn(plots: Sequence[AnyPlot], kind: str) -> bytes:
    """Return the file's bytes; `kind` is svg, png or pdf. Raises FFNError (exit 3) if matplotlib is missing."""
    return _saved(figure(plots), kind)


@contextmanager
def _styled() -> Iterator[None]:
    from matplotlib import style

    with style.context(["default", _STYLE]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks become boxes, without a warning
        yield


def figure(plots: Sequence[AnyPlot]) -> Figure:
    """Return a matplotlib figure of the plots, one below the other, which a notebook shows. Raises FFNError (exit 3) if
    matplotlib is missing."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise FFNError("a picture needs matplotlib", NEEDS, ExitCode.ENVIRONMENT) from None
    heights = [_height(plot) for plot in plots] or [_SIZE[1]]
    with _styled():
        out = Figure((_SIZE[0], sum(heights)), dpi=150, layout="constrained")
        _fill(out, plots, heights)
    # Without pyplot, a notebook would show no more than the figure's size.
    out._repr_png_ = lambda: _saved(out, "png")  # type: ignore[attr-defined]
    return out


def _saved(picture: Figure, kind: str) -> bytes:
    out = io.BytesIO()
    with _styled():
        picture.savefig(out, format=kind, metadata=_UNSIGNED[kind])
    return out.getvalue()


def _height(plot: AnyPlot) -> float:
    if isinstance(plot, MapPlot):
        return 1.4 + 0.2 * len(plot.names)
    return _SIZE[1] if isinstance(plot, Plot) else 1.3 + 0.3 * len(plot.rows)


def _fill(figure: Figure, plots: Sequence[AnyPlot], heights: Sequence[float]) -> None:
    places = figure.add_gridspec(max(1, len(plots)), 1, height_ratios=heights)
    for at, plot in enumerate(plots):
        axes = figure.add_subplot(places[at])
        if isinstance(plot, IntervalPlot):
            _intervals(axes, plot)
            continue
        if isinstance(plot, MapPlot):
            _map(axes, plot)
            continue
        for curve, line in enumerate(plot.lines):
            x, y = _drawable(line, plot)
            lone = "o" if sum(map(math.isfinite, y)) == 1 else ""  # a curve of a single point has no line
            mark = _MARKS[curve % len(_MARKS)] if plot.marks and not line.level else lone
            turn = curve // len(_COLORS)  # the ninth curve repeats the first colour with another dash pattern
            dashes = _DASHES[(curve + turn) % len(_DASHES)]
            color = _COLORS[curve % len(_COLORS)]
            axes.plot(x, y, label=clean(line.name), color=color, linestyle=dashes, marker=mark, markersize=5)
            for place, (low, high) in zip(x, line.intervals, strict=False):
                if _fits(low, plot.log_y) and _fits(high, plot.log_y):  # NaN means that the end is unknown
                    ends = [place, place], [low, high]
                    axes.plot(*ends, color=color, linewidth=1.2, marker="_", markersize=7, alpha=0.6)
        axes.set(title=clean(plot.title), xlabel=clean(plot.x), ylabel=clean(plot.y))
        _scale(axes, plot)
        if plot.lines:
            axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, handlelength=3.5)


def _map(axes: Axes, plot: MapPlot) -> None:
    """Draw a heat map in the colours of a page, whose depth is the square root of the size."""
    from matplotlib.colors import FuncNorm, LinearSegmentedColormap

    depth = FuncNorm((_root, lambda share: share * abs(share)), -plot.limit, plot.limit)
    shades = LinearSegmentedColormap.from_list("signs", ["#a8480f", "#ffffff", "#0b57d0"])
    shades.set_bad("#c800a0")
    picture = axes.imshow(plot.cells, cmap=shades, norm=depth, aspect="auto", interpolation="nearest")
    ticks = [-plot.limit, 0, plot.limit]
    axes.figure.colorbar(picture, ax=axes, ticks=ticks, format=lambda value, _: f"{value:.4g}")
    axes.set_yticks(range(len(plot.names)), [clean(name) for name in plot.names])
    axes.grid(visible=False)
    axes.set(title=clean(plot.title), xlabel=clean(plot.x), ylabel=clean(plot.y))


def _root(values: Any) -> Any:
    return (abs(values) ** 0.5) * ((values > 0) * 2 - 1)


def _intervals(axes: Axes, plot: IntervalPlot) -> None:
    """Draw one row per interval, the first at the top: a dot at the value, a line from end to end."""
    rows = [row for row in plot.rows if _fits(row.value, log=True)]
    for at, row in enumerate(rows):
        ends = [end for end in (row.low, row.high) if end is not None and _fits(end, log=True)]
        if len(ends) == 2:
            axes.plot(ends, [at, at], color=_COLORS[0], linewidth=1.6, marker="|", markersize=9)
        axes.plot([row.value], [at], color=_COLORS[0], marker="o", markersize=6)
    axes.axvline(1, color="0.4", linewidth=1, linestyle="--", zorder=0)
    axes.set_yticks(range(len(rows)), [clean(row.name) for row in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set(title=clean(plot.title), xlabel=clean(plot.x), xscale="log")
    every = [end for row in rows for end in (row.value, row.low, row.high, 1.0) if end is not None]
    axes.set_xticks(*_log_ticks([end for end in every if _fits(end, log=True)]))
    axes.minorticks_off()


def _drawable(line: Series, plot: Plot) -> tuple[list[float], list[float]]:
    """Return the points, with NaN for values that cannot be drawn, such as very large ones."""
    points = [(x, y) if _fits(x, plot.log_x) and _fits(y, plot.log_y) else (math.nan, math.nan) for x, y in line.points]
    return [x for x, _ in points], [y for _, y in points]


def _fits(value: float, log: bool) -> bool:
    return abs(value) <= _LARGEST and (value > 0 or not log)


def _log_ticks(values: Sequence[float]) -> tuple[list[float], list[str]]:
    """Return the ticks of a log axis and their labels, the same as in a terminal."""
    place = axis(values, log=True)
    ticks = place.ticks(8) if place else []
    return [10 ** (place.low + share * (place.high - place.low)) for share, _ in ticks if place], [t for _, t in ticks]


def _scale(axes: Axes, plot: Plot) -> None:
    """Set log scales, the plot's frame, ticks at measured points, and lines at zero if zero is inside the frame."""
    drawn = [_drawable(line, plot) for line in plot.lines]
    xs, ys = [x for some, _ in drawn for x in some], [y for _, some in drawn for y in some]
    if plot.log_x:
        axes.set_xscale("log")
        axes.set_xticks(*_log_ticks(xs))
    if plot.log_y:
        axes.set_yscale("log")
        axes.set_yticks(*_log_ticks(ys))
    axes.minorticks_off()
    if plot.frame:
        low, high = plot.frame
        room = 0.03 * (high - low) if not plot.log_y else 0.0
        axes.set_ylim(low - room, high + room)
    measured = sorted({x for x in xs if math.isfinite(x)})
    if plot.marks and 0 < len(measured) <= 16:
        axes.set_xticks(measured, [f"{x:g}" for x in measured])
    if not plot.log_y and axes.get_ylim()[0] < 0 < axes.get_ylim()[1]:
        axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    if not plot.log_x and axes.get_xlim()[0] < 0 < axes.get_xlim()[1]:
        axes.axvline(0, color="0.6", linewidth=0.8, zorder=0)
