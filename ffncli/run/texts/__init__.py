"""Check the founding texts (guides, notes, a notebook): compute each statement about a block and judge it."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module

import torch

from ffncli.models.examples import find
from ffncli.run.engine.prepare import Prepared, prepare
from ffncli.run.texts.fact import Fact, Verdict

# maps an example to the name of its founding text in docs/findings.md
TEXTS: Mapping[str, str] = {
    "explained": "step-by-step explanation",
    "llama": "guide to the Llama engine",
    "conv": "notes on the layer",
    "bert": "questions and answers",
    "notebook": "notebook",
}


def facts(name: str, ready: Prepared) -> tuple[Fact, ...]:
    """Return the facts that the example's founding text states, in order, computed on the example's prepared run."""
    with torch.no_grad():
        text_facts: tuple[Fact, ...] = import_module(f"ffncli.run.texts.{name}").facts(ready)
    return text_facts


# The topics to show first; the other topics follow, ordered by verdict.
FIRST = (
    "gelu(0.21)", "gelu(-0.15)", "gelu(0.28)", "collectives of one block",
    "the block equals two 1×1 convolutions over (B, d_model, L)", "as 1×1 convolutions it can be faster",
    "the FFN's share of a layer's parameters", "zeros that dropout makes", "attention is linear",
    "the ranges show that the block is non-linear", "biases bring shift invariance", "4x is the balance point",
)  # fmt: skip
_ORDER: tuple[Verdict, ...] = ("wrong", "depends", "holds")


@dataclass(frozen=True)
class TextClaim:
    """A founding text's claim. `figure` is computed and appears in the output of `command`; `why` explains it."""

    text: str
    claim: str
    verdict: Verdict
    figure: str
    why: str
    command: str


def claims() -> tuple[TextClaim, ...]:
    """Run all five examples and return every checkable claim. Raise FFNError if this machine cannot run them."""
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
