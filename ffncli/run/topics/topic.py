"""What ffn explain answers with: a topic, its example, and the tiny runs that examples are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ffncli.models.dimensions import Dimensions
from ffncli.models.examples import demo

if TYPE_CHECKING:
    from ffncli.models.model import Resolved
    from ffncli.run.engine.prepare import Prepared
    from ffncli.run.engine.trace import StepRecord, Trace


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


@dataclass(frozen=True)
class TinyRun:
    """A small block that ran: its inputs and weights, and the record of each step by name."""

    prepared: Prepared
    trace: Trace

    def __getitem__(self, name: str) -> StepRecord:
        return self.trace.step(name)


def tiny_run(
    source: str | None = None, tokens: int | None = None, input: str | None = None, train: bool = False, **options: Any
) -> TinyRun:
    """The run of `ffn trace` with the same options, with all its values kept."""
    from ffncli.run.engine.prepare import prepare
    from ffncli.run.engine.trace import trace
    from ffncli.run.user.load import load

    model = demo(Dimensions()) if source is None else load(source, Dimensions(**options))
    leading = None if tokens is None else (tokens,)
    ready = prepare(model, input=input, leading=leading, train=train)
    return TinyRun(ready, trace(ready.steps, ready.weights, ready.inputs, ready.mode))


def routes(tiny: TinyRun) -> list[tuple[int, str, str]]:
    """(token, its experts, their weights), the heaviest expert first."""
    rows = []
    for token, weights in enumerate(tiny["route"].values):
        order = sorted((e for e, weight in enumerate(weights) if weight), key=lambda e: -weights[e])
        rows.append((token, ", ".join(map(str, order)), ", ".join(fixed(weights[e]) for e in order)))
    return rows


def catalog_model(name: str) -> Resolved:
    """A model of the catalog."""
    from ffncli.models import catalog

    model = catalog.find(name)
    assert model is not None, name
    return model
