"""What `ffn report` wrote, in a few lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from ffncli.show.parts import Answer, Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.pages.call import Report


def answer(report: Report) -> Answer:
    """The page's name, its size and its sections."""
    what = (
        f"{len(report.sections)} section{'s' if len(report.sections) > 1 else ''}"
        if report.sections
        else "a trace of events"
    )
    parts: list[Part] = [Line(f"{report.path}: {what}, {report.bytes / 1000:,.0f} kB")]
    rows = Table(("section",), [(title,) for title in report.sections])
    return Answer("report", asdict(report), rows, parts, {"bytes": "of the page, which holds all that it shows"})
