"""Variants of a block: without a non-linearity, with or without biases, with a final layer behind it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ffncli.block.recipe import size
from ffncli.block.steps import Activation, Add, Axis, Experts, Linear, Op, Route, Step, block_inputs


def without_nonlinearity(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps with the identity in place of every activation and its limits, except inside experts."""
    return tuple(replace(s, op=Activation("identity")) if isinstance(s.op, Activation) else s for s in steps)


def with_biases(steps: Sequence[Step], bias: bool) -> tuple[Step, ...]:
    """The steps with a bias in every Linear, or in none, inside experts too."""

    def changed(op: Op) -> Op:
        if isinstance(op, Experts):
            return replace(op, program=with_biases(op.program, bias))
        return replace(op, bias=bias) if isinstance(op, Linear) else op

    return tuple(replace(step, op=changed(step.op)) for step in steps)


def final_layer(source: str, d_model: int, vocab: int, bias: bool) -> tuple[Step, ...]:
    """`logits = source · W (+ b)` over the vocabulary, and `probs = softmax(logits)`.

    A softmax over an axis is a Route that chooses all of it. Raises FFNError for an invalid vocabulary size.
    """
    axis = Axis("vocab", size("vocab", vocab))
    softmax = Route(axis, vocab, renormalise=False, score_dtype="input")
    return (
        Step("logits", Linear(Axis("d_model", d_model), axis, bias), (source,)),
        Step("probs", softmax, ("logits",)),
    )


def merged_first(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The block after `merged = x + attention`, for an engine that defers the attention's residual add to the FFN."""
    (entry,) = block_inputs(steps)
    moved = [replace(s, inputs=tuple("merged" if name == entry else name for name in s.inputs)) for s in steps]
    return (Step("merged", Add(), (entry, "attention")), *moved)
