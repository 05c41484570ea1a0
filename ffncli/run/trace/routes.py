"""The experts that a router chose for each token, read off its step's output."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from ffncli.block.steps import Step, routes
from ffncli.dataclass import dataclass
from ffncli.show.tensors import edges


@dataclass(frozen=True)
class Chosen:
    """One token's experts the largest weight first. `token` is a row of the flattened input.

    `step` is the route's name. Numbers from the expert count upwards are identity experts.
    """

    step: str
    token: int
    experts: tuple[int, ...]
    weights: tuple[float, ...]


def chosen_experts(steps: Sequence[Step], tensors: Mapping[str, Tensor], show: int | None = None) -> tuple[Chosen, ...]:
    """The choice for the first and last tokens, `show` in all (None: all); `tensors` must hold every route."""
    out = []
    for name, op in routes(steps).items():
        flat = tensors[name].flatten(0, -2)[:, : op.experts.size + op.identity]
        for token in edges(flat.shape[0], flat.shape[0] if show is None else show):
            weights = flat[token].double().tolist()
            order = sorted((e for e, w in enumerate(weights) if w), key=lambda e: -abs(weights[e]))
            out.append(Chosen(name, token, tuple(order), tuple(weights[e] for e in order)))
    return tuple(out)
