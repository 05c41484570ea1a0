"""How a router spreads its tokens over the experts: the load of each, compared with an even spread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import log2

from torch import Tensor

from ffncli.block.steps import Step, routes
from ffncli.dataclass import dataclass


@dataclass(frozen=True)
class Routing:
    """The load of the routed experts over `tokens` tokens.

    `tokens_per_expert` counts the tokens that each expert receives; their sum is `choices`, and with an even spread
    each would receive `even_load`. `idle_experts` receive none. `busiest_expert` (the first of equal ones) receives
    `busiest_share` of the choices. `entropy_bits` is the entropy of these shares, at most `max_entropy_bits` = log2 of
    the number of experts. `identity_choices` went to experts without weights, which return their input; they count
    nowhere else. Without any choice, there is no busiest expert and no entropy.
    """

    step: str
    tokens: int
    tokens_per_expert: tuple[int, ...]
    choices: int
    even_load: float
    idle_experts: tuple[int, ...]
    busiest_expert: int | None
    busiest_share: float | None
    entropy_bits: float | None
    max_entropy_bits: float
    identity_choices: int = 0


def routing_of(steps: Sequence[Step], tensors: Mapping[str, Tensor]) -> Routing | None:
    """The load of the block's experts; None in a dense block. `tensors` must have the route [..., experts]."""
    for name, experts in routes(steps).items():
        columns = slice(experts.experts.size + experts.identity)
        return _load(name, tensors[name].flatten(0, -2)[:, columns], experts.experts.size)
    return None


def _load(step: str, route: Tensor, experts: int) -> Routing:
    """The load of so many `experts`; columns of the route [tokens, experts] beyond those are identity experts."""
    chosen: list[int] = (route != 0).sum(0).tolist()
    load = tuple(chosen[:experts])
    total, most = sum(load), max(load)
    shares = [tokens / total for tokens in load if tokens]
    return Routing(
        step=step,
        tokens=route.shape[0],
        tokens_per_expert=load,
        choices=total,
        even_load=total / experts,
        idle_experts=tuple(expert for expert, tokens in enumerate(load) if not tokens),
        busiest_expert=load.index(most) if total else None,
        busiest_share=most / total if total else None,
        entropy_bits=sum(-share * log2(share) for share in shares) if total else None,
        max_entropy_bits=log2(experts),
        identity_choices=sum(chosen[experts:]),
    )
