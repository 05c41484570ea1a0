"""Steps beside a block: the final layer that follows the last one, and the merge-add that may come first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ffncli.block.recipe import size
from ffncli.block.steps import Add, Axis, Linear, Route, Step, block_inputs


def final_layer(source: str, d_model: int, vocab: int, bias: bool) -> tuple[Step, ...]:
    """`logits = source · W (+ b)` over the vocabulary, and `probs = softmax(logits)`.

    A softmax over an axis is a Route that chooses all of it. Raises FFNError for a vocabulary that is no size.
    """
    axis = Axis("vocab", size("vocab", vocab))
    softmax = Route(axis, vocab, renormalise=False, score_dtype="input")
    return (
        Step("logits", Linear(Axis("d_model", d_model), axis, bias), (source,)),
        Step("probs", softmax, ("logits",)),
    )


def merged_first(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The block behind `merged = x + attention`: how an engine runs it that keeps the attention's residual for it."""
    (entry,) = block_inputs(steps)
    moved = [replace(s, inputs=tuple("merged" if name == entry else name for name in s.inputs)) for s in steps]
    return (Step("merged", Add(), (entry, "attention")), *moved)
