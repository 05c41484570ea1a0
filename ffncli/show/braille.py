"""A plot as lines of text."""

from __future__ import annotations

from ffncli.show.plots import Plot

Span = tuple[str, int | None]  # text, and the curve whose colour it has


def drawn(plot: Plot, columns: int = 80, encoding: str = "utf-8") -> list[list[Span]]:
    """Lines of spans, at most `columns` wide."""
    lines: list[list[Span]] = [[(plot.title, None)]]
    for at, line in enumerate(plot.lines):
        lines.append([(f"{line.name}: {len(line.points)} points", at)])
    return lines
