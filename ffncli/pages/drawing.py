"""A block as one drawing: each step's result, after what it is computed from and below its weights, as a product is
written by hand; small matrices as cells with their values, larger ones as coloured cells or as boxes, wider and taller
by the logarithm of their columns and rows; experts as lanes side by side.

A drawing is a sequence of panels that flow like words: a page breaks the lines where its window ends, a file (SVG or
PNG) at some 560 pixels. A panel is a list of rectangles and texts; its cells carry the names by which a page's script
finds them. Equal blocks give equal bytes.
"""

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, zip_longest
from pathlib import Path
from xml.etree.ElementTree import Element, tostring

from torch import Tensor

from ffncli.errors import ExitCode, FFNError
from ffncli.pages.live import entry_names
from ffncli.run.saved.saved import Saved, SavedStep
from ffncli.show.page.document import element
from ffncli.show.plots.image import NEEDS
from ffncli.show.text import plural
from ffncli.system.files import written_whole

SUFFIXES = (".svg", ".png")
_CELL, _MOST = (42.0, 20.0), 16  # a cell with its value; more rows or columns than _MOST are coloured cells
_LANE_CELL, _MOST_IN_LANE = (38.0, 16.0), 8  # the same in the lanes of at most _VALUED_LANES experts
_VALUED_LANES = 4
_SMALL, _MOST_SMALL = (9.0, 9.0), 32  # a coloured cell; more rows or columns are a box
_BOX = (14.0, 6.0)  # a box's width and height for each doubling of the columns and the rows; half of it in a lane
_MARGIN, _LABEL, _GAP, _LANE_GAP, _LINE_GAP, _TITLE = 12.0, 16.0, 6.0, 14.0, 16.0, 26.0
_ARROW = 20.0  # the room right of a panel, with an arrow if the next panel, maybe on the next line, is computed from it
_MOST_LANES = 16
_WIDEST = 560.0  # so wide is a file's line, but for a wider panel and lanes: readable at 400 pixels and on a slide
_XMLNS = "http://www.w3.org/2000/svg"
_STYLE = """
.block { --fg: #1b1f24; --muted: #57606a; --line: #b7c0c9; --plus: #0b57d0; --minus: #c2570c; --bg: #ffffff;
  --soft: #f3f5f7; }
@media (prefers-color-scheme: dark) {
  .block { --fg: #e6e8ea; --muted: #a9b1ba; --line: #4a545e; --plus: #2f6fd6; --minus: #b5551a; --bg: #14171a;
    --soft: #1e2328; }
}
.block text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 12px; fill: var(--fg); }
.block .value { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 10.5px;
  text-anchor: middle; pointer-events: none; }
.block .tight { font-size: 9.5px; }
.block .quiet { fill: var(--muted); } .block .strong { font-weight: 600; } .block .middle { text-anchor: middle; }
.block rect { stroke: var(--line); stroke-width: 1; fill: var(--bg); }
.block rect.frame { stroke: none; } .block rect.box { fill: var(--soft); }
.block rect.absent { stroke-dasharray: 1 3; }
.block rect.plus { fill: var(--plus); } .block rect.minus { fill: var(--minus); }
.block path { stroke: var(--muted); stroke-width: 1.5; fill: none; }
"""


@dataclass(frozen=True)
class _DrawnMatrix:
    """A matrix under its label: a result, or a weight as x · W multiplies. `key` is what a page's script calls it. Rows
    that are not `present` are empty; each row may have a note at its end. A result that `follows` is computed from the
    result before it."""

    label: str
    shape: tuple[int, int]
    values: Tensor
    key: str = ""
    weight: bool = False
    present: frozenset[int] | None = None
    notes: Sequence[str] = ()
    follows: bool = False


@dataclass(frozen=True)
class _Lanes:
    """Experts side by side, each a title and its matrices; `name` is the experts' step."""

    name: str
    lanes: Sequence[tuple[str, Sequence[_DrawnMatrix]]]
    more: int = 0

    @property
    def cell(self) -> tuple[float, float]:
        """The size of a cell: with its value, if there are few of them."""
        sizes = [size for _, matrices in self.lanes for one in matrices for size in one.shape]
        valued = len(self.lanes) + self.more <= _VALUED_LANES and max(sizes, default=0) <= _MOST_IN_LANE
        return _LANE_CELL if valued else _SMALL


@dataclass(frozen=True)
class _Mark:
    """A rectangle, or with `text` a text at (x, y), or with `arrow` an arrow to the right, `wide` long."""

    x: float
    y: float
    wide: float = 0.0
    tall: float = 0.0
    style: str = ""
    share: float = 1.0  # how full the colour is
    text: str = ""
    arrow: bool = False
    cell: str = ""
    name: str = ""  # of the cell, as formulas write it; of a text that a page's script changes


@dataclass(frozen=True)
class _Panel:
    """What stays together: a result below its weights, or an expert's lane."""

    shapes: tuple[_Mark, ...]
    wide: float
    tall: float
    lane: bool = False

    def element(self) -> Element:
        """Return the panel as an SVG element of a page."""
        size = {"viewBox": f"0 0 {self.wide:g} {self.tall:g}", "style": f"--wide:{self.wide:g}px"}
        return element("svg", *map(_svg_mark, self.shapes), xmlns=_XMLNS, **size)


@dataclass(frozen=True)
class Drawing:
    """A title and panels; `about` describes them in words."""

    title: str
    panels: tuple[_Panel, ...]
    about: str

    @property
    def shapes(self) -> Iterator[_Mark]:
        """The shapes of all panels."""
        return (shape for panel in self.panels for shape in panel.shapes)

    def element(self) -> Element:
        """Return the drawing as an element of a page, without the title. Its lines break where the window ends."""
        flow: list[Element] = []
        for lane, panels in groupby(self.panels, lambda panel: panel.lane):
            drawn = [panel.element() for panel in panels]
            flow += [element("div", *drawn, class_="lanes")] if lane else drawn
        next(flow[0].iter("svg")).insert(0, element("style", _STYLE.replace("\n", " ")))
        return element("div", *flow, class_="block", role="img", aria_label=self.about)

    def _lines(self) -> list[list[_Panel]]:
        """Return the panels in lines of at most _WIDEST; all lanes are one line."""
        lines: list[list[_Panel]] = []
        for panel in self.panels:
            same = bool(lines) and panel.lane == lines[-1][0].lane
            if same and (panel.lane or sum(one.wide for one in lines[-1]) + panel.wide - _ARROW <= _WIDEST):
                lines[-1].append(panel)
            else:
                lines.append([panel])
        return lines

    def _placed(self) -> tuple[float, float, list[_Mark]]:
        """Return the size and the shapes of the picture in a file. The results of a line stand on one level."""
        lines = self._lines()
        wide = max(8.0 * len(self.title), *(sum(panel.wide for panel in line) for line in lines)) + 2 * _MARGIN
        tall = _TITLE + _MARGIN + sum(max(panel.tall for panel in line) + _LINE_GAP for line in lines)
        shapes = [_Mark(0, 0, wide, tall, "frame"), _Mark(_MARGIN, _MARGIN + 10, style="strong", text=self.title)]
        y = _TITLE + _MARGIN / 2
        for line in lines:
            x, level = _MARGIN, y + max(panel.tall for panel in line)
            for panel in line:
                top = y if panel.lane else level - panel.tall
                shapes += [replace(one, x=one.x + x, y=one.y + top) for one in panel.shapes]
                x += panel.wide
            y = level + _LINE_GAP
        return wide, tall, shapes

    def svg(self) -> bytes:
        """Return the drawing as a file of SVG, which needs nothing else."""
        wide, tall, shapes = self._placed()
        body = [element("title", self.about), element("style", _STYLE.replace("\n", " ")), *map(_svg_mark, shapes)]
        size = {"viewBox": f"0 0 {wide:g} {tall:g}", "style": f"width:100%;max-width:{wide:g}px"}
        svg = element("svg", *body, xmlns=_XMLNS, **size, role="img", class_="block")
        return tostring(svg, encoding="unicode").encode() + b"\n"

    def png(self) -> bytes:
        """Return the drawing as PNG, at twice its size. Raises FFNError (exit 3) if matplotlib is missing."""
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Rectangle
        except ImportError:
            raise FFNError("a PNG needs matplotlib", NEEDS, ExitCode.ENVIRONMENT) from None
        wide, tall, shapes = self._placed()
        figure = Figure((wide / 72, tall / 72), dpi=144)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, wide), ylim=(tall, 0))
        axes.set_axis_off()
        for one in shapes:
            if one.arrow:
                axes.annotate("", (one.x + one.wide, one.y), (one.x, one.y), arrowprops={"arrowstyle": "->"})
            elif one.text:
                sides = {"middle": "center", "value": "center"}
                place = next((side for word, side in sides.items() if word in one.style), "left")
                family = "monospace" if "value" in one.style else "sans-serif"
                axes.text(
                    one.x, one.y, one.text, ha=place, va="baseline", fontsize=8.5, family=family, parse_math=False
                )
            elif one.style != "frame":
                color = {"plus": "#0b57d0", "minus": "#c2570c", "box": "#f3f5f7"}.get(one.style, "none")
                box = (one.x, one.y), one.wide, one.tall
                axes.add_patch(Rectangle(*box, facecolor=color, alpha=one.share if color != "none" else 1, linewidth=0))
                axes.add_patch(Rectangle(*box, fill=False, edgecolor="#b7c0c9", linewidth=0.6))
        out = io.BytesIO()
        figure.savefig(out, format="png", metadata={"Software": None})
        return out.getvalue()


def write_drawing(drawing: Drawing, path: Path) -> None:
    """Write the drawing as SVG or PNG, as the suffix says; the file is complete or absent."""
    data = drawing.png() if path.suffix.lower() == ".png" else drawing.svg()
    with written_whole(path) as file:
        file.write(data)


def _svg_mark(one: _Mark) -> Element:
    place = {"x": f"{one.x:g}", "y": f"{one.y:g}"}
    if one.arrow:
        y, end = one.y, one.x + one.wide
        return element("path", d=f"M{one.x:g} {y:g}H{end:g}M{end - 5:g} {y - 4:g}L{end:g} {y:g}L{end - 5:g} {y + 4:g}")
    if one.text:
        return element(
            "text", one.text, **place, class_=one.style, data_text=one.cell or None, data_note=one.name or None
        )
    fill = {"fill_opacity": f"{one.share:.3g}"} if one.style in ("plus", "minus") else {}
    size = {"width": f"{one.wide:g}", "height": f"{one.tall:g}"}
    known = {"data_part": one.cell or None, "data_name": one.name or None}
    return element("rect", **place, **size, class_=one.style or None, **known, **fill)


# --- what is drawn ----------------------------------------------------------------------------------------------------


def block_drawing(saved: Saved, colours: bool = True) -> Drawing:
    """Return the drawing of a saved trace; weights that the file lacks are left out. Without `colours`, all matrices
    without values in their cells are boxes."""
    parts: list[_DrawnMatrix | _Lanes] = []
    before = ""
    for step in saved.steps:
        if step.inner:
            continue
        if step.op == "experts":
            parts.append(_experts(saved, step))
        else:
            parts += _weights(saved, step.name, step.op, step.formula, None)
        name = step.name if not step.inputs else f"{step.name} = {step.formula}"
        rows = saved.tensor(step.name).reshape(-1, step.shape[-1]).double()
        notes = route_notes(saved, step, rows) if step.op == "route" else ()
        follows = before in step.inputs
        parts.append(_DrawnMatrix(name, (rows.shape[0], rows.shape[1]), rows, step.name, notes=notes, follows=follows))
        before = step.name
    name = str(saved.block.get("name") or "a block")
    return _laid_out(parts, name, _MOST_SMALL if colours else 0)


def route_notes(saved: Saved, step: SavedStep, route: Tensor) -> list[str]:
    """Return for each token where it goes: `→ expert 1 (0.62), expert 3 (0.38)`."""
    names = entry_names(saved, step.name, step.shape[-1])
    chosen = [[(names[e], share) for e, share in enumerate(row) if share and names] for row in route.tolist()]
    return [f"→ {', '.join(f'{name} ({share:.2f})' for name, share in row) or 'no expert'}" for row in chosen]


def _weights(
    saved: Saved, place: str, op: str, formula: str, expert: int | None, common: Sequence[str] = ()
) -> list[_DrawnMatrix]:
    """Return the weights of a step, in the file; matrices transposed, as x · W multiplies."""
    out = []
    for name in saved.weights:
        prefix, _, part = name.rpartition(".")
        if prefix != place:
            continue
        tensor = saved.weight(name)
        of_one = expert is not None and not {place, name} & {*common}
        tensor = tensor[expert] if of_one else tensor
        matrix = tensor.double().reshape(1, -1) if tensor.dim() < 2 else tensor.double()
        if op == "linear" and tensor.dim() == 2:
            matrix = matrix.T
        symbol = formula.partition(" · ")[2].partition(" ")[0] if op == "linear" and part == "weight" else name
        sign = "· " if op == "linear" and part == "weight" else "+ " if part == "bias" else ""
        key = f"{name}[{expert}]" if of_one else name
        out.append(
            _DrawnMatrix(f"{sign}{symbol or name}", (matrix.shape[0], matrix.shape[1]), matrix, key, weight=True)
        )
    return out


def _experts(saved: Saved, step: SavedStep) -> _Lanes:
    """Return a lane per expert: the weights of its program and, if the file has them, the results for its tokens."""
    lanes = []
    values = {one.name: one for one in saved.steps if one.inner}
    route = saved.tensor(step.inputs[1])
    route = route.reshape(-1, route.shape[-1])
    entries = step.entries(route.shape[1])
    for e in range(min(step.experts, _MOST_LANES)):
        matrices: list[_DrawnMatrix] = []
        for one in step.program:
            place = step.parameter(one.name).rpartition(".")[0]
            matrices += _weights(saved, place, one.op, one.formula, e, step.detail.get("common", "").split(", "))
            name = f"{step.name}.{e}.{one.name}"
            inner = [values[n] for k in (e, *range(step.experts)) if (n := f"{step.name}.{k}.{one.name}") in values]
            if inner:  # the shape of an expert that no token reaches is that of another
                rows, present = _by_token(saved, inner[0], len(route), empty=name != inner[0].name)
                label = one.name if step.experts > _VALUED_LANES else f"{one.name} = {one.formula}"
                matrices.append(_DrawnMatrix(label, (rows.shape[0], rows.shape[1]), rows, name, present=present))
        tokens = [at for at, share in enumerate(route[:, entries[e]].tolist()) if share]
        received = f"{plural('token', len(tokens))} {', '.join(map(str, tokens))}" if tokens else "no token"
        lanes.append((f"expert {e}: {received}", matrices))
    return _Lanes(step.name, lanes, max(0, step.experts - _MOST_LANES))


def _by_token(saved: Saved, step: SavedStep, tokens: int, empty: bool) -> tuple[Tensor, frozenset[int] | None]:
    """Return a result inside an expert with a row for every token of a few, and the tokens that the expert received;
    if it is to be `empty`, none."""
    rows, received = saved.tensor(step.name).reshape(-1, step.shape[-1]).double(), saved.tokens(step.name)
    if empty:
        rows, received = rows[:0], []
    if received is None or tokens > _MOST or not all(0 <= token < tokens for token in received):
        return rows, None
    out = rows.new_zeros(tokens, step.shape[-1])
    out[received] = rows
    return out, frozenset(received)


# --- where it is drawn ------------------------------------------------------------------------------------------------


def _laid_out(parts: Sequence[_DrawnMatrix | _Lanes], title: str, most: int) -> Drawing:
    stacks: list[list[_DrawnMatrix] | _Lanes] = []
    weights: list[_DrawnMatrix] = []
    for one in parts:
        if isinstance(one, _Lanes):
            stacks.append(one)
        elif one.weight:
            weights.append(one)
        else:
            stacks.append([*weights, one])
            weights = []
    panels: list[_Panel] = []
    for stack, then in zip_longest(stacks, stacks[1:]):
        leads = isinstance(then, list) and then[-1].follows
        panels += _lanes(stack, most) if isinstance(stack, _Lanes) else [_stack(stack, most, leads=leads)]
    labels = [one.label for one in parts if isinstance(one, _DrawnMatrix)]
    return Drawing(title, tuple(panels), f"{title}: {', '.join(labels)}")


def _stack(
    matrices: Sequence[_DrawnMatrix],
    most: int,
    cell: tuple[float, float] = _CELL,
    most_valued: int = _MOST,
    top: float = 0.0,
    leads: bool = False,
) -> _Panel:
    """Return matrices one below the other, with room right of them: for an arrow from the last one if it `leads`."""
    shapes: list[_Mark] = []
    y, wide = top, 0.0
    for one in matrices:
        drawn, w, h = _matrix(one, 1, y, most, cell, most_valued)
        shapes += drawn
        y, wide = y + h + _GAP, max(wide, w)
    low = y - _GAP
    if leads:
        end, middle = max(one.x + one.wide for one in drawn), low - (h - _LABEL) / 2
        shapes.append(_Mark(end + 4, middle, wide=_ARROW - 9, arrow=True))
    return _Panel(tuple(shapes), math.ceil(wide + _ARROW), math.ceil(low + 1))


def _lanes(experts: _Lanes, most: int) -> Iterator[_Panel]:
    for e, (title, matrices) in enumerate(experts.lanes):
        lane = _stack(matrices, most, experts.cell, _MOST_IN_LANE, top=_LABEL + 4)
        name = _Mark(1, 11, style="strong", text=title, name=f"{experts.name}.{e}")
        wide = math.ceil(max(6.6 * len(title), lane.wide - _ARROW) + _LANE_GAP)
        yield _Panel((name, *lane.shapes), wide, lane.tall, lane=True)
    if experts.more:
        yield _Panel((_Mark(1, 11, style="quiet", text=f"and {experts.more} more"),), 90, _LABEL, lane=True)


def _matrix(
    one: _DrawnMatrix,
    x: float,
    y: float,
    coloured: int,
    cell: tuple[float, float] = _CELL,
    most_valued: int = _MOST,
) -> tuple[list[_Mark], float, float]:
    """Return the shapes of a matrix with its label, and their width and height."""
    rows, columns = one.shape
    label = f"{one.label}   {rows:,} × {columns:,}"
    out = [_Mark(x, y + 11, style="quiet" if one.weight else "", text=label)]
    wide, top = 6.8 * len(label), y + _LABEL
    valued = cell != _SMALL and max(rows, columns) <= most_valued
    if not (valued or max(rows, columns) <= coloured):
        scale = 1.0 if most_valued == _MOST else 0.5
        w, h = scale * _BOX[0] * math.log2(columns + 1), max(14.0, scale * _BOX[1] * math.log2(rows + 1))
        return [*out, _Mark(x, top, w, h, "box")], max(wide, w), _LABEL + h
    w, h = cell if valued else _SMALL
    name = one.label.lstrip("·+ ") if one.weight else ""
    finite = one.values[one.values.isfinite()].abs()
    most = float(finite.max()) if finite.numel() else 0.0
    for i, line in enumerate(one.values.tolist()):
        known = one.present is None or i in one.present
        for j, value in enumerate(line):
            place, key = (x + j * w, top + i * h), f"{one.key}[{i},{j}]"
            share = 0.6 * min(1.0, abs(value) / most) if most and math.isfinite(value) else 0.0
            style = "plus" if value > 0 else "minus" if value < 0 else "" if known else "absent"
            out.append(_Mark(*place, w, h, style, share, cell=key, name=name and f"{name}[{i},{j}]"))
            if valued:
                value_there = value_text(value) if known else " "
                tight = "value tight" if cell == _LANE_CELL else "value"
                out.append(_Mark(place[0] + w / 2, place[1] + h / 2 + 4, style=tight, text=value_there, cell=key))
        if i < len(one.notes):
            wide = max(wide, columns * w + 8 + 6.8 * len(one.notes[i]))
            place = (x + columns * w + 8, top + i * h + h / 2 + 4)
            out.append(_Mark(*place, style="quiet", text=one.notes[i], name=f"{one.key}[{i}]"))
    return out, max(wide, columns * w), _LABEL + rows * h


def value_text(value: float) -> str:
    """Return a value in at most six characters, an integer without decimals."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Inf" if value > 0 else "-Inf"
    if value == int(value) and abs(value) < 1000:
        return str(int(value))
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.2f}" if abs(value) < 100 else f"{value:.3g}"
