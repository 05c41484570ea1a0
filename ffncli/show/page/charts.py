"""Charts as inline SVG: points with intervals, lines and scatter plots, on the axes of show/plots; also a block's steps
with their costs, and a histogram."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from textwrap import wrap
from xml.etree.ElementTree import Element

from ffncli.show.page.document import element
from ffncli.show.plots.plot import PlotAxis, axis

WIDTH = 760
_LONGEST_LABEL = 24  # characters left of an interval chart; a tooltip has all
_LONGEST_LINE = 66  # characters of a group's name in one line, in a phone's letters
_ROW, _TOP, _BOTTOM, _RIGHT = 24, 8, 44, 16
_NAME = 20  # height of the y axis's name
_ROOM = 0.06  # of the values' range, above and below intervals
_COLOURS = 8  # further lines repeat the colours with hollow points


@dataclass(frozen=True)
class RatioBar:
    """A row of an interval chart: `value` between `low` and `high`; `kind` is the CSS class that sets the row's colour.
    Consecutive rows of the same `group` appear below the group's name."""

    label: str
    value: float
    low: float | None
    high: float | None
    kind: str = ""
    note: str = ""
    group: str = ""


@dataclass(frozen=True)
class ChartLine:
    """A named line of points (x, y); `bars` are (low, high) of y; `dashed` marks a limit, `joined` joins the points,
    `marked` draws each point."""

    name: str
    points: Sequence[tuple[float, float]]
    bars: Sequence[tuple[float, float] | None] = ()
    dashed: bool = False
    joined: bool = True
    marked: bool = True
    labels: Sequence[str] = field(default_factory=tuple)


def intervals(rows: Sequence[RatioBar], across: str, mark: float = 1.0) -> Element:
    """Draw one row per interval, with a line at `mark`. The bars have their ends in the attributes data-low and
    data-high."""
    ends = [v for row in rows for v in (row.value, row.low, row.high, mark) if v is not None and math.isfinite(v)]
    scale = axis(ends, log=True)
    groups = {
        at: wrap(row.group, _LONGEST_LINE)
        for at, row in enumerate(rows) if row.group and (at == 0 or rows[at - 1].group != row.group)
    }  # fmt: skip
    height = _TOP + _ROW * (len(rows) + sum(map(len, groups.values()))) + _BOTTOM
    if scale is None:
        return element("p", "No ratios.")
    labels = 16.0 + 12.5 * max(
        (min(_LONGEST_LABEL, len(row.label)) for row in rows), default=0
    )  # wide enough for a phone's letters
    parts: list[Element] = _across(scale, height - _BOTTOM, across, labels)
    x = _place(scale, mark, labels)
    parts.append(element("line", x1=x, x2=x, y1=_TOP, y2=height - _BOTTOM, class_="mark"))
    line = 0
    for at, row in enumerate(rows):
        for text in groups.get(at, ()):
            parts.append(element("text", text, x=4, y=_TOP + _ROW * line + _ROW / 2 + 5, class_="label group"))
            line += 1
        y = _TOP + _ROW * line + _ROW / 2
        line += 1
        group = [element("title", f"{', '.join(filter(None, (row.group, row.label)))}: {_text(row)}")]
        group.append(element("text", _short(row.label, _LONGEST_LABEL), x=labels - 8, y=y + 4, class_="label end"))
        if row.low is not None and row.high is not None:
            x1, x2 = _place(scale, row.low, labels), _place(scale, row.high, labels)
            group.append(element("line", x1=x1, x2=x2, y1=y, y2=y, class_="bar", data_low=row.low, data_high=row.high))
        group.append(element("circle", cx=_place(scale, row.value, labels), cy=y, r=4, class_="dot"))
        parts.append(element("g", group, class_=f"interval {row.kind}".strip()))
    described = f"{len(rows)} ratios with intervals, from {_number(min(ends))} to {_number(max(ends))}"
    return _svg(parts, height, described)


def lines(
    series: Sequence[ChartLine],
    across: str,
    up: str,
    log_x: bool = True,
    log_y: bool = True,
    marks: Sequence[tuple[float, str]] = (),
) -> Element:
    """Draw lines or points over two axes, with a legend; a point's tooltip shows its values. `marks` are places on the
    axis across, each with a word."""
    xs = [x for one in series for x, _ in one.points]
    ys = [y for one in series for _, y in one.points] + [v for one in series for bar in one.bars if bar for v in bar]
    if any(one.bars for one in series) and not log_y and len(finite := [y for y in ys if math.isfinite(y)]) > 1:
        room = _ROOM * (max(finite) - min(finite))  # so that the ends of intervals are seen to be ends
        ys += [min(finite) - room, max(finite) + room]
    scale_x, scale_y = axis(xs, log_x), axis(ys, log_y)
    if scale_x is None or scale_y is None:
        return element("p", "Nothing to draw.")
    left, height = 84, 340
    parts = _across(scale_x, height - _BOTTOM, across, left, whole=all(x == round(x) for x in xs if math.isfinite(x)))
    for share, label in scale_y.ticks(7):
        y = _up(share, height)
        parts.append(element("line", x1=left, x2=WIDTH - _RIGHT, y1=y, y2=y, class_="grid"))
        parts.append(element("text", label, x=left - 6, y=y + 4, class_="label end"))
    for x, word in marks:
        across_at = f"{_place(scale_x, x, left):.2f}"
        parts.append(element("line", x1=across_at, x2=across_at, y1=_TOP, y2=height - _BOTTOM, class_="mark"))
        parts.append(element("text", word, x=across_at, y=_TOP + 12, dx=5, class_="label"))
    for at, one in enumerate(series):
        places, pieces = [], [list[str]()]  # a point that cannot be drawn interrupts the line
        for x, y in one.points:
            if math.isfinite(scale_x.share(x)) and math.isfinite(scale_y.share(y)):
                places.append((_place(scale_x, x, left), _up(scale_y.share(y), height), x, y))
                pieces[-1].append("{:.2f},{:.2f}".format(*places[-1]))
            else:
                pieces.append([])
        colour = "roof" if one.dashed else f"c{at % _COLOURS}"
        for piece in pieces if one.joined else []:
            if len(piece) > 1:
                style = f"line {colour}" + (" dashed" if one.dashed else "")
                parts.append(element("polyline", points=" ".join(piece), class_=style))
        for number, (px, py, x, y) in enumerate(places):
            bar = one.bars[number] if number < len(one.bars) else None
            if bar is not None:
                ends = [_up(scale_y.share(v), height) for v in bar]
                parts.append(element("line", x1=px, x2=px, y1=ends[0], y2=ends[1], class_=f"whisker {colour}"))
            if one.marked and not one.dashed:
                label = one.labels[number] if number < len(one.labels) else one.name
                title = element("title", f"{label}: {_number(x)}, {_number(y)}")
                place = {"cx": f"{px:.2f}", "cy": f"{py:.2f}"}
                parts.append(element("circle", title, **place, r=3.5, class_=f"point {_swatch(at, one)}"))
    # The y axis is named above it, level: turned, a long name is cut at a phone's size of letters.
    parts = [element("text", up, x=4, y=17, class_="label"), element("g", parts, transform=f"translate(0 {_NAME})")]
    described = f"{up} against {across}: {', '.join(one.name for one in series)}"
    legend = [
        element("li", element("span", class_=f"swatch {_swatch(at, one)}"), one.name) for at, one in enumerate(series)
    ]
    return element("figure", _svg(parts, height + _NAME, described), element("ul", legend, class_="legend"))


def _swatch(at: int, one: ChartLine) -> str:
    """Return the CSS classes for a line's colour in the legend."""
    return "roof" if one.dashed else f"c{at % _COLOURS}" + (" hollow" if at >= _COLOURS else "")


def _svg(parts: list[Element], height: float, described: str) -> Element:
    return element(
        "svg", element("title", described), parts, viewBox=f"0 0 {WIDTH} {height:g}", role="img", class_="chart",
        aria_label=described,
    )  # fmt: skip


def _across(scale: PlotAxis, bottom: float, name: str, left: float, whole: bool = False) -> list[Element]:
    """Draw the horizontal axis: grid lines, labels and its name."""
    out = []
    for share, label in scale.ticks(8, whole):
        x = left + share * (WIDTH - _RIGHT - left)
        out.append(element("line", x1=x, x2=x, y1=_TOP, y2=bottom, class_="grid"))
        out.append(element("text", label, x=x, y=bottom + 16, class_="label middle"))
    middle = left + (WIDTH - _RIGHT - left) / 2
    return [*out, element("text", name, x=middle, y=bottom + 36, class_="label middle")]


def _place(scale: PlotAxis, value: float, left: float) -> float:
    return left + scale.share(value) * (WIDTH - _RIGHT - left)


def _up(share: float, height: float) -> float:
    return height - _BOTTOM - share * (height - _BOTTOM - _TOP)


def _number(value: float) -> str:
    return f"{value:.4g}"


def _text(row: RatioBar) -> str:
    ends = f" [{_number(row.low)}, {_number(row.high)}]" if row.low is not None and row.high is not None else ""
    return f"{_number(row.value)}{ends}" + (f", {row.note}" if row.note else "")


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


_COST_ROW, _BINS = 46, 40


@dataclass(frozen=True)
class CostBar:
    """A step of a block: its label, its cost (FLOPs) and the shape of its output."""

    label: str
    cost: int
    shape: str


def cost_bars(steps: Sequence[CostBar]) -> Element:
    """Draw the steps of a block from top to bottom, each with a bar whose width is its cost."""
    most = max((step.cost for step in steps), default=0) or 1
    total = sum(step.cost for step in steps)
    parts: list[Element] = []
    for at, step in enumerate(steps):
        y, flops = 4 + at * _COST_ROW, f"{step.cost:,} FLOPs"
        parts.append(element("text", step.label, x=4, y=y + 16, class_="label"))
        title = element("title", f"{step.label}: {step.shape}, {flops}")
        wide = max(2.0, (WIDTH - 330) * step.cost / most)
        parts.append(element("rect", title, x=4, y=y + 22, width=f"{wide:.1f}", height=16, rx=2, class_="cost"))
        parts.append(element("text", f"{step.shape}  {flops}", x=wide + 12, y=y + 36, class_="label"))
    described = f"{len(steps)} steps with {total:,} FLOPs in all; the width of a bar is a step's FLOPs"
    svg = _svg(parts, 16 + _COST_ROW * len(steps), described)
    return element("figure", svg, element("figcaption", "The width of a bar is the step's FLOPs."))


def share_bars(rows: Sequence[tuple[str, Mapping[str, float]]], names: Sequence[str]) -> Element:
    """Draw a row for each label with its shares of a whole laid end to end: to the right of a line at 0 those above 0,
    to its left those below. `names` are all parts, in the order of their colours."""
    left, row_height = 130, 22
    low, high = (
        max((sum(max(sign * share, 0.0) for share in shares.values()) for _, shares in rows), default=0.0)
        for sign in (-1, 1)
    )
    unit = (WIDTH - left - _RIGHT) / (low + high or 1.0)
    zero, bottom = left + low * unit, _TOP + row_height * len(rows)
    parts = []
    for at, (label, shares) in enumerate(rows):
        y, ends = _TOP + row_height * at, [zero, zero]
        parts.append(element("text", _short(label, 18), x=left - 8, y=y + 15, class_="label end"))
        for number, name in enumerate(names):
            if share := shares.get(name, 0.0):
                wide = abs(share) * unit
                x = ends[1] if share > 0 else ends[0] - wide
                ends = [ends[0], x + wide] if share > 0 else [x, ends[1]]
                title = element("title", f"{label}, {name}: {100 * share:.3g} %")
                place = {"x": f"{x:.1f}", "y": y + 3, "width": f"{wide:.1f}", "height": row_height - 6}
                parts.append(element("rect", title, **place, class_=f"point c{number % _COLOURS}"))
    parts.append(element("line", x1=f"{zero:.1f}", x2=f"{zero:.1f}", y1=_TOP, y2=bottom, class_="mark"))
    present = [(at, name) for at, name in enumerate(names) if any(shares.get(name) for _, shares in rows)]
    legend = [element("li", element("span", class_=f"swatch c{at % _COLOURS}"), name) for at, name in present]
    described = (
        f"Shares of {', '.join(name for _, name in present)} in {len(rows)} rows; those left of the line are below 0"
    )
    return element("figure", _svg(parts, bottom + _TOP, described), element("ul", legend, class_="legend"))


def histogram(values: Sequence[float]) -> Element | None:
    """Draw a histogram with 40 bins from the smallest to the largest finite value."""
    finite = [value for value in values if math.isfinite(value)]
    if not finite or min(finite) == max(finite):
        return None
    low, high = min(finite), max(finite)
    counts = [0] * _BINS
    for value in finite:
        counts[min(_BINS - 1, int((value - low) / (high - low) * _BINS))] += 1
    most, wide, height = max(counts), (WIDTH - 20) / _BINS, 90
    bars = []
    for at, count in enumerate(counts):
        if not count:
            continue
        tall = (height - 24) * count / most
        ends = [low + (high - low) * (at + side) / _BINS for side in (0, 1)]
        title = element("title", f"{count:,} values from {ends[0]:.4g} to {ends[1]:.4g}")
        place = {"x": 10 + at * wide, "y": height - 18 - tall, "width": wide - 1, "height": tall}
        bars.append(element("rect", title, class_="cost", **{key: f"{value:.1f}" for key, value in place.items()}))
    labels = [
        element("text", f"{low:.4g}", x=10, y=height - 3, class_="label"),
        element("text", f"{high:.4g}", x=WIDTH - 10, y=height - 3, class_="label end"),
    ]
    described = f"Histogram of {len(finite):,} values from {low:.4g} to {high:.4g}"
    return element("figure", _svg([*bars, *labels], height, described))


_DARKEST = 45  # percent of the colour, so that text remains readable


def layer_map(cells: Mapping[tuple[str, str], tuple[str, float]]) -> Element:
    """Draw a table of layers and tensors, in which a cell is darker the larger its value is."""
    rows, columns = (list(dict.fromkeys(place[at] for place in cells)) for at in (0, 1))
    most = max((value for _, value in cells.values()), default=0.0) or 1.0

    def cell(row: str, column: str) -> Element:
        text, value = cells.get((row, column), ("-", 0.0))
        shade = f"background: color-mix(in srgb, var(--c0) {_DARKEST * max(value, 0.0) / most:.0f}%, transparent)"
        return element("td", text, class_="number", style=shade)

    head = element("tr", element("th", "layer", scope="col"), [element("th", name, scope="col") for name in columns])
    body = [element("tr", element("th", row, scope="row"), [cell(row, name) for name in columns]) for row in rows]
    table = element("table", element("thead", head), element("tbody", body))
    return element("div", table, class_="scroll", tabindex=0, role="region", aria_label="layers and tensors")
