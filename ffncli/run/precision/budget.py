"""A format for each matrix of each layer: the least predicted error within a budget of bits.

Each matrix is first rounded alone, to each format, and the error that this causes is its score. A choice is predicted
to cost the sum of its scores; errors of different matrices hardly correlate, so their squares add up, and so does a KL
divergence, which is quadratic in small errors. The chosen formats are then measured together.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import ceil, sqrt
from random import Random

import torch

from ffncli.block.formats import Format
from ffncli.errors import FFNError, option
from ffncli.models.model import Layer
from ffncli.run.precision.knapsack import Price, least_error
from ffncli.run.precision.question import PrecisionQuestion
from ffncli.run.precision.results import Budget, ComparedMix, MixedFormat, Score
from ffncli.run.precision.rounding import ExactLayer, for_inputs, matrices, matrices_in
from ffncli.run.quantize.quantized import quantize
from ffncli.show.text import counted

RANDOM_MIXES = 5
Place = tuple[Layer, str]
Mix = Mapping[Place, str]  # the name of a format for each layer and matrix; other matrices are exact
Measure = Callable[[Sequence[Mix]], list[float]]


@dataclass(frozen=True)
class PricedMatrix:
    """A matrix of a layer, such as W1 (in a mixture the W1 of all experts): its number of `weights`, and for each
    format that fits, all bits that it takes, scales included. `misfits` says why the other formats do not fit."""

    place: Place
    weights: int
    bits: Mapping[str, int]
    misfits: Mapping[str, FFNError]


@torch.no_grad()
def matrices_of(of: Layer, layer: ExactLayer, question: PrecisionQuestion) -> list[PricedMatrix]:
    """Return a layer's matrices, with the bits that they take in each format of the question."""
    return [_matrix(of, layer, name, question) for name in layer.tensors("weights")]


def _matrix(of: Layer, layer: ExactLayer, name: str, question: PrecisionQuestion) -> PricedMatrix:
    stacks = [layer.weights[parameter] for parameter, label in matrices(layer.steps).items() if label == name]
    every, bits, misfits = [one for stack in stacks for one in matrices_in(stack)], dict[str, int](), {}
    for label, form in question.formats:
        try:
            for one in every:
                form.block(tuple(one.shape))
                if question.rounds(form) == "both":
                    for_inputs(form).block((1, one.shape[-1]))
        except FFNError as error:
            misfits[label] = error
            continue
        bits[label] = sum(quantize(one, form).bits for one in every)
    if not bits:
        raise next(iter(misfits.values())).within(f"{option('budget')}: no format fits {name}")
    return PricedMatrix((of, name), sum(one.numel() for one in every), bits, misfits)


def formats_by_layer(mix: Mix, question: PrecisionQuestion) -> dict[Layer, dict[str, Format]]:
    """Return the formats of a mix, layer by layer and by the matrices' names."""
    formats, out = dict(question.formats), dict[Layer, dict[str, Format]]()
    for (layer, name), form in mix.items():
        out.setdefault(layer, {})[name] = formats[form]
    return out


def left_out(every: Sequence[PricedMatrix]) -> list[str]:
    """Return a sentence for each format that some matrices cannot have."""
    places: dict[str, list[PricedMatrix]] = {}
    for matrix in every:
        for name in matrix.misfits:
            places.setdefault(name, []).append(matrix)
    return [
        f"{name} is left out for {counted(len(some), 'matrix')}: {some[0].misfits[name].message}"
        for name, some in places.items()
    ]  # fmt: skip


def budget_of(
    question: PrecisionQuestion,
    every: Sequence[PricedMatrix],
    measure: Measure,
    score: Score,
    remark: Callable[[str], None],
) -> Budget:
    """Choose a format for each matrix. `measure` returns the error of each mix, in a measure of which scores add up.

    Raises FFNError if the budget is less than the smallest formats need.
    """
    assert question.budget is not None
    weights = sum(matrix.weights for matrix in every)
    limit = int(Fraction(str(question.budget)) * weights)
    least = sum(min(matrix.bits.values()) for matrix in every)
    if least > limit:
        needed = f"these formats need at least {ceil(1e4 * least / weights) / 1e4:g} bits a weight"
        raise FFNError(f"{option('budget')} is {question.budget:g}, but {needed}")
    singles = [(matrix.place, name) for matrix in every for name in matrix.bits]
    if question.in_whole_model:
        remark(f"the model runs once for each of {len(singles):,} pairs of a matrix and a format")
    scores = dict(zip(singles, measure([{place: name} for place, name in singles]), strict=True))
    costs = [[Price(bits, scores[matrix.place, name]) for name, bits in matrix.bits.items()] for matrix in every]
    solution = least_error(costs, limit)
    assert solution is not None
    chosen = {m.place: [*m.bits][at] for m, at in zip(every, solution.chosen, strict=True)}
    uniform = _uniform(every, limit)
    draw = Random(question.seed or 0)
    mixes = [chosen, *uniform.values(), *(random_mix(every, limit, draw) for _ in range(RANDOM_MIXES))]
    size: Callable[[float], float] = float if score == "kl" else sqrt

    def measured(name: str | None, mix: Mix, error: float) -> ComparedMix:
        bits = sum(matrix.bits[mix[matrix.place]] for matrix in every)
        predicted = sum(scores[place, form] for place, form in mix.items())
        return ComparedMix(name, bits / weights, size(predicted), size(error))

    names = [None, *uniform, *[None] * RANDOM_MIXES]
    best, *others = map(measured, names, mixes, measure(mixes))
    choices = tuple(
        MixedFormat(layer.stack, layer.index, name, chosen[layer, name], m.bits[chosen[layer, name]] / m.weights,
                    m.weights, size(scores[(layer, name), chosen[layer, name]]))
        for m in every for layer, name in [m.place]
    )  # fmt: skip
    return Budget(
        question.budget, score, question.what or "weights", best.bits, best.predicted, best.measured,
        solution.slack / weights, choices, tuple(others[: len(uniform)]), tuple(others[len(uniform) :]),
    )  # fmt: skip


def _uniform(every: Sequence[PricedMatrix], limit: int) -> dict[str, Mix]:
    """Return the mixes of one format that fit the budget, and the next larger one, the fewest bits first."""
    sizes = {
        name: sum(matrix.bits[name] for matrix in every)
        for name in every[0].bits if all(name in matrix.bits for matrix in every)
    }  # fmt: skip
    names = sorted(sizes, key=lambda name: sizes[name])
    count = sum(sizes[name] <= limit for name in names) + 1
    return {name: {matrix.place: name for matrix in every} for name in names[:count]}


def random_mix(every: Sequence[PricedMatrix], limit: int, draw: Random) -> Mix:
    """Draw a format for each matrix within the limit, then use up what is left of it: in random order, each matrix gets
    any format that fits, and in a second round the largest."""
    mix = {matrix.place: min(matrix.bits, key=lambda name: matrix.bits[name]) for matrix in every}
    left = limit - sum(matrix.bits[mix[matrix.place]] for matrix in every)
    order = draw.sample(every, len(every))
    for last in (False, True):
        for matrix in order:
            now = matrix.bits[mix[matrix.place]]
            fitting = [name for name, bits in matrix.bits.items() if bits <= now + left]
            name = max(fitting, key=lambda name: matrix.bits[name]) if last else draw.choice(fitting)
            mix[matrix.place], left = name, left + now - matrix.bits[name]
    return mix
