"""The parts of an answer, before any rendering."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from typing import Any, TypeAlias

from ffncli.dataclass import dataclass
from ffncli.show.heat import HeatMap
from ffncli.show.plots.plot import Plot
from ffncli.show.tables import Table
from ffncli.show.tensors import Excerpt


@dataclass(frozen=True)
class Heading:
    """A line that opens a part: bold text, and a quiet remark to its right."""

    text: str
    remark: str = ""


@dataclass(frozen=True)
class Line:
    """A line of text under a heading; `quiet` lines are dim in a terminal."""

    text: str
    quiet: bool = False


@dataclass(frozen=True)
class Fold:
    """Parts that a page of Markdown folds away under `summary`; elsewhere they are shown unfolded."""

    summary: str
    parts: Sequence[Part]


Part: TypeAlias = Table | Excerpt | Heading | HeatMap | Line | Plot | Fold


@dataclass(frozen=True)
class Answer:
    """A command's answer, before any rendering: `body` for JSON, `rows` for CSV, `parts` for people."""

    command: str
    body: Mapping[str, Any]
    rows: Table
    parts: Sequence[Part]
    conventions: Mapping[str, str] = field(default_factory=dict)

    def with_section(self, key: str, value: Any, parts: Sequence[Part] = ()) -> Answer:
        """The answer with `key` and these parts at its end; unchanged if there is no value (None)."""
        if value is None:
            return self
        return replace(self, body={**self.body, key: value}, parts=[*self.parts, *parts])
