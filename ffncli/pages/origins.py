"""Where the numbers of a heat map come from: of each cell the place of its value, and what it was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ffncli.run.measure.statistics import span
from ffncli.run.saved.saved import Saved, SavedStep

_TERMS = 3  # of a product of matrices: the largest by size
_MOST_NUMBERS = 12_000  # of a linear step, so that a page stays small: then fewer terms, then none
_MOST_CELLS = 1_500  # of an element-wise step
_ULPS = 8  # in the last place of the largest sum: more than rounding


def origins(saved: Saved, step: SavedStep, tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """For the heat map of a step, `grid` rows and columns of cells: `origins`, one list for each cell, row by row.

    Each begins with the place [token, unit] of the cell's value, the largest by size, counted from the cell's first. Of
    a linear step there follow its largest terms, each its index in the sum and its value, then what all others add up
    to, the bias among them; of experts whose inner steps are in the file each expert's share likewise; of other steps
    the values of their inputs there, with `of_row` where they read the whole row. Empty where the file does not have
    what the step read, and where the map is too large to carry them.
    """
    x, inputs = tensors[step.name], [_rows_of(saved, step, tensors, name) for name in step.inputs]
    if any(one is None for one in inputs) or not inputs:
        return {}
    present = [one for one in inputs if one is not None]
    if step.op == "linear":
        weight = _weight(saved, step)
        symbol = step.formula.partition(" · ")[2].partition(" ")[0]  # W1 of `x · W1 + b1`
        return {} if weight is None else _products(present[0], weight, step, x, grid) | {"weight": symbol}
    if step.op == "experts":
        return _mixed(saved, step, tensors, grid)
    if any(one.shape != x.shape for one in present) or grid[0] * grid[1] > _MOST_CELLS:
        return {}
    rows, columns = _places(x, grid)
    there = torch.stack([one[rows, columns] for one in present], 1).tolist()
    places = _inside_cells(x, grid, rows, columns)
    out = [[*at, *map(_short, some)] for at, some in zip(places, there, strict=True)]
    return {"origins": out, "of_row": step.op in ("norm", "route")}


def _rows_of(saved: Saved, step: SavedStep, tensors: Mapping[str, Tensor], name: str) -> Tensor | None:
    """An input of a step, row by row as the step reads it; None where the file does not have it."""
    if not step.inner or name.startswith(step.name.rpartition(".")[0] + "."):
        return tensors.get(name)
    outer = next(one for one in saved.steps if one.name == step.place[0])
    return None if outer.weighs_input or name not in tensors else tensors[name][saved.tokens(step.name)]


def _weight(saved: Saved, step: SavedStep) -> Tensor | None:
    """The matrix [out, in] of a linear step; None where the file does not have it."""
    if not step.inner:
        name = f"{step.name}.weight"
        return saved.weight(name) if name in saved.weights else None
    outer, expert, inner = step.place
    name = next(one for one in saved.steps if one.name == outer).parameter(inner)
    return saved.weight(name)[expert] if name in saved.weights else None


def _mixed(saved: Saved, step: SavedStep, tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """The terms route[token, e] · expert_e[token, unit] and that of the identities, if the file has what every expert
    that is chosen computed."""
    x, entered, route = (tensors[name] for name in (step.name, *step.inputs))
    entries, last = step.entries(route.shape[1]), step.program[-1].name if step.program else ""
    outputs = {e: f"{step.name}.{e}.{last}" for e in range(step.experts)}
    if any(bool(route[:, entries[e]].any()) for e, name in outputs.items() if name not in tensors):
        return {}
    rows, columns = _places(x, grid)
    terms = torch.zeros(rows.numel(), step.experts + 1, dtype=torch.float64)
    for e, name in outputs.items():
        if name in tensors:
            at = torch.full((len(x),), -1)  # each token's row among the expert's
            at[saved.tokens(name)] = torch.arange(len(tensors[name]))
            here = at[rows] >= 0
            share = 1 if step.weighs_input else route[rows[here], entries[e]]
            terms[here, e] = tensors[name][at[rows[here]], columns[here]] * share
    if step.identities:
        terms[:, -1] = entered[rows, columns] * route[rows, -step.identities :].sum(1)
    sums = _largest(terms, step, x, grid, rows, columns)
    return sums | {"expert": last, "first": entries[0], "experts": step.experts, "weighs_input": step.weighs_input}


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


def _products(a: Tensor, w: Tensor, step: SavedStep, x: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
    """The largest terms of Σ a[token, k] · w[unit, k], in float64."""
    rows, columns = _places(x, grid)
    return _largest(a.double()[rows] * w.double()[columns], step, x, grid, rows, columns)


def _largest(
    terms: Tensor, step: SavedStep, x: Tensor, grid: tuple[int, int], rows: Tensor, columns: Tensor
) -> dict[str, Any]:
    """The largest of each place's terms [places, k], and what all else adds to the value there; 0 for what can be the
    rounding of the sum."""
    count = min(_TERMS, terms.shape[1], (_MOST_NUMBERS // rows.numel() - 3) // 2)
    if count < 1:
        return {}
    best = terms.abs().nan_to_num(nan=torch.inf).topk(count, dim=1).indices
    values = terms.gather(1, best)
    others = x.double()[rows, columns] - values.sum(1)
    rounding = _ULPS * torch.finfo(getattr(torch, step.dtype)).eps * terms.abs().sum(1)
    rest = others.where(~(others.abs() <= rounding) | ~others.isfinite(), 0.0).tolist()
    places = _inside_cells(x, grid, rows, columns)
    out = []
    for at, k, some, left in zip(places, best.tolist(), values.tolist(), rest, strict=True):
        out.append([*at, *(number for pair in zip(k, map(_short, some), strict=True) for number in pair), _short(left)])
    return {"origins": out}


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if value - value == 0 else None
