"""Drawings of a block and of its values: steps with their costs, a histogram."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree.ElementTree import Element

from ffncli.show.page.charts import WIDTH
from ffncli.show.page.element import element

_LABELS, _ROW, _BINS = 330, 26, 40


@dataclass(frozen=True)
class CostBar:
    """A step in words, its cost (FLOPs) and the shape of its output."""

    label: str
    cost: int
    shape: str


def cost_bars(steps: Sequence[CostBar]) -> Element:
    """The steps of a block from the top down, each with a bar as wide as its cost."""
    most = max((step.cost for step in steps), default=0) or 1
    total = sum(step.cost for step in steps)
    parts: list[Element] = []
    for at, step in enumerate(steps):
        y = 8 + at * _ROW
        room = WIDTH - _LABELS - 210
        flops = f"{step.cost:,} FLOPs" if step.cost else "0 FLOPs"
        parts.append(element("text", step.label, x=_LABELS - 8, y=y + 14, class_="label end"))
        title = element("title", f"{step.label}: {step.shape}, {flops}")
        wide = max(2.0, room * step.cost / most)
        bar = element("rect", title, x=_LABELS, y=y + 2, width=f"{wide:.1f}", height=16, rx=2, class_="cost")
        parts.append(bar)
        parts.append(element("text", f"{step.shape}  {flops}", x=_LABELS + wide + 8, y=y + 14, class_="label"))
    described = f"{len(steps)} steps with {total:,} FLOPs in all; the width of a bar is a step's FLOPs"
    svg = _svg(parts, 16 + _ROW * len(steps), described)
    return element("figure", svg, element("figcaption", "The width of a bar is the step's FLOPs."))


def histogram(values: Sequence[float]) -> Element | None:
    """How often values lie where, in 40 bins from the smallest to the largest finite one."""
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


def _svg(parts: Sequence[Element], height: int, described: str) -> Element:
    return element(
        "svg", element("title", described), parts, viewBox=f"0 0 {WIDTH} {height}", role="img", class_="chart",
        aria_label=described,
    )  # fmt: skip
