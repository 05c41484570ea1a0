"""`ffn explain`: a topic, or the list of all topics, as JSON, CSV (its table of figures) and a readable page."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

from ffncli.cli.common.options import OutputOptions
from ffncli.cli.common.spread import spread
from ffncli.options.opt import Opt
from ffncli.run.topics.call import explain, topics
from ffncli.run.topics.topic import Topic, TopicLine
from ffncli.show.parts import Answer, Fixed, Heading, Line, Part, Table

_CONVENTIONS = {"example": "computed for this answer; `command` runs the same block or functions"}


_Topic = Annotated[
    str | None, Opt(metavar="TOPIC", help="ffn, gate, 4x, moe, tensor-parallel, gelu, ... [default: list all]")
]


@spread
def command(*, topic: _Topic = None, show: OutputOptions) -> None:
    """Explain gelu, gate, 4x, neuron, moe, ... in a few sentences, with computed numbers.

    Examples:
      ffn explain              # every topic
      ffn explain ffn          # what the block is for
      ffn explain gelu         # an activation function
      ffn explain moe --json   # the same as data
    """
    output = show.output()
    output.show(list_answer(topics()) if topic is None else topic_answer(explain(topic)))


class _FourDecimals(Fixed):
    """A number formatted for learners: `0.0008`, never `7.743e-04` or `-0.0000`."""

    def __str__(self) -> str:
        return f"{float(self):z.4f}"


def topic_answer(topic: Topic) -> Answer:
    """Build the answer for one topic."""
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
    """List all topics, one line each."""
    rows = Table(("topic", "title", "aliases"), [(one.topic, one.title, one.aliases) for one in lines])
    table = Table(("topic", "what it explains"), [(one.topic, one.title) for one in lines])
    return Answer(
        "explain",
        {"rows": [asdict(one) for one in lines]},
        rows,
        [table, Heading("next", "ffn explain ffn")],
        _CONVENTIONS,
    )
