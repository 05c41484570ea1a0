"""A sampler's choices from a final layer's probabilities: argmax, the top-k set and the top-p set."""

from __future__ import annotations

from itertools import product

from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.show.tensors import edges


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
    """The sets of `probs` [..., vocab], for the first and last positions of every axis, `show` in all (None: all).

    `top_k` is cut to the vocabulary. Each record holds its top-k set, or `show` candidates if that is more. Sums
    are made in float64.
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
