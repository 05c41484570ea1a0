"""A probe: a question, what measures it on the GPU, and what answers it from the figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Answer:
    """`yes` None: the figure alone is the answer. `figure` is short enough for a line."""

    yes: bool | None
    figure: str

    @property
    def word(self) -> str:
        """As a line shows it."""
        return "figure" if self.yes is None else "yes" if self.yes else "no"


@dataclass(frozen=True)
class Probe:
    """`measure` runs on the GPU, in a process of its own; `judge` answers from its figures, anywhere.

    `look` is what to look at if the answer is not the expected one. `variables` are set in the probe's environment.
    """

    name: str
    finding: str
    question: str
    limit_s: int
    measure: Callable[[], Figures]
    judge: Callable[[Figures], Answer]
    expected: bool | None
    look: str
    variables: Mapping[str, str] = field(default_factory=dict)


def micro(seconds: float) -> str:
    """`12.3 µs`."""
    return f"{1e6 * seconds:.3g} µs"


def percent(share: float) -> str:
    """`+3.1 %`."""
    return f"{100 * share:+.1f} %"
