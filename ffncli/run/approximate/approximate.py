"""Measure universal approximation: how well blocks of growing width fit a function, by activation."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ffncli.block.activations import TABLE
from ffncli.block.formulas import with_learned
from ffncli.block.steps import Activation, Linear, Multiply, Step, parameters
from ffncli.block.value import value
from ffncli.run.approximate.question import Domain, FitCase, FitQuestion, Target
from ffncli.run.engine.execute import NAMESPACE, execute, function, run
from ffncli.run.engine.threads import one_thread

EVALUATED = {1: 2048, 2: 64}  # maps the number of inputs to the number of points along each input
_OVERFITS = 1.1  # times the smallest held-out error


@dataclass(frozen=True)
class FitRow:
    """The figures of one block over its seeds. Errors are None if every seed diverged.

    `activation` names the unit (`swiglu` if it is gated by `function` silu). `rmse` and `max_error` (at the input
    `worst`) are the best seed's errors with respect to the noiseless target, at points other than the samples;
    `median_rmse` is the median over seeds. `train_rmse` is the median rmse on the samples, including their noise.
    `held_out_rmse` equals `median_rmse` if there is noise. `floor` is the rmse of the best straight line.
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
    """A row, and the best seed's float64 weights by canonical name; no weights if all seeds diverged."""

    row: FitRow
    case: FitCase
    weights: Mapping[str, Tensor] = field(repr=False)


@dataclass(frozen=True)
class Overfitting:
    """One activation's smallest held-out error over its widths, and the largest held-out error of the wider blocks.

    The activation `overfits` if the largest error is more than 1.1 times the smallest, while the wider block's error on
    the samples is smaller.
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
        """Whether a wider block's held-out error is more than 1.1 times the smallest held-out error."""
        return self.wider_rmse is not None and self.wider_rmse > _OVERFITS * self.best_rmse


@dataclass(frozen=True)
class _TrainingData:
    """Samples x [seeds, samples, inputs] and y [seeds, samples, 1]; errors are measured at `points` [n, inputs]."""

    x: Tensor
    y: Tensor
    points: Tensor
    values: Tensor
    floor: float


def fits(question: FitQuestion, cases: Iterable[FitCase], tick: "Advance" = lambda steps: None) -> Iterator[Fit]:
    """Yield a Fit for each case in order, as soon as it is done; report finished steps to `tick`.

    Training uses one thread, so that the figures depend only on the question's seeds, target, width and samples.
    """
    data = lru_cache(maxsize=1)(lambda target: _data(question, target))
    done: dict[object, Fit] = {}
    for case in cases:
        key = (case.target, case.name, case.spec.d_ff)
        if key in done:  # one narrow gated block may match two plain widths
            tick(question.steps)
            fit = done[key]
            yield Fit(replace(fit.row, d_ff_plain=case.d_ff_plain), case, fit.weights)
            continue
        with one_thread():
            done[key] = _fit(question, case, data(case.target), tick)
        yield done[key]


def overfitting(rows: Sequence[FitRow]) -> list[Overfitting]:
    """Find overfitting over widths for each target and activation, by medians over seeds; empty for a single width."""
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


def _fit(question: FitQuestion, case: FitCase, data: _TrainingData, tick: "Advance") -> Fit:
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
    seed_fits: "Sequence[tuple[float, int, Tensor, float, Weights]]",
) -> Fit:
    """Return the fit of one block: its best seed, and medians over all seeds that did not diverge."""
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
    """Return the training samples of one seed: x [samples, inputs] and y [samples, 1]."""
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
    """Return points [count, inputs] in [0, 1]: equidistant including both ends, or for two inputs the R2 sequence.

    R2 consists of the multiples of 1/g and 1/g² modulo 1, with g³ = g + 1 (M. Roberts, The Unreasonable Effectiveness
    of Quasirandom Sequences, 2018).
    """
    if inputs == 1:
        return torch.linspace(0, 1, count, dtype=torch.float64).unsqueeze(1)
    plastic = 1.32471795724474602596
    steps = torch.tensor([1 / plastic, 1 / plastic**2], dtype=torch.float64)
    return (0.5 + torch.arange(1, count + 1, dtype=torch.float64).unsqueeze(1) * steps) % 1


def _grid(domain: Domain, inputs: int) -> Tensor:
    """Return the centres of equal cells of the domain, [points, inputs]."""
    low, high = domain
    count = EVALUATED[inputs]
    line = low + (high - low) * (torch.arange(count, dtype=torch.float64) + 0.5) / count
    return torch.cartesian_prod(*[line] * inputs).reshape(-1, inputs)


def _values(target: Target, x: Tensor) -> Tensor:
    value: Tensor = target.f(_NAMES, *x.unbind(1))
    return value.unsqueeze(1)


def _floor(x: Tensor, y: Tensor) -> float:
    """Return the rmse of the best straight line: slope cov(x, y) / var(x) along each input; exact on a grid."""
    off, rise = x - x.mean(0), y - y.mean()
    slope = (off * rise).sum(0) / off.square().sum(0)
    return _rms(rise - off @ slope.unsqueeze(1))


def _rms(error: Tensor) -> float:
    return math.sqrt(float(error.square().mean()))


def _mixed(seed: int, width: int) -> int:
    """Return a generator's seed for this seed and width; different pairs get different seeds."""
    return seed * (1 << 13) + width


_NAMES = SimpleNamespace(**vars(NAMESPACE), sin=torch.sin)


Weights = dict[str, Tensor]
Advance = Callable[[int], None]
SPREAD = math.sqrt(3)  # half the width of a uniform distribution of unit variance
SLOPES = (0.5, 3.0)
RCOND = 1e-14  # times the largest singular value; singular values below that are rounding error
_TICK = 50  # training steps between two progress reports


def drawn(steps: Sequence[Step], seed: int) -> Weights:
    """Draw one seed's weights for inputs spread evenly over [-√3, √3]; every hidden unit has its kink in this range.

    A unit is v·(x - p) with a direction v of length 0.5 to 3 and a kink p in the domain; with one input the kinks of a
    layer are stratified. The weights depend only on the steps and the seed.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    out: Weights = {}
    for step in steps:
        if not isinstance(step.op, Linear):
            initial = TABLE[step.op.function].learned if isinstance(step.op, Activation) else {}
            out |= {f"{step.output}.{name}": torch.full((1,), value).double() for name, value in initial.items()}
            continue
        wide, into = step.op.out.size, step.op.into.size
        if step is steps[-1]:
            weight = torch.randn(wide, into, generator=generator, dtype=torch.float64) / math.sqrt(into)
            bias = torch.zeros(wide, dtype=torch.float64)
        else:
            direction = torch.randn(wide, into, generator=generator, dtype=torch.float64)
            length = SLOPES[0] + (SLOPES[1] - SLOPES[0]) * uniform(wide, 1)
            weight = direction / direction.norm(dim=1, keepdim=True) * length
            place = uniform(wide, into)
            if into == 1:
                place = (torch.arange(wide, dtype=torch.float64).unsqueeze(1) + place) / wide
            bias = -(weight * (2 * place - 1) * SPREAD).sum(1)
        out |= {f"{step.output}.weight": weight, f"{step.output}.bias": bias}
    return out


def train(
    steps: Sequence[Step], start: Sequence[Weights], x: Tensor, y: Tensor, count: int, tick: Advance
) -> list[Weights]:
    """Return each seed's weights after `count` steps of Adam on its own samples; the seeds are independent.

    x [seeds, samples, inputs] has about unit variance; y is [seeds, samples, 1]. Training runs in float32, whose
    rounding error is far below the training error. If a seed's training overflows, its weights end as NaN or Inf.
    """
    unit = y.std((1, 2), keepdim=True)
    unit = torch.where(unit == 0, torch.ones_like(unit), unit)  # a constant stays unchanged
    x, y = x.float(), (y / unit).float()
    weights = {
        name: torch.stack([seed_weights[name] for seed_weights in start]).float().requires_grad_() for name in start[0]
    }
    most = min(0.1, 0.2 / math.sqrt(weights[f"{steps[-1].output}.weight"].shape[-1]))  # decreases with d_ff
    adam = torch.optim.Adam(list(weights.values()), lr=most, fused=True)
    for at in range(count):
        adam.param_groups[0]["lr"] = most * _rate(at, count)
        adam.zero_grad()
        error = _together(steps, weights, x) - y
        # A sum over seeds keeps each seed's gradient independent of the other seeds.
        error.square().mean(1).sum().backward()  # type: ignore[no-untyped-call]
        adam.step()
        if (at + 1) % _TICK == 0 or at + 1 == count:
            tick(at % _TICK + 1)
    trained = {name: tensor.detach().double() for name, tensor in weights.items()}
    last = steps[-1].output  # convert back to the target's unit
    trained[f"{last}.weight"] *= unit
    trained[f"{last}.bias"] *= unit.squeeze(2)
    return [{name: tensor[i] for name, tensor in trained.items()} for i in range(len(start))]


def _rate(at: int, count: int) -> float:
    """Return the learning rate relative to its maximum: a rise over a twentieth of the steps, then a cosine decay."""
    rise = max(1, count // 20)
    if at < rise:
        return (at + 1) / rise
    return 0.5 * (1 + math.cos(math.pi * (at - rise) / max(1, count - rise)))


def unscaled(steps: Sequence[Step], weights: Weights, middle: float, scale: float) -> Weights:
    """Convert the weights of a block that reads (x - middle) / scale into weights of a block that reads x."""
    out = dict(weights)
    for step in steps:
        if isinstance(step.op, Linear) and step.inputs == ("x",):
            weight = weights[f"{step.output}.weight"] / scale
            out[f"{step.output}.weight"] = weight
            out[f"{step.output}.bias"] = weights[f"{step.output}.bias"] - middle * weight.sum(1)
    return out


def refitted(steps: Sequence[Step], weights: Weights, x: Tensor, y: Tensor) -> Weights:
    """Refit the last step's weights by least squares on x [samples, inputs] and y [samples, 1]; return all weights."""
    last = steps[-1]
    before = {name: weights[name] for name in parameters(steps[:-1])}
    tensors = {event.name: event.tensor for event in execute(steps[:-1], before, {"x": x})}
    hidden = tensors[last.inputs[0]]
    table = torch.cat([hidden, torch.ones_like(hidden[:, :1])], 1)
    size = table.norm(dim=0)  # scale to equal norms: RCOND would cut off small columns as rounding error
    size = torch.where(size == 0, torch.ones_like(size), size)
    solution = torch.linalg.lstsq(table / size, y, rcond=RCOND, driver="gelsd").solution / size.unsqueeze(1)
    return weights | {f"{last.output}.weight": solution[:-1].T.contiguous(), f"{last.output}.bias": solution[-1]}


def finite(weights: Mapping[str, Tensor]) -> bool:
    """Return whether all weights are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in weights.values())


def _together(steps: Sequence[Step], weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Run the block on x [seeds, samples, inputs]; every weight has a leading axis of seeds.

    `execute` has no such axis, and under vmap it takes twice as long, which matters in blocks this small. The trained
    block is measured with `execute`.
    """
    tensors = {"x": x}
    for step in steps:
        tensors[step.output] = _apply(step, weights, [tensors[name] for name in step.inputs])
    return tensors[steps[-1].output]


def _apply(step: Step, weights: Mapping[str, Tensor], x: Sequence[Tensor]) -> Tensor:
    op: Any = step.op
    match op:
        case Linear():
            weight = weights[f"{step.output}.weight"].transpose(1, 2)
            return torch.baddbmm(weights[f"{step.output}.bias"].unsqueeze(1), x[0], weight)
        case Activation():
            learned = {name: weights[f"{step.output}.{name}"].unsqueeze(-1) for name in op.parameters()}
            if not op.unlimited:  # only gated units have limits, and their functions have no learned parameters
                limited: Tensor = value(op, x[0], NAMESPACE)
                return limited
            if not learned:
                return function(op.function)(x[0])
            result: Tensor = TABLE[op.function].f(x[0], with_learned(NAMESPACE, learned))
            return result
        case Multiply():
            return x[0] * x[1]
        case _:
            raise AssertionError(f"no trained block has a {type(op).__name__}")
