"""A topic as JSON, as CSV (its numbers) and as a page to read; and the list of all topics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from ffncli.run.topics.topic import Topic, TopicLine
from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Fixed, Table

_CONVENTIONS = {"example": "computed for this answer; `command` runs the same block or functions"}


class _FourDecimals(Fixed):
    """A number for a learner: `0.0008`, never `7.743e-04` or `-0.0000`."""

    def __str__(self) -> str:
        return f"{float(self):z.4f}"


def topic_answer(topic: Topic) -> Answer:
    """One topic."""
    example = topic.example
    rows = [tuple(_FourDecimals(cell) if isinstance(cell, float) else cell for cell in row) for row in example.rows]
    parts: list[Part] = [
        Heading(topic.topic, topic.title),
        *map(Line, topic.sentences),
        Table(example.columns, rows, f"in full: {example.command}"),
        Heading("next", topic.next),
        *(Line(f"source: {source}", quiet=True) for source in topic.sources),
    ]
    return Answer("explain", asdict(topic), Table(example.columns, example.rows), parts, _CONVENTIONS)


def list_answer(lines: Sequence[TopicLine]) -> Answer:
    """All topics, one line each."""
    rows = Table(("topic", "title", "aliases"), [(one.topic, one.title, one.aliases) for one in lines])
    table = Table(("topic", "what it explains"), [(one.topic, one.title) for one in lines])
    return Answer(
        "explain",
        {"rows": [asdict(one) for one in lines]},
        rows,
        [table, Heading("next", "ffn explain ffn")],
        _CONVENTIONS,
    )
