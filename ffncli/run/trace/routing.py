"""What a router and a sampler choose: each token's experts and their load, the sets of a vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2

from torch import Tensor

from ffncli.block.steps import Step, routes
from ffncli.show.tensors import edges


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
    """Return the load of the block's experts; None in a dense block. `tensors` must have the route [..., experts]."""
    for name, experts in routes(steps).items():
        columns = slice(experts.experts.size + experts.identity)
        return _load(name, tensors[name].flatten(0, -2)[:, columns], experts.experts.size)
    return None


def _load(step: str, route: Tensor, experts: int) -> Routing:
    """Return the load of `experts` experts; columns of the route [tokens, experts] beyond are identity experts."""
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
    """Return the choices of the first and last tokens, `show` in all (None: all); `tensors` must hold every route."""
    out = []
    for name, op in routes(steps).items():
        flat = tensors[name].flatten(0, -2)[:, : op.experts.size + op.identity]
        for token in edges(flat.shape[0], flat.shape[0] if show is None else show):
            weights = flat[token].double().tolist()
            order = sorted((e for e, w in enumerate(weights) if w), key=lambda e: -abs(weights[e]))
            out.append(Chosen(name, token, tuple(order), tuple(weights[e] for e in order)))
    return tuple(out)


@dataclass(frozen=True)
class Candidate:
    """One entry of the vocabulary. `cumulative` is the mass of all entries at least as probable, itself included."""

    id: int
    probability: float
    cumulative: float
    in_top_k: bool
    in_top_p: bool


@dataclass(frozen=True)
class Sampling:
    """One token's choice. `position` is its index on the axes before the vocabulary.

    The top-k set are the `top_k` most probable entries; the top-p set the fewest of the most probable ones that
    together have at least `top_p` (nucleus sampling: Holtzman et al. 2019, arXiv:1904.09751). `candidates` are the most
    probable, as many as requested, in order. If a probability is not a number there is nothing to pick: the
    results are None, and there are no candidates.
    """

    position: tuple[int, ...]
    argmax: int | None
    probability: float | None
    top_k: int
    top_k_mass: float | None
    top_p: float
    top_p_count: int | None
    top_p_mass: float | None
    candidates: tuple[Candidate, ...]


def sampling(probs: Tensor, top_k: int, top_p: float, show: int | None = 8) -> tuple[Sampling, ...]:
    """Return the sets of `probs` [..., vocab], for the first and last positions of every axis, `show` in all.

    `show` None means all. `top_k` is cut to the vocabulary. Each record holds its top-k set, or `show` candidates if
    that is more. Sums are in float64.
    """
    vocab = probs.shape[-1]
    top_k = min(top_k, vocab)
    listed = vocab if show is None else min(vocab, max(top_k, show))
    index = [edges(size, size if show is None else show) for size in probs.shape[:-1]]
    return tuple(_one(probs[at].double(), at, top_k, top_p, listed) for at in product(*index))


def _one(probs: Tensor, position: tuple[int, ...], top_k: int, top_p: float, listed: int) -> Sampling:
    if not bool(probs.isfinite().all()):
        return Sampling(position, None, None, top_k, None, top_p, None, None, ())
    ordered, ids = probs.sort(descending=True, stable=True)
    mass = ordered.cumsum(0)
    # One more than the entries that do not reach it; the sum of all may round to just below 1.
    count = min(int((mass < top_p).sum()) + 1, len(ordered))
    rows = zip(ids[:listed].tolist(), ordered[:listed].tolist(), mass[:listed].tolist(), strict=True)
    candidates = tuple(Candidate(i, p, m, at < top_k, at < count) for at, (i, p, m) in enumerate(rows))
    return Sampling(
        position, candidates[0].id, candidates[0].probability, top_k, float(mass[top_k - 1]), top_p, count,
        float(mass[count - 1]), candidates,
    )  # fmt: skip
