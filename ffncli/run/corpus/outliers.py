"""Outlier dimensions of what enters the FFNs, and massive activations in the residual stream.

An outlier dimension has values of at least a limit (6 by default) for at least 6 % of the tokens, in at least a quarter
of the layers (Dettmers et al. 2022, LLM.int8(), section 3.2). A massive activation is a value of the residual stream
above 100 that is at least 1,000 times the median of its text's values by size (Sun et al. 2024, section 2).
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nlargest

import torch
from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.models.files.json_records import Count
from ffncli.run.corpus.sums import RunningFigures
from ffncli.run.measure.statistics import chunk_size

SHARE_OF_TOKENS, SHARE_OF_LAYERS = 0.06, 0.25
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0
_MOST_KEPT = 100  # massive activations of a layer, the largest


class Exceeding(RunningFigures):
    """For each dimension of tensors [tokens, dimensions]: for how many `tokens` it is at least `limit` by size
    (`count`), and its largest value by size with its place (`largest`, `largest_at` [dimensions, 2])."""

    def __init__(self, dimensions: int, limit: float, device: torch.device | str = "cpu") -> None:
        self.limit = limit
        self.tokens = torch.zeros((), dtype=torch.int64)
        self.count = torch.zeros(dimensions, dtype=torch.int64, device=device)
        self.largest = torch.zeros(dimensions, dtype=torch.float64, device=device)
        self.largest_at = torch.full((dimensions, 2), -1, dtype=torch.int64, device=device)

    def add(self, values: Tensor, places: Tensor) -> None:
        """Add tokens [tokens, dimensions] at `places` [tokens, 2]. NaN exceeds nothing."""
        self.tokens += values.shape[0]
        rows = max(1, chunk_size(values) // max(1, values.shape[1]))
        for start in range(0, values.shape[0], rows):
            self._add(values[start : start + rows], places[start : start + rows])

    def _add(self, values: Tensor, places: Tensor) -> None:
        size = values.abs()
        most = size.amax(0)
        if most.isnan().any():
            size = size.nan_to_num(0.0, torch.inf)
            most = size.amax(0)
        over = (most >= self.limit).nonzero().flatten()
        if over.numel():
            self.count[over] += (size[:, over] >= self.limit).sum(0)
        larger = (most > self.largest.abs()).nonzero().flatten()
        if larger.numel():
            rows = size[:, larger].argmax(0)
            self.largest[larger] = values[rows, larger].double()
            self.largest_at[larger] = places[rows]

    @property
    def outliers(self) -> list[int]:
        """The dimensions that reach the limit for enough of the tokens."""
        least = SHARE_OF_TOKENS * int(self.tokens)
        return (self.count >= max(1.0, least)).nonzero().flatten().tolist()


def in_many_layers(layers: Sequence[Exceeding]) -> tuple[int, ...]:
    """The dimensions that are outliers in at least a quarter of the layers."""
    counts: dict[int, int] = {}
    for layer in layers:
        for dimension in layer.outliers:
            counts[dimension] = counts.get(dimension, 0) + 1
    return tuple(sorted(d for d, count in counts.items() if count >= SHARE_OF_LAYERS * len(layers)))


@dataclass(frozen=True)
class MassiveActivation:
    """A value of the residual stream after a layer: `ratio` is its size over the `median` of its text's sizes."""

    text: int
    token: int
    dimension: int
    value: float
    median: float
    ratio: float | None


@dataclass(frozen=True)
class MassiveFigures:
    """The massive activations of a layer so far: how many, and the largest."""

    count: Count
    kept: tuple[MassiveActivation, ...]


class Massive:
    """The massive activations of a layer's output: how many (`count`), and the largest ones (`kept`)."""

    def __init__(self) -> None:
        self.count = 0
        self.kept: list[MassiveActivation] = []

    def add(self, text: int, values: Tensor) -> None:
        """Add a text's values [tokens, d_model]. NaN is not massive."""
        size = values.detach().abs()
        if not bool((size > MASSIVE).any()):
            return
        median = float(size.float().flatten().median())
        places = (size > max(MASSIVE, MASSIVE_RATIO * median)).nonzero()
        self.count += len(places)
        activations = [
            MassiveActivation(text, token, dimension, value, median, abs(value) / median if median else None)
            for (token, dimension), value in zip(places.tolist(), values[tuple(places.t())].tolist(), strict=True)
        ]
        self.kept = nlargest(_MOST_KEPT, [*self.kept, *activations], key=lambda one: abs(one.value))
