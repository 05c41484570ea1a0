"""The spectrum of a change, and the rank that rounding leaves visible in it."""

from __future__ import annotations

from dataclasses import dataclass
from math import exp, log, sqrt

import torch
from torch import Tensor

SHOWN = (1, 2, 4, 8, 16, 32, 64, 128)  # the k of the energies that rows list
_BLOCK = 1 << 18  # values of a block
_SMALL = 16 << 20  # bytes of a Gram matrix that is summed for any shape
_FLAT = 0.7  # up to this ratio of its sides, two float64 Gram matrices fit in the memory of three matrices
_GAP = 1.2  # the same, in multiples of the next singular value
# Errors of rounding depend on the change itself, which adds values up to this multiple of the limit, or up to this
# share of the errors' norm.
_RELATED, _RELATED_SHARE = 3.0, 0.2
_SEPARATION = 1.5  # the least singular value of a low rank, in multiples of the largest that rounding explains
_AUDIBLE = 0.05  # the share of a change's energy from which rounding may hide a low rank
_MANTISSA = {"fp32": 23, "bf16": 7, "fp16": 10}


def singular_values(change: list[Tensor], exact: bool = False) -> Tensor:
    """Return the singular values of a float32 matrix, float64 in descending order; the list is emptied, so that the
    matrix is freed as early as possible.

    They are the roots of the eigenvalues of the smaller Gram matrix, summed in blocks in float64; with `exact`, those
    of `torch.linalg.svdvals` in float64. For a large matrix that is nearly square, a float64 Gram matrix and its copy
    would not fit in the memory of three matrices: its values are those of `svdvals` in float32, whose error is some
    1e-7 of the largest.
    """
    wide = change.pop()
    wide = wide if wide.shape[0] <= wide.shape[1] else wide.T
    short, long = wide.shape
    square = 8 * short * short > _SMALL and short > _FLAT * long
    if exact or square:
        values: Tensor = torch.linalg.svdvals(wide.double() if exact else wide)
        return values.double()
    gram = torch.zeros(short, short, dtype=torch.float64)
    for start in range(0, long, step := max(1, _BLOCK // short)):
        part = wide[:, start : start + step].double()
        gram.addmm_(part, part.T)
    del wide
    squares: Tensor = torch.linalg.eigvalsh(gram).clamp(min=0).flip(0)
    return squares.sqrt()


@dataclass(frozen=True)
class Spectrum:
    """The spectrum of a change: the share of its energy (squared norm) in the first k singular values for k in SHOWN,
    the number of values that hold 90 % of it, and the exponential of the entropy of the shares (Roy and Vetterli,
    2007).

    `rank` is the rank of the part that is not rounding: 0 if none is visible, None if the change has no low rank.
    `blurred`: rounding hides whether there is one. `smallest` is its least singular value in multiples of the largest
    that rounding explains.
    """

    energy: tuple[float, ...]
    rank_90: int
    effective_rank: float
    rank: int | None
    blurred: bool
    smallest: float | None = None


def spectrum_of(values: Tensor, noise: RoundingNoise) -> Spectrum:
    """Describe the singular values of a change whose new values were rounded with this noise."""
    squares = values.square()
    total = float(squares.sum())
    shares = squares / total
    sums = shares.cumsum(0)
    entropy = -sum(p * log(p) for p in shares.tolist() if p > 0)
    energy = tuple(float(sums[min(k, len(sums)) - 1]) for k in SHOWN if k <= len(sums)) or (1.0,)
    rank_90 = min(int((sums < 0.9).sum()) + 1, len(sums))
    limit = max(noise.edge, 1e-6 * float(values[0]))
    rank, gap = _rank(values, limit, max(_RELATED * limit, _RELATED_SHARE * sqrt(noise.energy)))
    left = float(squares[rank:].sum())
    fits = left <= 1.7 * noise.energy + 1e-9 * total
    least = float(values[rank - 1]) / limit if rank else 0.0
    low = fits and rank <= len(values) // 2 and (not rank or gap >= _GAP)
    blurred = not (low and rank) and noise.energy > _AUDIBLE * total
    return Spectrum(energy, rank_90, exp(entropy), rank if low else None, blurred, least if rank else None)


def _rank(values: Tensor, limit: float, related: float) -> tuple[int, float]:
    """Return the place of the largest gap near the limit of rounding, and by which factor the values fall there."""
    above = int((values > _SEPARATION * limit).sum())
    least = max(1, int((values > related).sum()))
    following = torch.cat([values[1:], values.new_zeros(1)]).clamp(min=limit)
    gaps = (values / following)[least - 1 : above]
    return (least + int(gaps.argmax()), float(gaps.max())) if above else (0, 0.0)


@dataclass
class RoundingNoise:
    """What rounding new values to the nearest of a format adds to a change: the expected `energy`, and an upper limit
    of its largest singular value, √(largest row sum of the variances) + √(largest column sum) (Bandeira and van Handel,
    2016). The variance of a value is ulp² / 12."""

    rows: float
    columns: Tensor
    energy: float = 0.0

    @property
    def edge(self) -> float:
        """The largest singular value that rounding explains."""
        return 1.1 * (sqrt(self.rows) + sqrt(float(self.columns.max())))

    def add(self, rows: Tensor, lattice: str) -> None:
        """Add some rows of new values, which are values of a plain format."""
        exponents = torch.frexp(rows)[1]
        variances = torch.exp2(2.0 * (exponents - 1 - _MANTISSA[lattice])) / 12 * (rows != 0)
        self.rows = max(self.rows, float(variances.sum(1).max()))
        self.columns += variances.sum(0)
        self.energy += float(variances.sum())
