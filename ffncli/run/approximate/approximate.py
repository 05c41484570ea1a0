"""How well a block of growing width fits a function, by activation: universal approximation, measured."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from types import SimpleNamespace

import torch
from torch import Tensor

from ffncli.run.approximate.fit import SPREAD, Advance, Weights, drawn, finite, refitted, train, unscaled
from ffncli.run.approximate.question import Domain, FitCase, FitQuestion, Target
from ffncli.run.engine.execute import NAMESPACE, run
from ffncli.run.engine.threads import one_thread

EVALUATED = {1: 2048, 2: 64}  # inputs → points along each
_OVERFITS = 1.1  # times the least held-out error


@dataclass(frozen=True)
class FitRow:
    """The figures of one block, over its seeds. `None` where every seed diverged.

    `activation` names the unit (`swiglu` if it is gated by `function` silu). `rmse`, `median_rmse` and `max_error`
    (at the input `worst`) are errors against the target itself, at points other than the samples; `train_rmse` is the
    median over the samples, their noise included, `held_out_rmse` with noise is `median_rmse` again. `floor` is the
    rmse of the best straight line. Errors of a block are of its best seed unless they are medians.
    """

    target: str
    activation: str
    function: str
    gated: bool
    d_ff: int
    d_ff_plain: int
    params: int
    rmse: float | None
    median_rmse: float | None
    max_error: float | None
    worst: tuple[float, ...] | None
    train_rmse: float | None
    held_out_rmse: float | None
    floor: float
    noise: float
    samples: int
    seeds: int
    diverged: int
    best_seed: int | None


@dataclass(frozen=True)
class Fit:
    """A row, and the best seed's weights (canonical names, float64) for the case's steps; none if all diverged."""

    row: FitRow
    case: FitCase
    weights: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Overfitting:
    """One activation's held-out errors over its widths: the least, and the largest of the wider blocks.

    `overfits`: the latter is more than 1.1 times the least, while the error on the samples themselves is smaller.
    """

    target: str
    activation: str
    best_d_ff: int
    best_rmse: float
    wider_d_ff: int | None
    wider_rmse: float | None
    overfits: bool

    @property
    def rises(self) -> bool:
        """Whether a wider block's held-out error is more than 1.1 times the least."""
        return self.wider_rmse is not None and self.wider_rmse > _OVERFITS * self.best_rmse


@dataclass(frozen=True)
class _TrainingData:
    """Samples, x [seeds, samples, inputs] and y [seeds, samples, 1]; `points` [n, inputs] to measure at."""

    x: Tensor
    y: Tensor
    points: Tensor
    values: Tensor
    floor: float


def fits(question: FitQuestion, cases: Iterable[FitCase], tick: Advance = lambda steps: None) -> Iterator[Fit]:
    """A Fit for each case in order, as soon as it is done; `tick` is called with the number of training steps done.

    Uses one thread, so that the figures depend only on the question's seeds, target, width and samples.
    """
    data = lru_cache(maxsize=1)(lambda target: _data(question, target))
    done: dict[object, Fit] = {}
    for case in cases:
        key = (case.target, case.name, case.spec.d_ff)
        if key in done:  # one narrow gated block may match two plain widths
            tick(question.steps)
            yield _again(done[key], case)
            continue
        with one_thread():
            done[key] = _fit(question, case, data(case.target), tick)
        yield done[key]


def overfitting(rows: Sequence[FitRow]) -> list[Overfitting]:
    """Overfitting by target and activation over widths, medians over seeds; empty for a single width."""
    out = []
    for target, name in dict.fromkeys((row.target, row.activation) for row in rows):
        series = [
            row for row in rows if (row.target, row.activation) == (target, name) and row.held_out_rmse is not None
        ]
        widths = {row.d_ff: (row.held_out_rmse or 0.0, row.train_rmse or 0.0) for row in series}
        if len(widths) < 2:
            continue
        best = min(widths, key=lambda d_ff: (widths[d_ff][0], d_ff))
        wider = max((d_ff for d_ff in widths if d_ff > best), key=lambda d_ff: widths[d_ff][0], default=None)
        least, train = widths[best]
        worse = None if wider is None else widths[wider]
        overfits = worse is not None and worse[0] > _OVERFITS * least and worse[1] < train
        out.append(Overfitting(target, name, best, least, wider, worse[0] if worse else None, overfits))
    return out


def _fit(question: FitQuestion, case: FitCase, data: _TrainingData, tick: Advance) -> Fit:
    low, high = question.domain_of(case.target)
    middle, scale = (low + high) / 2, (high - low) / 2 / SPREAD
    steps = case.steps
    seeds = range(question.seed, question.seed + question.seeds)
    start = [drawn(steps, _mixed(seed, case.spec.d_ff)) for seed in seeds]
    trained = train(steps, start, (data.x - middle) / scale, data.y, question.steps, tick)
    seed_fits = []
    for at, seed in enumerate(seeds):
        weights = unscaled(steps, trained[at], middle, scale)
        if not finite(weights):
            continue
        if not question.noise:
            weights = refitted(steps, weights, data.x[at], data.y[at])
        error = run(steps, weights, {"x": data.points}) - data.values
        missed = run(steps, weights, {"x": data.x[at]}) - data.y[at]
        if finite({"error": error, "missed": missed}):
            seed_fits.append((_rms(error), seed, error, _rms(missed), weights))
    return _judged(question, case, data, seed_fits)


def _judged(
    question: FitQuestion,
    case: FitCase,
    data: _TrainingData,
    seed_fits: Sequence[tuple[float, int, Tensor, float, Weights]],
) -> Fit:
    """The row of one block: its best seed, and medians over all that did not diverge."""
    spec, name = case.spec, case.target.name
    columns = (name, case.name, spec.activation, bool(spec.gated), spec.d_ff, case.d_ff_plain, case.params)
    diverged = question.seeds - len(seed_fits)
    rest = (data.floor, question.noise, question.samples_of(case.target), question.seeds, diverged)
    if not seed_fits:
        return Fit(FitRow(*columns, None, None, None, None, None, None, *rest, None), case, {})
    best, seed, error, _, weights = min(seed_fits, key=lambda one: one[:2])
    at = int(error.abs().argmax())
    middle = median(one[0] for one in seed_fits)
    errors = (
        best,
        middle,
        float(error[at].abs()),
        tuple(data.points[at].tolist()),
        median(one[3] for one in seed_fits),
    )
    return Fit(FitRow(*columns, *errors, middle if question.noise else None, *rest, seed), case, weights)


def _again(fit: Fit, case: FitCase) -> Fit:
    return Fit(replace(fit.row, d_ff_plain=case.d_ff_plain), case, fit.weights)


# --- samples ----------------------------------------------------------------------------------------------------------


def _data(question: FitQuestion, target: Target) -> _TrainingData:
    domain, count = question.domain_of(target), question.samples_of(target)
    seeds = range(question.seed, question.seed + question.seeds)
    drawn = [_samples(question, target, domain, count, seed) for seed in seeds]
    points = _grid(domain, target.inputs)
    values = _values(target, points)
    x, y = (torch.stack(part) for part in zip(*drawn, strict=True))
    return _TrainingData(x, y, points, values, _floor(points, values))


def _samples(question: FitQuestion, target: Target, domain: Domain, count: int, seed: int) -> tuple[Tensor, Tensor]:
    """The training samples of one seed: x [samples, inputs] and y [samples, 1]."""
    low, high = domain
    if not question.noise:
        x = low + (high - low) * _evenly(count, target.inputs)
        return x, _values(target, x)
    generator = torch.Generator().manual_seed(_mixed(seed, 0))
    share = torch.rand(count, target.inputs, generator=generator, dtype=torch.float64)
    noise = torch.randn(count, 1, generator=generator, dtype=torch.float64)
    x = low + (high - low) * share
    return x, _values(target, x) + question.noise * noise


def _evenly(count: int, inputs: int) -> Tensor:
    """Points [count, inputs] of [0, 1]: equidistant with both ends, or the R2 sequence.

    R2: multiples of 1/g and 1/g² modulo 1, g³ = g + 1 (M. Roberts, The Unreasonable Effectiveness of Quasirandom
    Sequences, 2018).
    """
    if inputs == 1:
        return torch.linspace(0, 1, count, dtype=torch.float64).unsqueeze(1)
    plastic = 1.32471795724474602596
    steps = torch.tensor([1 / plastic, 1 / plastic**2], dtype=torch.float64)
    return (0.5 + torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(1) * steps) % 1


def _grid(domain: Domain, inputs: int) -> Tensor:
    """The middles of equal cells of the domain, [points, inputs]."""
    low, high = domain
    count = EVALUATED[inputs]
    line = low + (high - low) * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.cartesian_prod(*[line] * inputs).reshape(-1, inputs)


def _values(target: Target, x: Tensor) -> Tensor:
    value: Tensor = target.f(_NAMES, *x.unbind(1))
    return value.unsqueeze(1)


def _floor(x: Tensor, y: Tensor) -> float:
    """The rmse of the best straight line: slope cov(x, y) / var(x) along each input, on a grid the best fit."""
    off, rise = x - x.mean(0), y - y.mean()
    slope = (off * rise).sum(0) / off.square().sum(0)
    return _rms(rise - off @ slope.unsqueeze(1))


def _rms(error: Tensor) -> float:
    return math.sqrt(float(error.square().mean()))


def _mixed(seed: int, width: int) -> int:
    """A generator's seed for this seed and width: no two pairs share it."""
    return seed * (1 << 13) + width


_NAMES = SimpleNamespace(**vars(NAMESPACE), sin=torch.sin)
