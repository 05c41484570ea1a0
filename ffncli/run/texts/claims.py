"""The claims of all founding texts with their verdicts: what docs/claims.md lists."""

from __future__ import annotations

from dataclasses import dataclass

from ffncli.models.examples import find
from ffncli.run.engine.prepare import prepare
from ffncli.run.texts import TEXTS, facts
from ffncli.run.texts.fact import Fact, Verdict

# The topics that a reader should meet first; the others follow by verdict.
FIRST = (
    "gelu(0.21)", "gelu(-0.15)", "gelu(0.28)", "collectives of one block",
    "the block equals two 1×1 convolutions over (B, d_model, L)", "as 1×1 convolutions it can be faster",
    "the FFN's share of a layer's parameters", "zeros that dropout makes", "attention is linear",
    "the ranges show that the block is non-linear", "biases bring shift invariance", "4x is the balance point",
)  # fmt: skip
_ORDER: tuple[Verdict, ...] = ("wrong", "depends", "holds")


@dataclass(frozen=True)
class TextClaim:
    """One claim of one text. `figure` is computed and appears in the output of `command`; `why` explains it."""

    text: str
    claim: str
    verdict: Verdict
    figure: str
    why: str
    command: str


def claims() -> tuple[TextClaim, ...]:
    """Return every claim that can be checked: runs all five texts. Raises FFNError if this machine cannot run them."""
    items: list[tuple[str, str, Fact]] = []
    for name, text in TEXTS.items():
        example = find(name)
        items += [(name, text, fact) for fact in facts(name, prepare(example)) if fact.verdict]

    def rank(item: tuple[str, str, Fact]) -> tuple[int, int]:
        fact = item[2]
        return FIRST.index(fact.topic) if fact.topic in FIRST else len(FIRST), _ORDER.index(fact.verdict)

    out = []
    for name, text, fact in sorted(items, key=rank):
        claim = f"{fact.topic}: {fact.said}" if fact.said else fact.topic
        command = fact.command or f"ffn trace --example {name}"
        out.append(TextClaim(text, claim, fact.verdict, fact.found, fact.note, command))
    return tuple(out)
