"""The record of a topic: every number in it is computed when it is asked for, every other statement has a source."""

from __future__ import annotations

from dataclasses import dataclass

Value = float | int | str | None


@dataclass(frozen=True)
class NumberTable:
    """A few computed numbers: `command` prints them too, in its own form."""

    command: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Value, ...], ...]


@dataclass(frozen=True)
class Topic:
    """The keys of docs/json.md: at most six sentences, a table, the command to go on with, citations."""

    topic: str
    title: str
    sentences: tuple[str, ...]
    example: NumberTable
    next: str
    sources: tuple[str, ...]


@dataclass(frozen=True)
class TopicLine:
    """A topic in the list of all: its name, what it is in one line, other names that lead to it."""

    topic: str
    title: str
    aliases: tuple[str, ...]


def fixed(value: float) -> str:
    """A number in a sentence: four decimals."""
    return f"{value:.4f}"
