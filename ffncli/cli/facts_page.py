"""A text's picture and facts, as JSON and beside the trace."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from ffncli.block.flow import flow
from ffncli.block.steps import Step
from ffncli.models.examples import Example
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table

if TYPE_CHECKING:
    from ffncli.run.texts.fact import Fact


def with_facts(page: Answer, steps: Sequence[Step], example: Example, facts: Sequence[Fact]) -> Answer:
    """The trace's answer with the flow of dimensions before its steps, and what the text says behind them."""
    lines = flow(steps, example.aliases)
    first = next((at for at, part in enumerate(page.parts) if at and isinstance(part, Heading)), len(page.parts))
    picture: list[Part] = [Line(line) for line in lines]
    body = {**page.body, "flow": list(lines), "aliases": dict(example.aliases), "facts": [asdict(f) for f in facts]}
    parts = [*page.parts[:first], *picture, *page.parts[first:], _table(facts)]
    return replace(page, body=body, parts=parts)


def sentence(fact: Fact) -> str:
    """`gelu(0.21): 0.1225; the text says 0.115`; what it says is left out where that is just what was found."""
    said = f"; the text says {fact.said}" if fact.said not in ("", fact.found) else ""
    return f"{fact.topic}: {fact.found}{said}"


def _table(facts: Sequence[Fact]) -> Table:
    """A verdict and a sentence per fact, its note below; of two columns, because their text may wrap."""
    rows: list[tuple[str | None, str]] = []
    wrong: set[int] = set()
    for fact in facts:
        if fact.verdict == "wrong":
            wrong.add(len(rows))
        rows.append((fact.verdict or None, sentence(fact)))
        if fact.note:
            rows.append(("", f"  {fact.note}"))
    return Table(("verdict", "fact"), rows, "what the text says, computed", frozenset(wrong))
