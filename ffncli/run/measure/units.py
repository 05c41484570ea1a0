"""The hidden units of a step: which never act, which are the largest and act most, over all tokens and for each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ffncli.block.value import NEAR_ZERO
from ffncli.run.measure.statistics import chunk_size


@dataclass(frozen=True)
class HiddenUnit:
    """One hidden unit over the tokens: L2 norm, mean |x|, its largest value by size and the (flat) token with it.

    `writes` is the norm times that of the unit's column of the down projection, if that reads the step: the norm of
    the unit's contribution to the output (a product of one column and one row). Values that are not finite count as
    zero.
    """

    unit: int
    norm: float
    mean_abs: float
    largest: float
    token: int
    writes: float | None


@dataclass(frozen=True)
class TokenUnits:
    """The units with the largest values by size for one (flat) token, the largest first."""

    token: int
    units: tuple[int, ...]
    values: tuple[float, ...]


@dataclass(frozen=True)
class Units:
    """All units of a step: `dead` are zero for every token, `near_dead` within NEAR_ZERO of zero (dead units included).

    `largest_norm` and `most_active` (by mean |x|) have the requested number of units, the largest first;
    `per_token` has as many of every token's.
    """

    units: int
    tokens: int
    dead: int
    near_dead: int
    largest_norm: tuple[HiddenUnit, ...] = ()
    most_active: tuple[HiddenUnit, ...] = ()
    per_token: tuple[TokenUnits, ...] = ()


def unit_statistics(tensor: Tensor, top: int = 0, down: Tensor | None = None) -> Units:
    """The units of a tensor [..., d_ff]; `top` of them singly, with `down` [d_model, d_ff] also their `writes`."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1])
    every = torch.arange(rows.shape[1], device=rows.device)
    near = _quiet(rows, every, NEAR_ZERO)
    dead = _quiet(rows, near, 0.0)
    counts = Units(rows.shape[1], rows.shape[0], dead.numel(), near.numel())
    if not top:
        return counts
    norms, means = _sizes(rows)
    by_norm, by_mean = (sizes.sort(descending=True, stable=True).indices[:top].tolist() for sizes in (norms, means))
    by_number = {unit: _unit(rows[:, unit], unit, norms, means, down) for unit in {*by_norm, *by_mean}}
    largest, active = (tuple(by_number[unit] for unit in order) for order in (by_norm, by_mean))
    return Units(counts.units, counts.tokens, counts.dead, counts.near_dead, largest, active, _per_token(rows, top))


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """A few rows at a time, so that their copies stay in the cache."""
    size = max(1, chunk_size(rows) // max(1, rows.shape[1]))
    for start in range(0, rows.shape[0], size):
        yield rows[start : start + size]


def _quiet(rows: Tensor, columns: Tensor, bound: float) -> Tensor:
    """The `columns` with all values within `bound` of zero. Most are ruled out after a few rows."""
    for block in _blocks(rows):
        if not columns.numel():
            break
        few = 4 * columns.numel() < rows.shape[1]
        block = block.index_select(1, columns) if few else block
        block = block if block.dtype == torch.float64 else block.float()
        quiet = (block.abs() <= bound).all(0)
        columns = columns[quiet if few else quiet[columns]]
    return columns


def _sizes(rows: Tensor) -> tuple[Tensor, Tensor]:
    """(L2 norm, mean |x|) of every column, in float64."""
    squares = torch.zeros(rows.shape[1], dtype=torch.float64, device=rows.device)
    sums = torch.zeros_like(squares)
    for block in _blocks(rows):
        size = block.double().abs_() if block.dtype != torch.float64 else block.abs()
        if not torch.isfinite(size.sum()):
            size.nan_to_num_(0.0, 0.0, 0.0)
        sums += size.sum(0)
        squares += size.square_().sum(0)
    return squares.sqrt_(), sums / max(1, rows.shape[0])


def _per_token(rows: Tensor, top: int) -> tuple[TokenUnits, ...]:
    out: list[TokenUnits] = []
    for block in _blocks(rows):
        values = block.double().nan_to_num(0.0, 0.0, 0.0)
        units = values.abs().sort(dim=1, descending=True, stable=True).indices[:, :top]
        pairs = zip(units.tolist(), values.gather(1, units).tolist(), strict=True)
        out += [TokenUnits(token, tuple(first), tuple(best)) for token, (first, best) in enumerate(pairs, len(out))]
    return tuple(out)


def _unit(column: Tensor, unit: int, norms: Tensor, means: Tensor, down: Tensor | None) -> HiddenUnit:
    values = column.double().nan_to_num(0.0, 0.0, 0.0)
    token = int(values.abs().argmax())
    norm = norms[unit].item()
    writes = norm * torch.linalg.vector_norm(down[:, unit].double()).item() if down is not None else None
    return HiddenUnit(unit, norm, means[unit].item(), values[token].item(), token, writes)
