"""Choices of a router and a sampler: the experts of each token, the load of the experts, the top-k and top-p sets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from ffncli.block.steps import Step, routes
from ffncli.run.engine.router_losses import RouterLoss, RouterSums, load_figures, routers
from ffncli.show.tensors import edges


@dataclass(frozen=True)
class Routing:
    """The load of the routed experts over `tokens` tokens.

    `tokens_per_expert` counts the tokens routed to each expert; the sum of these counts is `choices`, and with an even
    spread each expert would receive `even_load`. `idle_experts` receive no tokens. `busiest_expert` (the lowest index
    if several tie) receives the fraction `busiest_share` of the choices. `entropy_bits` is the entropy of the experts'
    fractions, at most `max_entropy_bits` = log2 of the number of experts. `identity_choices` counts choices of identity
    experts, which have no weights and return their input; these are excluded from all other counts. If there are no
    choices, the busiest expert and the entropy are None. `losses` are the losses that training adds for balance.
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
    losses: tuple[RouterLoss, ...] = ()


def routing_of(steps: Sequence[Step], tensors: Mapping[str, Tensor]) -> Routing | None:
    """Return the load of the block's experts, None in a dense block, from the route [..., experts]; with the router's
    losses if `tensors` has its logits."""
    ops = routers(steps)
    for name, experts in routes(steps).items():
        columns = slice(experts.experts.size + experts.identity)
        flat, (op, logits) = tensors[name].flatten(0, -2)[:, columns], ops[name]
        load = _load(name, flat, experts.experts.size)
        if logits not in tensors:
            return load
        sums = RouterSums(op)
        sums.add(tensors[logits])
        return replace(load, losses=sums.losses([int(n) for n in (flat != 0).sum(0)]))
    return None


def _load(step: str, route: Tensor, experts: int) -> Routing:
    """Return the load of the first `experts` columns of `route` [tokens, experts]; the other columns belong to identity
    experts."""
    chosen: list[int] = (route != 0).sum(0).tolist()
    load = tuple(chosen[:experts])
    figures = load_figures(load)
    return Routing(step, route.shape[0], tokens_per_expert=load, identity_choices=sum(chosen[experts:]), **figures)


@dataclass(frozen=True)
class Chosen:
    """The experts chosen for one token, by descending weight. `token` is a row of the flattened input.

    `step` is the route's name. Indices from the expert count upwards are identity experts.
    """

    step: str
    token: int
    experts: tuple[int, ...]
    weights: tuple[float, ...]


def chosen_experts(steps: Sequence[Step], tensors: Mapping[str, Tensor], show: int | None = None) -> tuple[Chosen, ...]:
    """Return the choices of the first and last tokens, `show` in total (None: all), from every route."""
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
    """One entry of the vocabulary; `cumulative` is the total probability of this and all higher-ranked entries."""

    id: int
    probability: float
    cumulative: float
    in_top_k: bool
    in_top_p: bool


@dataclass(frozen=True)
class Sampling:
    """The choices of a sampler at one position, which is an index into the axes before the vocabulary.

    The top-k set contains the `top_k` most probable entries. The top-p set is the smallest set of most probable entries
    with a total probability of at least `top_p` (nucleus sampling: Holtzman et al. 2019, arXiv:1904.09751).
    `candidates` are the requested number of most probable entries, in descending order. If a probability is NaN or Inf,
    the results are None, and there are no candidates.
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
    """Return the top-k and top-p sets of `probs` [..., vocab] for the first and last positions, `show` per axis.

    If `show` is None, all positions and candidates are returned. `top_k` is limited to the vocabulary size. Each record
    lists max(top_k, show) candidates. Sums are computed in float64.
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
    # The set is one entry longer than the longest prefix below `top_p`; min() matters if the total rounds to below 1.
    count = min(int((mass < top_p).sum()) + 1, len(ordered))
    rows = zip(ids[:listed].tolist(), ordered[:listed].tolist(), mass[:listed].tolist(), strict=True)
    candidates = tuple(Candidate(i, p, m, at < top_k, at < count) for at, (i, p, m) in enumerate(rows))
    return Sampling(
        position, candidates[0].id, candidates[0].probability, top_k, float(mass[top_k - 1]), top_p, count,
        float(mass[count - 1]), candidates,
    )  # fmt: skip
