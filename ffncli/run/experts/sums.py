"""The routes of a layer over a corpus, added up token by token: load, pairs, coverage, reuse, weight of the output."""

from __future__ import annotations

import torch
from torch import Tensor

from ffncli.run.corpus.listen import Receiver

MOST_ROUTES = 1 << 20  # tokens whose routes are kept for a file


class RouteSums(Receiver):
    """Receives a layer's routes. `distances[d]` counts the choices of an expert since whose last choice d others were
    chosen; `first` counts those that were an expert's first. A token's experts are chosen one after the other, the
    heaviest first; texts follow each other in the order of the corpus.

    `coverage` are pairs of a number of tokens, 1, 2, 4, ... and the last, and how many experts had been chosen by then.
    `change` sums for each expert the norm of what it adds to a token's output over that of the output.
    """

    def __init__(self, experts: int, keep: bool) -> None:
        self.experts, self.tokens, self.first, self._keep = experts, 0, 0, keep
        self.chosen = torch.zeros(experts, dtype=torch.int64)
        self.weight = torch.zeros(experts, dtype=torch.float64)
        self.pairs = torch.zeros(experts, experts, dtype=torch.float64)
        self.distances = torch.zeros(experts, dtype=torch.int64)
        self.change = torch.zeros(experts, dtype=torch.float64)
        self.coverage: list[tuple[int, int]] = []
        self.identity = 0
        self.routes: list[Tensor] = []
        self._last = torch.full((experts,), -1, dtype=torch.int64)
        self._clock = 0
        self._norms: list[tuple[int, Tensor, Tensor]] = []

    def route(self, weights: Tensor, places: Tensor) -> None:
        """Count a batch's choices; columns after the experts are experts that return their input."""
        weights = weights.detach().cpu()
        self.identity += int((weights[:, self.experts :] != 0).sum())
        weights = weights[:, : self.experts]
        chosen = weights != 0
        self.chosen += chosen.sum(0)
        self.weight += weights.double().sum(0)
        one = chosen.float()
        self.pairs += one.t().double() @ one.double()
        if self._keep and sum(map(len, self.routes)) < MOST_ROUTES:
            self.routes.append(weights)
        order = weights.double().abs().argsort(dim=1, descending=True, stable=True)
        for row, count in zip(order, chosen.sum(1).tolist(), strict=True):
            self._token(row[:count])

    def _token(self, experts: Tensor) -> None:
        """One token's experts, the heaviest first."""
        last = self._last[experts]
        since = (self._last[None] > last[:, None]).sum(1)
        since += torch.tril(last[None] < last[:, None], -1).sum(1)  # those of this token that came before
        known = last >= 0
        self.first += int((~known).sum())
        self.distances += torch.bincount(since[known], minlength=self.experts)
        self._last[experts] = self._clock + torch.arange(len(experts))
        self._clock += len(experts)
        self.tokens += 1
        if self.tokens & (self.tokens - 1) == 0:
            self.coverage.append((self.tokens, self.covered))

    @property
    def covered(self) -> int:
        """How many experts have been chosen."""
        return int((self._last >= 0).sum())

    def written(self, expert: int, tokens: Tensor, values: Tensor) -> None:
        """What an expert adds, until the whole output is known."""
        self._norms.append((expert, tokens, torch.linalg.vector_norm(values.double(), dim=-1)))

    def left(self, output: Tensor) -> None:
        """The output of the batch's tokens."""
        whole = torch.linalg.vector_norm(output.double(), dim=-1).clamp_min(1e-300)
        for expert, tokens, norm in self._norms:
            self.change[expert] += float((norm / whole[tokens]).sum())
        self._norms.clear()

    def hit_rates(self) -> list[float]:
        """For caches of 1, 2, ... experts that drop the one chosen longest ago: the share of choices found there."""
        choices = int(self.chosen.sum())
        return [hits / choices for hits in self.distances.cumsum(0).tolist()] if choices else []
