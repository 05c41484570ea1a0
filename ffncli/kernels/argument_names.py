"""The names by which a user's function takes a block's weights, and which of them a block does not have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ffncli.block.steps import Step, parameters


def argument(parameter: str) -> str:
    """A weight's name as a function's argument: `up.weight` is up, `up.bias` up_bias, `shared.up.weight` shared__up."""
    step, _, kind = parameter.rpartition(".")
    return step.replace(".", "__") + ("" if kind == "weight" and step != "act" else f"_{kind}")


def by_argument(steps: Sequence[Step]) -> dict[str, str]:
    """Argument → the parameter of the block that fills it."""
    return {argument(name): name for name in parameters(steps)}


def missing_weight(required: Iterable[str], steps: Sequence[Step]) -> tuple[str, str] | None:
    """(why a function cannot be called, what the block has), of the first required argument that no weight fills."""
    weights = by_argument(steps)
    name = next((name for name in required if name not in weights), None)
    if name is None:
        return None
    return f"needs {name}, which this block does not have", f"this block has {', '.join(weights)}"
