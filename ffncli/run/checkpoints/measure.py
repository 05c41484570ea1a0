"""What differs in one parameter of both checkpoints, measured while it is in memory, a few rows at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt

import torch
from torch import Tensor

from ffncli.models.model import Layer
from ffncli.run.checkpoints.lattice import Lattices, RoundedTo, narrowest
from ffncli.run.checkpoints.sides import blocks
from ffncli.run.checkpoints.spectra import RoundingNoise, Spectrum, singular_values, spectrum_of

_PRINT, _SKETCH = 16, 8  # numbers that stand for a row, and groups of rows in a sketch
_TURNED = 1e-2  # a matrix is a transpose if it differs by less, relative to its size


@dataclass
class Pair:
    """A parameter in both checkpoints, of one `expert` if each has its own, and how it differs.

    `gram` are the inner products of BASE, NEW and, if given, C: [3, 3] float64. `kept` counts the changed values that
    are not 0 in NEW. `sketches` are random projections of both matrices to 128 numbers: the distance between two such
    sketches estimates that of the matrices. `prints` are those of their units, [d_ff, 16]. `small` are both tensors
    themselves if they are vectors or routers. `units` are, for each hidden unit, the squared norms of BASE and of the
    change; `zeroed_units` counts those that are 0 in NEW, if they are all that was set to 0. The layer has `experts`.
    """

    layer: Layer
    parameter: str
    expert: int | None
    size: int
    gram: Tensor
    squared_change: float = 0.0
    changed: int = 0
    kept: int = 0
    max_change: float = 0.0
    max_at: tuple[int, ...] | None = None
    zeros: tuple[int, int] = (0, 0)
    two_of_four: bool = False
    plain: tuple[str, str] = ("fp32", "fp32")
    packed: tuple[str, str] = ("", "")
    rounding: RoundedTo | None = None
    spectrum: Spectrum | None = None
    turned: float | None = None
    sketches: tuple[Tensor, Tensor] | None = None
    prints: tuple[Tensor, Tensor] | None = None
    small: tuple[Tensor, Tensor] | None = None
    units: Tensor | None = None
    zeroed_units: int = 0
    experts: int = 0

    @property
    def place(self) -> str:
        """The parameter's place: `decoder 3 up`, `decoder 3 up of expert 2`."""
        which = "" if self.expert is None else f" of expert {self.expert}"
        return f"{self.layer.stack} {self.layer.index} {self.matrix}{which}"

    @property
    def matrix(self) -> str:
        """The parameter's name in rows: `up`, `up.bias`, `shared.down`."""
        return self.parameter.removesuffix(".weight")

    @property
    def base_size(self) -> float:
        """The norm of BASE's parameter."""
        return sqrt(max(0.0, float(self.gram[0, 0])))

    @property
    def relative_change(self) -> float:
        """‖new - base‖ / ‖base‖; infinite if only BASE is all 0."""
        if not self.squared_change:
            return 0.0
        return sqrt(self.squared_change) / self.base_size if self.base_size else float("inf")

    @property
    def cosine(self) -> float | None:
        """The cosine of the angle between both; None if one is all 0."""
        sizes = float(self.gram[0, 0] * self.gram[1, 1])
        return float(self.gram[0, 1]) / sqrt(sizes) if sizes > 0 else None

    @property
    def is_matrix(self) -> bool:
        """Whether it has a spectrum."""
        return self.sketches is not None


def measured(
    layer: Layer, parameter: str, expert: int | None, tensors: list[Tensor], packed: tuple[str, str],
    lattices: Lattices, exact: bool, like: Tensor | None = None,
) -> Pair:  # fmt: skip
    """Measure a parameter of BASE, NEW and perhaps C; the tensors are consumed. `like` says which unit of BASE each
    unit of NEW is, if NEW has fewer: the others count as 0 in NEW."""
    base, new = tensors[:2]
    down = parameter.endswith("down.weight")
    matrix = parameter.endswith(("gate.weight", "up.weight", "down.weight")) and base.dim() == 2
    sketched = base.dim() == 2 and min(base.shape) > 1
    if like is not None:
        new = _expanded(new, base, like, 1 if down else 0)
        tensors[1] = new
    pair = Pair(layer, parameter, expert, base.numel(), torch.zeros(3, 3, dtype=torch.float64), packed=packed)
    if sketched:
        pair.sketches = (_sketch(base), _sketch(new))
    if matrix:
        pair.prints = (_prints(base, down), _prints(new, down))
    else:
        pair.small = (base.clone(), new.clone())
    flat = [one.view(-1, one.shape[-1]) if one.dim() else one.view(1, 1) for one in tensors]
    _sum(pair, flat, down)
    del tensors[2:], flat[2:]  # C is in the inner products
    if not pair.changed:
        return pair
    pair.plain = tuple((*narrowest_of(one), "fp32")[0] for one in flat[:2])  # type: ignore[assignment]
    pair.two_of_four = _two_of_four(flat[1])
    pair.rounding = lattices.rounding(base, new, pair.plain, packed)
    if base.dim() == 2 and base.shape[0] == base.shape[1]:
        pair.turned = _turned(base, new)
    if sketched:
        noise = RoundingNoise(0.0, torch.zeros(base.shape[1]))
        for rows in blocks(new):
            noise.add(new[rows], pair.plain[1])
        tensors[:] = [new.sub_(base)]
        flat.clear()
        del base, new
        pair.spectrum = spectrum_of(singular_values(tensors, exact), noise)
    return pair


def narrowest_of(values: Tensor) -> list[str]:
    """Return the plain formats of 16 bits that hold all values, judged block by block."""
    names = ["bf16", "fp16"]
    for rows in blocks(values):
        names = narrowest(values[rows], names)
        if not names:
            break
    return names


def _sum(pair: Pair, flat: list[Tensor], down: bool) -> None:
    """Add up the products, the changes and the places of the tensors, given as [rows, columns]."""
    base, new = flat[:2]
    units = torch.zeros(base.shape[1] if down else base.shape[0], 2, dtype=torch.float64)
    zeros, count = [0, 0], len(flat)
    for rows in blocks(base):
        parts = torch.stack([one[rows] for one in flat]).double()
        x, y = parts[0], parts[1]
        wide = parts.view(count, -1)
        for i in range(count):
            for j in range(i, count):  # a product of matrices would allocate workspaces for both
                pair.gram[i, j] += float(wide[i] @ wide[j])
        zeros = [zeros[0] + int((x == 0).sum()), zeros[1] + int((y == 0).sum())]
        axis = 0 if down else 1
        sizes, place = x.square().sum(axis), slice(None) if down else rows
        units[place, 0] += sizes
        change = y.sub_(x)
        if not bool(change.any()):
            continue
        differs = change != 0
        pair.changed += int(differs.sum())
        pair.kept += int((differs & (new[rows] != 0)).sum())
        squares = change.square().sum(axis)
        units[place, 1] += squares
        pair.squared_change += float(squares.sum())
        at = int(change.abs().argmax())
        if abs(float(change.view(-1)[at])) > abs(pair.max_change):
            pair.max_change = float(change.view(-1)[at])
            row, column = divmod(at, change.shape[1])
            pair.max_at = (rows.start + row, column) if len(base) > 1 else (column,)
    pair.gram += pair.gram.triu(1).T
    pair.zeros = (zeros[0], zeros[1])
    if pair.prints is not None:
        pair.units = units
        gone = int(((units[:, 0] > 0) & (units[:, 1] >= units[:, 0] * (1 - 1e-12))).sum())
        pair.zeroed_units = gone if gone * (pair.size // len(units)) == zeros[1] - zeros[0] else 0


def _two_of_four(new: Tensor) -> bool:
    """Return whether at least two of four adjacent values of a row are 0, everywhere, or of a column, as in a matrix
    that is stored as [in, out]."""
    turned = (new, new.T) if new.dim() > 1 else (new,)
    return any(
        one.shape[-1] % 4 == 0
        and all(bool(((one[rows].reshape(-1, 4) == 0).sum(1) >= 2).all()) for rows in blocks(one))
        for one in turned
    )


def _turned(base: Tensor, new: Tensor) -> float:
    """Return ‖new - baseᵀ‖ / ‖base‖ of square matrices."""
    change = sum(float((new[rows].double() - base.T[rows]).square().sum()) for rows in blocks(new))
    size = sum(float(base[rows].double().square().sum()) for rows in blocks(base))
    return sqrt(change / size) if size else 0.0


def _expanded(new: Tensor, base: Tensor, like: Tensor, axis: int) -> Tensor:
    """Return NEW in BASE's shape, with 0 for the units that it does not have."""
    return torch.zeros_like(base).index_copy_(axis, like, new)


# --- projections ------------------------------------------------------------------------------------------------------


@cache
def _random(rows: int, columns: int) -> Tensor:
    """Return a random matrix, equal in every call, whose columns have an expected norm of 1."""
    generator = torch.Generator().manual_seed(rows * 31 + columns)
    return torch.randn(rows, columns, generator=generator) / sqrt(columns)


def _sketch(matrix: Tensor) -> Tensor:
    """Return a random projection of a matrix, [128]; its expected squared norm is that of the matrix."""
    rows, columns = matrix.shape
    return (_random(rows, _SKETCH).T @ (matrix @ _random(columns, _PRINT))).flatten()


def _prints(matrix: Tensor, down: bool) -> Tensor:
    """Return a random projection of each unit of a matrix, [d_ff, 16]: of a row of W1 and W3, of a column of W2."""
    units = matrix.T if down else matrix
    return units @ _random(units.shape[1], _PRINT)


def distance(one: Tensor, other: Tensor) -> float:
    """Estimate ‖A - B‖ / ‖A‖ from the projections of A and B."""
    size = float(one.double().square().sum())
    return sqrt(float((one.double() - other).square().sum()) / size) if size else float("inf") * float(other.any())


def nearest(base: Tensor, new: Tensor, most: float, distinct: bool = True) -> Tensor | None:
    """Return the row of `base` that each row of `new` is, [rows of new]; None if one has no row at a relative distance
    below `most`, or if two are the same one and must be `distinct`."""
    sizes = base.square().sum(1)
    out = []
    for part in torch.split(new, 256):
        squares = (part.square().sum(1, keepdim=True) + sizes - 2 * part @ base.T).clamp(min=0)
        best, at = squares.min(1)
        # a row of zeros is like a row of zeros
        if bool((best > most**2 * sizes[at] + 1e-12 * float(sizes.max())).any()):
            return None
        out.append(at)
    rows_of_base = torch.cat(out)
    twice = distinct and len(torch.unique(rows_of_base)) < len(rows_of_base)
    return None if twice else rows_of_base


Prints = Mapping[str, tuple[Tensor, Tensor]]


def same_units(prints: Prints, most: float) -> Tensor | None:
    """Return the unit of BASE that each unit of NEW is, by the rows of W1 and W3 and the columns of W2 together, which
    all must fit; None if there is no such order."""
    base = torch.cat([_scaled(pair[0], pair[0]) for pair in prints.values()], 1)
    new = torch.cat([_scaled(pair[1], pair[0]) for pair in prints.values()], 1)
    rows_of_base = nearest(base, new, most)
    if rows_of_base is None or any(distance(pair[0][rows_of_base], pair[1]) > most for pair in prints.values()):
        return None
    return rows_of_base


def _scaled(rows: Tensor, like: Tensor) -> Tensor:
    """Divide projections by the size of the matrix, so that all matrices count alike."""
    return rows / (like.norm() / sqrt(len(like)) or 1.0)
