"""An answer as sections of a page: what a terminal shows as text, with tables that sort and charts that are drawn."""

import math
from collections.abc import Iterator, Sequence
from itertools import count
from typing import Any

from ffncli.show.page.charts import ChartLine, lines
from ffncli.show.page.document import Child, PageParts, Section, element
from ffncli.show.parts import Answer, Fold, Heading, Line, Part, Table, is_number
from ffncli.show.plots.plot import Plot, Series
from ffncli.show.tensors import Excerpt, HeatMap

_STATIC = 30  # rows of a table that is written as it is; more can be sorted and filtered
_LONG = 44  # characters of a cell that is folded


def answer_parts(answer: Answer, name: str = "answer") -> PageParts:
    """Return the answer's sections: one per heading, the first titled after the command if it has no heading."""
    data: dict[str, Any] = {}
    sections: list[Section] = []
    title, children = f"ffn {answer.command}", list[Child]()
    names = (f"{name}{at}" for at in count(1))
    for part in [*answer.parts, Heading("")]:
        if isinstance(part, Heading):
            if children:
                sections.append(Section(next(names), title, tuple(children)))
            title, children = part.text, [element("p", part.remark, class_="muted")] if part.remark else []
        else:
            children += _children(part, data, names)
    return PageParts(tuple(sections), data)


def _children(part: Part, data: dict[str, Any], names: Iterator[str]) -> list[Child]:
    match part:
        case Line():
            return [element("p", part.text, class_="muted" if part.quiet else None)]
        case Table():
            return [element("h3", part.title) if part.title else None, *_table(part, data, next(names))]
        case Plot():
            series = [_line(one, part) for one in part.lines]
            return [element("h3", part.title), lines(series, part.x, part.y, part.log_x, part.log_y)]
        case Excerpt():
            rows = ("  ".join(text for text, _ in line) for line in part.lines())
            return [element("pre", "\n".join(rows), tabindex="0")]
        case HeatMap():
            return [element("pre", "\n".join(part.characters()), tabindex="0"), element("p", part.scale(False))]
        case Fold():
            inner = [one for nested in part.parts for one in _children(nested, data, names)]
            return [element("details", element("summary", part.summary), inner)]
        case Heading():
            return [element("h3", part.text)]


def _line(series: Series, plot: Plot) -> ChartLine:
    low, high = plot.frame or (-math.inf, math.inf)
    points = [(x, y if low <= y <= high else math.nan) for x, y in series.points]
    bars = [ends if all(map(math.isfinite, ends)) else None for ends in series.intervals]
    return ChartLine(series.name, points, bars, dashed=series.level, marked=plot.marks)


def _table(table: Table, data: dict[str, Any], name: str) -> Sequence[Child]:
    """Write a short table as it is, so that a reader needs no script; a long one as data for the script."""
    if len(table.rows) > _STATIC:
        data[name] = {"columns": table.columns, "rows": [[_value(cell) for cell in row] for row in table.rows]}
        return [element("div", data_table=name)]
    right = table.right_aligned()
    names = [
        element("th", column, scope="col", class_="number" if r else None)
        for column, r in zip(table.columns, right, strict=True)
    ]
    head = element("thead", element("tr", names))
    body = [
        element("tr", [_cell(text, r, at in table.emphasis) for text, r in zip(row, right, strict=True)])
        for at, row in enumerate(table.texts())
    ]
    grid = element("table", head if any(table.columns) else None, element("tbody", body))
    scroll = element("div", grid, class_="scroll", tabindex="0", role="region", aria_label=table.title or "Table")
    return [scroll, element("p", table.caption, class_="muted") if table.caption else None]


def _cell(text: str, right: bool, bold: bool) -> Child:
    style = "number" if right else "long" if len(text) > _LONG else None
    return element("td", element("strong", text) if bold else text, class_=style)


def _value(cell: Any) -> Any:
    if isinstance(cell, float) and not math.isfinite(cell):
        return None
    if cell is None or (is_number(cell) and type(cell) in (int, float)):
        return cell
    return Table(("",), [(cell,)]).texts()[0][0]
