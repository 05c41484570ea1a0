"""Printed formulas: a step's right-hand side, and the symbols of its weights (W1, W_router)."""

from collections.abc import Sequence

from ffncli.block.steps import Step, walk


def right_hand_side(step: Step, steps: Sequence[Step]) -> str:
    """Return the printed right-hand side, such as `x · W1 + b1`."""
    return step.op.formula(step.inputs, lambda parameter: weight_symbol(step.output, parameter, steps))


def weight_symbol(output: str, parameter: str, steps: Sequence[Step]) -> str:
    """Return the symbol of a parameter in printed formulas. In a gated block W1 is gate, W3 up and W2 down; in a plain
    block W1 is up and W2 down.

    Other symbols are W_router and shared.W1. In the final layer the symbols are just W and b.
    """
    prefix, _, name = output.rpartition(".")
    gated = any(s.output == f"{prefix}.gate".lstrip(".") for _, s in walk(steps))
    number = {"gate": "1", "up": "3" if gated else "1", "down": "2", "logits": ""}.get(name, f"_{name}")
    letter = {"weight": "W", "bias": "b", "correction": "b", "factor": "s"}.get(parameter, parameter)
    return (f"{prefix}." if prefix else "") + letter + number
