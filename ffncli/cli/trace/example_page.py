"""The statements of a text, computed, next to the trace of its block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.show.parts import Part, Table

if TYPE_CHECKING:
    from ffncli.run.texts.fact import Fact


def sentence(fact: Fact) -> str:
    """`gelu(0.21): 0.1225; the text says 0.115`; the text's value is left out if it equals the computed one."""
    stated = f"; the text says {fact.said}" if fact.said not in ("", fact.found) else ""
    return f"{fact.topic}: {fact.found}{stated}"


def facts_table(facts: Sequence[Fact]) -> list[Part]:
    """A verdict and a sentence per fact, its note below; in two columns, because their text may wrap."""
    rows: list[tuple[str | None, str]] = []
    wrong: set[int] = set()
    for fact in facts:
        if fact.verdict == "wrong":
            wrong.add(len(rows))
        rows.append((fact.verdict or None, sentence(fact)))
        if fact.note:
            rows.append(("", f"  {fact.note}"))
    return [Table(("verdict", "fact"), rows, "what the text says, computed", frozenset(wrong))]
