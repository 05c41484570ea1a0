"""Find the origins of a heat map's numbers: the position of each cell's value, and the values that it was computed
from."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ffncli.run.measure.statistics import span
from ffncli.run.saved.saved import Saved, SavedStep

_TERMS = 3  # list at most this many terms of a sum: those with the largest absolute value
_MOST_NUMBERS = 12_000  # limit for a linear step: beyond it, fewer terms or no terms are listed, to keep the page small
_MOST_CELLS = 1_500  # limit for an element-wise step
_ULPS = 8  # a remainder above this many units in the last place is more than rounding


def origins(saved: Saved, step: SavedStep, tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """Return the origins of a step's heat map; `grid` is the map's number of rows and of columns. The key `origins`
    holds a list with an entry for each cell, row by row.

    Each entry begins with the position (token, unit) of the cell's largest absolute value, relative to the cell's first
    value. For a linear step, the largest terms follow, each as its index in the sum and its value, and then the sum of
    all other terms, including the bias. For experts whose inner steps are in the file, the experts' terms follow in the
    same way. For other steps, the values of the inputs at this position follow, and `of_row` says whether the step
    reads the whole row. Returns {} if the file does not have the step's inputs, or if the map is too large.
    """
    x, inputs = tensors[step.name], [_rows_of(saved, step, tensors, name) for name in step.inputs]
    if any(one is None for one in inputs) or not inputs:
        return {}
    present = [one for one in inputs if one is not None]
    if step.op == "linear":
        weight = _weight(saved, step)
        symbol = step.formula.partition(" · ")[2].partition(" ")[0]  # W1 in `x · W1 + b1`
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
    """Return an input of a step, with the rows that the step reads; None if the file does not have it."""
    if not step.inner or name.startswith(step.name.rpartition(".")[0] + "."):
        return tensors.get(name)
    outer = next(one for one in saved.steps if one.name == step.place[0])
    return None if outer.weighs_input or name not in tensors else tensors[name][saved.tokens(step.name)]


def _weight(saved: Saved, step: SavedStep) -> Tensor | None:
    """Return the matrix [out, in] of a linear step; None if the file does not have it."""
    if not step.inner:
        name = f"{step.name}.weight"
        return saved.weight(name) if name in saved.weights else None
    outer, expert, inner = step.place
    name = next(one for one in saved.steps if one.name == outer).parameter(inner)
    return saved.weight(name)[expert] if name in saved.weights else None


def _mixed(saved: Saved, step: SavedStep, tensors: Mapping[str, Tensor], grid: tuple[int, int]) -> dict[str, Any]:
    """Return the largest terms route[token, e] · expert_e[token, unit], including the term of the identity experts.
    Return {} unless the file has the output of every chosen expert."""
    x, entered, route = (tensors[name] for name in (step.name, *step.inputs))
    entries, last = step.entries(route.shape[1]), step.program[-1].name if step.program else ""
    outputs = {e: f"{step.name}.{e}.{last}" for e in range(step.experts)}
    if any(bool(route[:, entries[e]].any()) for e, name in outputs.items() if name not in tensors):
        return {}
    rows, columns = _places(x, grid)
    terms = torch.zeros(rows.numel(), step.experts + 1, dtype=torch.float64)
    for e, name in outputs.items():
        if name in tensors:
            at = torch.full((len(x),), -1)  # each token's row in the expert's output
            at[saved.tokens(name)] = torch.arange(len(tensors[name]))
            here = at[rows] >= 0
            share = 1 if step.weighs_input else route[rows[here], entries[e]]
            terms[here, e] = tensors[name][at[rows[here]], columns[here]] * share
    if step.identities:
        terms[:, -1] = entered[rows, columns] * route[rows, -step.identities :].sum(1)
    sums = _largest(terms, step, x, grid, rows, columns)
    return sums | {"expert": last, "first": entries[0], "experts": step.experts, "weighs_input": step.weighs_input}


def _places(x: Tensor, grid: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return the tokens and the units of the values that the cells show."""
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
    """Return each position relative to the first value of its cell."""
    down, across = (
        [span(at, size, count).start for at in range(count)] for size, count in zip(x.shape, grid, strict=True)
    )
    first = [(i, j) for i in down for j in across]
    return (torch.stack([rows, columns], 1) - torch.tensor(first)).tolist()


def _products(a: Tensor, w: Tensor, step: SavedStep, x: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
    """Return the largest terms of Σ a[token, k] · w[unit, k], in float64."""
    rows, columns = _places(x, grid)
    return _largest(a.double()[rows] * w.double()[columns], step, x, grid, rows, columns)


def _largest(
    terms: Tensor, step: SavedStep, x: Tensor, grid: tuple[int, int], rows: Tensor, columns: Tensor
) -> dict[str, Any]:
    """Return the largest of each position's `terms` [positions, k], and the remainder: the position's value minus these
    terms. A remainder that may be the sum's rounding error is 0."""
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
