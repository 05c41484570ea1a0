"""A block as one drawing: the input, then for each step its weights, in the order in which they are multiplied, and its
result; small matrices as cells with their values, larger ones as coloured cells or as boxes with their shapes; experts
as lanes side by side.

The layout is a list of rectangles and texts, which become SVG, part of a page (cells carry the names by which the
page's script finds them), or a PNG. Equal blocks give equal bytes.
"""

import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
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
_LANE_CELL, _MOST_IN_LANE = (38.0, 17.0), 8  # the same in the lanes of at most _VALUED_LANES experts
_VALUED_LANES = 4
_SMALL, _MOST_SMALL = (9.0, 9.0), 32  # a coloured cell; more rows or columns are a box
_BOX = (220.0, 34.0)
_MARGIN, _LABEL, _GAP, _LANE_GAP = 12.0, 16.0, 8.0, 14.0
_MOST_LANES = 16
_SCREEN = 860  # the height of a drawing that a page shrinks to the height of a screen
_STYLE = """
svg.block { --fg: #1b1f24; --muted: #57606a; --line: #b7c0c9; --plus: #0b57d0; --minus: #c2570c; --bg: #ffffff; }
@media (prefers-color-scheme: dark) {
  svg.block { --fg: #e6e8ea; --muted: #a9b1ba; --line: #4a545e; --plus: #2f6fd6; --minus: #b5551a; --bg: #14171a; }
}
.block text { font-family: system-ui, "DejaVu Sans", sans-serif; font-size: 12px; fill: var(--fg); }
.block .value { font-family: ui-monospace, "DejaVu Sans Mono", monospace; font-size: 11px;
  text-anchor: middle; pointer-events: none; }
.block .tight { font-size: 10px; }
.block .quiet { fill: var(--muted); } .block .strong { font-weight: 600; } .block .middle { text-anchor: middle; }
.block rect { stroke: var(--line); stroke-width: 1; fill: var(--bg); }
.block rect.frame { stroke: none; }
.block rect.absent { stroke-dasharray: 1 3; }
.block rect.plus { fill: var(--plus); } .block rect.minus { fill: var(--minus); }
.block path { stroke: var(--muted); stroke-width: 1.5; fill: none; }
"""


@dataclass(frozen=True)
class _DrawnMatrix:
    """A matrix under its label: a result, or a weight as x · W multiplies. `key` is what a page's script calls it; the
    values are None if they are unknown. Rows that are not `present` are empty; each row may have a note at its end."""

    label: str
    shape: tuple[int, int]
    values: Tensor | None
    key: str = ""
    weight: bool = False
    present: frozenset[int] | None = None
    notes: Sequence[str] = ()


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
    """A rectangle, or with `text` a text at (x, y), or with `arrow` an arrow downwards of height `tall`."""

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
class Drawing:
    """Shapes in a frame; `about` describes them in words."""

    wide: float
    tall: float
    shapes: tuple[_Mark, ...]
    about: str

    def element(self) -> Element:
        """Return the drawing as an SVG element, to be put into a page."""
        body = [
            element("title", self.about),
            element("style", " ".join(_STYLE.split("\n"))),
            *map(_svg_mark, self.shapes),
        ]
        size = {"viewBox": f"0 0 {self.wide:g} {self.tall:g}", "preserveAspectRatio": "xMinYMin"}
        size["style"] = f"--wide:{self.wide:g}px;--tall:{1.25 * self.tall:g}px;width:100%;max-width:{self.wide:g}px"
        style = "block" if self.tall > _SCREEN else "block fits"
        return element("svg", *body, xmlns="http://www.w3.org/2000/svg", **size, role="img", class_=style)

    def svg(self) -> bytes:
        """Return the drawing as a file of SVG, which needs nothing else."""
        return tostring(self.element(), encoding="unicode").encode() + b"\n"

    def png(self) -> bytes:
        """Return the drawing as PNG, at twice its size. Raises FFNError (exit 3) if matplotlib is missing."""
        try:
            from matplotlib.figure import Figure
            from matplotlib.patches import Rectangle
        except ImportError:
            raise FFNError("a PNG needs matplotlib", NEEDS, ExitCode.ENVIRONMENT) from None
        figure = Figure((self.wide / 72, self.tall / 72), dpi=144)
        axes = figure.add_axes((0, 0, 1, 1), xlim=(0, self.wide), ylim=(self.tall, 0))
        axes.set_axis_off()
        for one in self.shapes:
            if one.arrow:
                axes.annotate("", (one.x, one.y + one.tall), (one.x, one.y), arrowprops={"arrowstyle": "->"})
            elif one.text:
                sides = {"middle": "center", "value": "center"}
                place = next((side for word, side in sides.items() if word in one.style), "left")
                family = "monospace" if "value" in one.style else "sans-serif"
                axes.text(
                    one.x, one.y, one.text, ha=place, va="baseline", fontsize=8.5, family=family, parse_math=False
                )
            elif one.style != "frame":
                color = {"plus": "#0b57d0", "minus": "#c2570c"}.get(one.style, "none")
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
        x, end = one.x, one.y + one.tall
        return element("path", d=f"M{x:g} {one.y:g}V{end:g}M{x - 4:g} {end - 5:g}L{x:g} {end:g}L{x + 4:g} {end - 5:g}")
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
    """Return the drawing of a saved trace; without its weights, or for a large block, they are boxes. Without `colours`
    all matrices without values in their cells are boxes."""
    parts: list[_DrawnMatrix | _Lanes] = []
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
        parts.append(_DrawnMatrix(name, (rows.shape[0], rows.shape[1]), rows, step.name, notes=notes))
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


def _laid_out(parts: Sequence[_DrawnMatrix | _Lanes], name: str, most: int) -> Drawing:
    shapes = [_Mark(_MARGIN, _MARGIN + 10, style="strong", text=name)]
    y, wide = _MARGIN + _LABEL + 6, 8.0 * len(name)
    for at, part in enumerate(parts):
        if isinstance(part, _Lanes):
            x, low = _MARGIN, y
            for e, (title, matrices) in enumerate(part.lanes):
                shapes.append(_Mark(x, y + 11, style="strong", text=title, name=f"{part.name}.{e}"))
                under, across = y + _LABEL + 4, 6.6 * len(title)
                for one in matrices:
                    drawn, w, h = _matrix(one, x, under, most, part.cell, _MOST_IN_LANE)
                    shapes += drawn
                    under, across = under + h + _GAP, max(across, w)
                low, x = max(low, under), x + across + _LANE_GAP
            if part.more:
                shapes.append(_Mark(x, y + 11, style="quiet", text=f"and {part.more} more"))
                x += 90
            y, wide = low + _GAP, max(wide, x)
            continue
        if at and not part.weight and isinstance(before := parts[at - 1], _DrawnMatrix) and not before.weight:
            shapes.append(_Mark(_MARGIN + 10, y - _GAP + 1, tall=_GAP + 6, arrow=True))
            y += 10
        drawn, w, h = _matrix(part, _MARGIN, y, most)
        shapes += drawn
        y, wide = y + h + _GAP, max(wide, w)
    about = f"{name}: {', '.join(part.label for part in parts if isinstance(part, _DrawnMatrix))}"
    wide, tall = math.ceil(wide + 2 * _MARGIN), math.ceil(y + _MARGIN - _GAP)
    return Drawing(wide, tall, (_Mark(0, 0, wide, tall, "frame"), *shapes), about)


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
    label = f"{one.label}   {rows} × {columns}"
    out = [_Mark(x, y + 11, style="quiet" if one.weight else "", text=label)]
    wide, top = 6.8 * len(label), y + _LABEL
    valued = cell != _SMALL and max(rows, columns) <= most_valued
    if one.values is None or not (valued or max(rows, columns) <= coloured):
        box = _Mark(x, top, *(_BOX if most_valued == _MOST else (110.0, 22.0)))
        middle = f"{rows:,} × {columns:,}"
        text = _Mark(x + box.wide / 2, top + box.tall / 2 + 4, style="middle quiet", text=middle)
        return [*out, box, text], max(wide, box.wide), _LABEL + box.tall
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
