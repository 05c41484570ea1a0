"""The founding texts, run: each statement about a block, with the computed value and whether it holds."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from ffncli.run.texts.fact import Fact

if TYPE_CHECKING:
    from ffncli.run.engine.prepare import Prepared

# example → the text, as docs/claims.md calls it
TEXTS: Mapping[str, str] = {
    "explained": "step-by-step explanation",
    "llama": "guide to the Llama engine",
    "conv": "notes on the layer",
    "bert": "questions and answers",
    "notebook": "notebook",
}


def facts(name: str, ready: Prepared) -> tuple[Fact, ...]:
    """Return the facts that the text of that example states, computed on its prepared run, in the order of the text."""
    import torch

    with torch.no_grad():
        text_facts: tuple[Fact, ...] = import_module(f"ffncli.run.texts.{name}").facts(ready)
    return text_facts
