"""The record of a topic: every number in it is computed on request, every other statement has a source."""

from __future__ import annotations

from ffncli.dataclass import dataclass

Value = float | int | str | None


@dataclass(frozen=True)
class NumberTable:
    """A few computed numbers: `command` runs the same block or functions."""

    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class TopicLine:
    """A topic in the list of all: its name, a one-line definition, other names for it."""

    topic: str
    title: str
    aliases: tuple[str, ...]

    def explained(
        self, sentences: tuple[str, ...], example: NumberTable, go_on: str, sources: tuple[str, ...]
    ) -> Topic:
        """The whole topic."""
        return Topic(self.topic, self.title, self.aliases, sentences, example, go_on, sources)


@dataclass(frozen=True)
class Topic(TopicLine):
    """A topic with at most six sentences, a table, the next command (`next`), citations."""

    sentences: tuple[str, ...]
    example: NumberTable
    next: str
    sources: tuple[str, ...]


def fixed(value: float) -> str:
    """A number in a sentence: four decimals."""
    return f"{value:.4f}"
