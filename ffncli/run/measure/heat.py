"""The cells of a heat map: a matrix cut into a few rows and columns, each cell by its largest value."""

from __future__ import annotations

import math

from torch import Tensor


def span(part: int, size: int, count: int) -> slice:
    """The indices that cell `part` of `count` stands for, along an axis of `size`."""
    start = part * size // count
    return slice(start, max(start + 1, (part + 1) * size // count))


def cells_of(x: Tensor, most_rows: int, most_columns: int) -> list[list[Tensor]]:
    """A matrix as cells of neighbouring values, at most so many rows and columns of them."""
    rows, columns = min(x.shape[0], most_rows), min(x.shape[1], most_columns)
    return [[x[span(i, x.shape[0], rows), span(j, x.shape[1], columns)] for j in range(columns)] for i in range(rows)]


def largest(cell: Tensor) -> float:
    """The value of largest size, so that no outlier is lost; NaN if there is one, then infinity."""
    return math.nan if bool(cell.isnan().any()) else float(cell.flatten()[cell.abs().argmax()])


def values_of_a_cell(x: Tensor, cells: list[list[Tensor]]) -> int:
    """How many values a cell stands for at most."""
    return math.ceil(x.shape[0] / len(cells)) * math.ceil(x.shape[1] / len(cells[0]))
