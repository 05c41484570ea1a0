"""Figures of units and of dimensions that are added up while tokens stream by: no activation is kept.

Of a chunk of tokens only extremes, sums and counts are taken from every value; where a unit's extreme was, and which
tokens belong to its largest values, is looked up in the few columns that have new ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

import torch
from torch import Tensor

from ffncli.run.measure.statistics import chunk_size

NOWHERE = -1
BYTES_OF_UNIT, BYTES_OF_VALUE = 64, 24  # of figures; of each of a unit's largest values with its place


class RunningFigures:
    """Figures that are tensors, which an interrupted run can go on from."""

    def state(self) -> dict[str, Tensor]:
        """All figures so far, by their names."""
        return {name: value.cpu() for name, value in vars(self).items() if isinstance(value, Tensor)}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Go on from such figures. Raises KeyError or RuntimeError for those of something else."""
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                value.copy_(state[name])


class UnitSums(RunningFigures):
    """Figures of the columns of tensors [tokens, columns], for `groups` of tensors: an expert's units are a group.

    `high` and `low` are the extremes of each column, `high_at` and `low_at` [columns, 2] their places, a text's number
    and a token's position in it; where several values are equal, one of them. `largest` [columns, top] are each
    column's largest values in descending order, with their places in `largest_at`. Values that are not finite are
    counted in `not_finite`, and are zero elsewhere.
    """

    def __init__(self, columns: int, groups: int = 1, top: int = 0, device: torch.device | str = "cpu") -> None:
        size = columns * groups
        self.columns, self.groups, self.top = columns, groups, top
        self.tokens = torch.zeros(groups, dtype=torch.int64)
        self.not_finite = torch.zeros(groups, dtype=torch.int64)
        self.active = torch.zeros(size, dtype=torch.float64, device=device)
        self.total = torch.zeros(size, dtype=torch.float64, device=device)
        self.high = torch.full((size,), -inf, device=device, dtype=torch.float64)
        self.low = torch.full((size,), inf, device=device, dtype=torch.float64)
        self.high_at = torch.full((size, 2), NOWHERE, device=device, dtype=torch.int64)
        self.low_at = self.high_at.clone()
        self.largest = torch.full((size, top), -inf, device=device, dtype=torch.float64)
        self.largest_at = torch.full((size, top, 2), NOWHERE, device=device, dtype=torch.int64)

    def add(self, values: Tensor, places: Tensor, active: Tensor | None = None, group: int = 0) -> None:
        """Add tokens [tokens, columns] of a group at `places` [tokens, 2]. A unit is active for a token where `active`,
        shaped as `values` (default: `values` themselves), is above zero."""
        self.tokens[group] += values.shape[0]
        part = slice(group * self.columns, (group + 1) * self.columns)
        rows = max(1, chunk_size(values) // max(1, self.columns))
        for start in range(0, values.shape[0], rows):
            piece = slice(start, start + rows)
            self._add(values[piece], places[piece], values[piece] if active is None else active[piece], group, part)

    def _add(self, values: Tensor, places: Tensor, active: Tensor, group: int, part: slice) -> None:
        values = values.float() if values.dtype in (torch.bfloat16, torch.float16) else values
        total = values.sum(0)
        if not torch.isfinite(total).all():
            self.not_finite[group] += int((~values.isfinite()).sum())
            values = values.nan_to_num(0.0, 0.0, 0.0)
            total = values.sum(0, dtype=torch.float64)
        self.total[part] += total
        self.active[part] += (active > 0).to(values.dtype).sum(0)
        high, low = values.amax(0), values.amin(0)
        _take(self.high[part], self.high_at[part], high, high > self.high[part], values, places)
        _take(self.low[part], self.low_at[part], low, low < self.low[part], values, places)
        if self.top:
            self._keep_largest(values, places, high, part)

    def _keep_largest(self, values: Tensor, places: Tensor, high: Tensor, part: slice) -> None:
        kept, at = self.largest[part], self.largest_at[part]
        better = (high > kept[:, -1]).nonzero().flatten()
        if not better.numel():
            return
        new, rows = values[:, better].topk(min(self.top, values.shape[0]), 0)
        every = torch.cat([kept[better], new.t().double()], 1)
        everywhere = torch.cat([at[better], places[rows.t()]], 1)
        kept[better], order = every.topk(self.top, 1)
        at[better] = everywhere.gather(1, order.unsqueeze(-1).expand(-1, -1, 2))


def _take(best: Tensor, at: Tensor, new: Tensor, better: Tensor, values: Tensor, places: Tensor) -> None:
    """Take the extremes `new` of `values` where they are `better`, with their places."""
    columns = better.nonzero().flatten()
    if columns.numel():
        best[columns] = new[columns].double()
        rows = (values[:, columns] == new[columns]).byte().argmax(0)
        at[columns] = places[rows]
