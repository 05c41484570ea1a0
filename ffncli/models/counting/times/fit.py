"""Fit the constants of `kernels.py` to measured times, and find out how well they predict shapes that were not fitted.

Errors are logarithms of predicted ÷ measured. The constants minimise their absolute values (squares where they are
small), with a weak pull towards typical constants, by damped Gauss-Newton steps. What a prediction errs by is taken
from shapes that were left out: all rows of a shape are left out together.
"""

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import exp, log, sqrt
from statistics import median
from typing import TYPE_CHECKING

from ffncli.models.counting.times.fitted import BOUNDS, Ends
from ffncli.models.counting.times.kernels import TILE, Chip, PlannedKernel, TimeConstants, kernel_time

if TYPE_CHECKING:
    from numpy import float64
    from numpy.typing import NDArray

    Array = NDArray[float64]

TYPICAL = TimeConstants(0.7, 0.85, 4.0, 0.4, 64.0, 2.5, 3.0)
_PULL, _SMALL, _STEP = 0.05, 0.05, 1e-4
_FOLDS = 7
LEAST = 40  # rows for an interval of a bound
_CALM = 12  # rows of mixtures for which half of their factor is taken


@dataclass(frozen=True)
class MeasuredKernels:
    """Measured seconds of some kernels. `shape` names what is left out together; `distribution` says how tokens fall on
    experts, "" for a product."""

    shape: Hashable
    kernels: tuple[PlannedKernel, ...]
    seconds: float
    distribution: str = ""

    def predicted_s(self, chip: Chip, fitted: TimeConstants, skew: float) -> float:
        """Return the time by these constants."""
        return sum(kernel_time(kernel, chip, fitted, skew).seconds for kernel in self.kernels)

    def error(self, chip: Chip, fitted: TimeConstants, skew: float) -> float:
        """Return log(predicted ÷ measured)."""
        return log(self.predicted_s(chip, fitted, skew) / self.seconds)

    def bound(self, chip: Chip, fitted: TimeConstants) -> str:
        """Return `compute` if the arithmetic of the longest kernel takes longer than its traffic, else `memory`."""
        times = [kernel_time(kernel, chip, fitted) for kernel in self.kernels]
        longest = max(times, key=lambda time: time.seconds)
        return "compute" if longest.compute_s > longest.memory_s + longest.quantize_s else "memory"


def fitted_constants(
    products: Sequence[MeasuredKernels], chip: Chip, start: TimeConstants = TYPICAL, quantizes: bool = True
) -> TimeConstants:
    """Fit all constants but `experts` to products. Without products, return `start`."""
    if not products:
        return start
    errors = _errors(products, chip)
    return _constants(_least(lambda x: errors(_constants(x, quantizes)), _vector(start, quantizes)), quantizes)


def experts_factor(mixtures: Sequence[MeasuredKernels], chip: Chip, fitted: TimeConstants, skew: float) -> float:
    """Return the factor `experts`: the median of measured ÷ predicted, drawn towards 1 if there are few rows."""
    if not mixtures:
        return 1.0
    alone = replace(fitted, experts=1.0)
    middle = -median(one.error(chip, alone, skew) for one in mixtures)
    return exp(middle * len(mixtures) / (len(mixtures) + _CALM))


def left_out(
    rows: Sequence[MeasuredKernels],
    fit: Callable[[Sequence[MeasuredKernels]], Callable[[MeasuredKernels], float]],
    folds: int = _FOLDS,
) -> list[tuple[MeasuredKernels, float]]:
    """Return every row with its error by a fit to rows of other shapes; `fit` returns the function that gives errors.

    Shapes are put into `folds` parts by a hash, or each is left out alone if there are fewer shapes than that. A single
    shape is predicted from no rows.
    """
    shapes = list(dict.fromkeys(row.shape for row in rows))
    part = {shape: part_of(shape, folds) if len(shapes) > 2 * folds else n for n, shape in enumerate(shapes)}
    errors = []
    for number in sorted(set(part.values())):
        error = fit([row for row in rows if part[row.shape] != number])
        errors += [(row, error(row)) for row in rows if part[row.shape] == number]
    return errors


def part_of(shape: Hashable, parts: int, salt: int = 0) -> int:
    """Return the part of a shape, from 0 to `parts` - 1, by a hash of its text."""
    return int(sha256(f"{salt}/{shape}".encode()).hexdigest(), 16) % parts


def quantile(values: Iterable[float], share: float) -> float:
    """Return a quantile, interpolated between the two nearest values."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


# --- intervals --------------------------------------------------------------------------------------------------------

Errors = list[tuple[MeasuredKernels, float]]


def errors_of_products(products: Sequence[MeasuredKernels], chip: Chip, quantizes: bool) -> Errors:
    """Return the errors of products, by fits to other shapes."""

    def fit(others: Sequence[MeasuredKernels]) -> Callable[[MeasuredKernels], float]:
        one = fitted_constants(others, chip, quantizes=quantizes)
        return lambda row: row.error(chip, one, 0.0)

    return left_out(products, fit)


def errors_of_mixtures(mixtures: Sequence[MeasuredKernels], chip: Chip, fitted: TimeConstants, skew: float) -> Errors:
    """Return the errors of mixtures, by the factor of the other shapes."""

    def fit(others: Sequence[MeasuredKernels]) -> Callable[[MeasuredKernels], float]:
        one = replace(fitted, experts=experts_factor(others, chip, fitted, skew))
        return lambda row: row.error(chip, one, skew)

    return left_out(mixtures, fit, len(mixtures))


def ends_of(errors: Errors, chip: Chip, fitted: TimeConstants) -> dict[str, Ends]:
    """Return the ends of the 80 % interval of measured ÷ predicted by bound; of all where a bound has few rows."""
    by_bound: dict[str, Errors] = {bound: [] for bound in BOUNDS}
    for row, error in errors:
        by_bound[row.bound(chip, fitted)].append((row, error))
    return {bound: _ends_for_another_shape(few if len(few) >= LEAST else errors) for bound, few in by_bound.items()}


def _ends_for_another_shape(errors: Errors) -> Ends:
    """Return the interval of the errors, made wider for a shape that is none of theirs.

    The errors of a shape are alike, so m shapes count like m values: of normal values, another one is farther from the
    mean of m than these are, by √((m + 1) / (m - 1)).
    """
    logs, shapes = [-error for _, error in errors], len({row.shape for row, _ in errors})
    if shapes < 2:
        return ends(logs)
    middle, wider = exp(median(logs)), sqrt((shapes + 1) / (shapes - 1))
    low, high = (middle * (end / middle) ** wider for end in ends(logs))
    return low, high


def ends(ratios: Sequence[float]) -> Ends:
    """Return the ends of the 80 % interval of these logarithms of measured ÷ predicted; wide if there are few."""
    return (exp(quantile(ratios, 0.1)), exp(quantile(ratios, 0.9))) if len(ratios) >= 5 else (0.5, 2.0)


# --- minimising -------------------------------------------------------------------------------------------------------


def _vector(c: TimeConstants, quantizes: bool) -> list[float]:
    shares = [log(share / (1 - share)) for share in (c.peak, c.bandwidth, (c.short_rows - 1) / (TILE - 1))]
    x = [*shares, log(c.launch_us), log(c.wave), log(c.overlap - 1)]
    return [*x, log(c.quantize)] if quantizes else x


def _constants(x: "Array", quantizes: bool) -> TimeConstants:
    """Return the constants of a vector; shares of the data sheet's figures are at most 1."""
    peak, bandwidth, short = (1 / (1 + exp(min(-value, 500.0))) for value in x[:3])
    launch, wave, overlap = (exp(min(value, 9.0)) for value in x[3:6])
    quantize = exp(min(x[6], 9.0)) if quantizes else 0.0
    return TimeConstants(peak, bandwidth, launch, wave, 1 + (TILE - 1) * short, 1 + overlap, quantize)


def _errors(products: Sequence[MeasuredKernels], chip: Chip) -> "Callable[[TimeConstants], Array]":
    """Return the function from constants to `MeasuredKernels.error` of all products, each one kernel with one load.
    `kernel_time` computes each part once, with constants of 0 and 1; other constants only scale it."""
    import numpy as np

    plain = TimeConstants(1.0, 1.0, launch_us=0.0, wave=0.0, short_rows=0.0, overlap=1.0, quantize=1.0)
    units, columns = (plain, replace(plain, wave=1.0), replace(plain, short_rows=TILE)), []
    for row in products:
        (kernel,) = row.kernels
        time, waves, tile = (kernel_time(kernel, chip, unit) for unit in units)
        compute = time.compute_s, waves.compute_s / time.compute_s - 1, tile.compute_s / TILE
        columns.append((*compute, time.memory_s, time.quantize_s, row.seconds))
    compute_s, wave, short_row_s, memory_s, quantize_s, measured_s = np.array(columns).T

    def errors(by: TimeConstants) -> "Array":
        compute = np.maximum(compute_s, by.short_rows * short_row_s) * (1 + by.wave * wave) / by.peak
        low, high = np.sort([compute, memory_s / by.bandwidth], axis=0)
        both = high * (1 + (low / high) ** by.overlap) ** (1 / by.overlap)
        return np.asarray(np.log((both + by.launch_us * 1e-6 + by.quantize * quantize_s) / measured_s))

    return errors


def _least(errors: "Callable[[Array], Array]", start: list[float]) -> "Array":
    """Return the vector that minimises the sum of Huber's function of the errors and of the pull to `start`."""
    import numpy as np

    def cost(of: "Array", at: "Array") -> float:
        sizes, small = np.abs(of), np.minimum(np.abs(of), _SMALL)
        return float((small * (sizes - small / 2)).sum() / _SMALL + _PULL * ((at - start) ** 2).sum())

    x, damping = np.array(start), 1e-2
    best = cost(now := errors(x), x)
    for _ in range(40):
        columns = np.array([errors(x + moved) - now for moved in _STEP * np.eye(x.size)]) / _STEP
        weighted = columns / np.maximum(np.abs(now), _SMALL)
        slope, curve = weighted @ now + 2 * _PULL * (x - start), weighted @ columns.T
        before = best
        for _ in range(8):
            matrix = curve + np.diag(2 * _PULL + damping * (np.diag(curve) + 1e-6))
            at = x - np.clip(np.linalg.solve(matrix, slope), -1, 1)
            trial = errors(at)
            if (value := cost(trial, at)) < best:
                x, now, best, damping = at, trial, value, max(damping / 5, 1e-6)
                break
            damping *= 4
        if before - best <= 1e-5 * before:
            break
    return x
