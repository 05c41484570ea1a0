"""Where the numbers of a heat map come from: of each cell the place of its value, and what it was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ffncli.run.measure.heat import span
from ffncli.run.saved.saved import Saved, SavedStep

_TERMS = 3  # of a product of matrices: the largest by size
_MOST_NUMBERS = 12_000  # of a linear step, so that a page stays small: then fewer terms, then none
_MOST_CELLS = 1_500  # of an element-wise step


def origins(saved: Saved, step: SavedStep, tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """For the heat map of a step, `grid` rows and columns of cells: `origins`, one list for each cell, row by row.

    Each begins with the place [token, unit] of the cell's value, the largest by size, counted from the cell's first. Of
    a linear step there follow its
    largest terms, each its index in the sum and its value, then what all others add up to, the bias among them; of a
    step that computes element by element, the values of its inputs there. Empty where the file has no weights, and
    where the map is too large to carry them.
    """
    x, inputs = tensors[step.name], [tensors.get(name) for name in step.inputs]
    weight = f"{step.name}.weight"
    if step.op == "linear" and weight in saved.weights and inputs and inputs[0] is not None:
        return _products(inputs[0], saved.weight(weight), x, grid) | {"weight": _symbol(step)}
    if inputs and all(one is not None and one.shape == x.shape for one in inputs) and grid[0] * grid[1] <= _MOST_CELLS:
        rows, columns = _places(x, grid)
        values = [one[rows, columns] for one in inputs if one is not None]
        there = torch.stack(values, 1).tolist()
        places = _inside_cells(x, grid, rows, columns)
        return {"origins": [[*at, *map(_short, some)] for at, some in zip(places, there, strict=True)]}
    return {}


def _places(x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(token, unit) of the value that each cell shows."""
    rows, columns = [], []
    for i in range(grid[0]):
        for j in range(grid[1]):
            down, across = span(i, x.shape[0], grid[0]), span(j, x.shape[1], grid[1])
            cell = x[down, across]
            at = int(cell.abs().nan_to_num(nan=torch.inf).argmax())
            rows.append(down.start + at // cell.shape[1])
            columns.append(across.start + at % cell.shape[1])
    return torch.tensor(rows), torch.tensor(columns)


def _inside_cells(x: Tensor, grid: tuple[int, int], rows: Tensor, columns: Tensor) -> list[list[int]]:
    """Places counted from the first of their cell."""
    down, across = (
        [span(at, size, count).start for at in range(count)] for size, count in zip(x.shape, grid, strict=True)
    )
    first = [(i, j) for i in down for j in across]
    return (torch.stack([rows, columns], 1) - torch.tensor(first)).tolist()


def _products(a: Tensor, w: Tensor, x: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
    """The largest terms of Σ a[token, k] · w[unit, k], in float64."""
    rows, columns = _places(x, grid)
    count = min(_TERMS, a.shape[1], (_MOST_NUMBERS // rows.numel() - 3) // 2)
    if count < 1:
        return {}
    terms = a.double()[rows] * w.double()[columns]
    best = terms.abs().nan_to_num(nan=torch.inf).topk(count, dim=1).indices
    values = terms.gather(1, best)
    others = x.double()[rows, columns] - values.sum(1)
    out = []
    rest = [[_short(value)] for value in others.tolist()]
    for at, k, some, left in zip(
        _inside_cells(x, grid, rows, columns), best.tolist(), values.tolist(), rest, strict=True
    ):
        out.append([*at, *(number for pair in zip(k, map(_short, some), strict=True) for number in pair), *left])
    return {"origins": out}


def _symbol(step: SavedStep) -> str:
    """W1 of `x · W1 + b1`."""
    return step.formula.partition(" · ")[2].partition(" ")[0]


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if value - value == 0 else None
