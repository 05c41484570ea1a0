"""The arithmetic behind one value of a step, repeated in float64, with a function per op.

The functions start from the values that the step read (inputs and weights, already rounded), so their results differ
from the step's results only by the rounding errors of that step.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ffncli.block.formulas import with_learned
from ffncli.block.steps import Activation, Add, Dropout, Experts, Norm
from ffncli.block.value import clipped, slope, unlimited, value
from ffncli.run.engine.execute import NAMESPACE
from ffncli.run.explain.scene import Read, Scene, TensorPlace
from ffncli.run.measure.gap import exact_sum
from ffncli.show.tensors import written

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class Factor:
    """An operand: its place (`x[0,3]`, `up.weight[5,3]`, with indices in torch's order) and its value.

    `symbol` is the same place as printed in formulas, `W1[3,5]`, with indices [in,out]; empty if the operand is not a
    weight.
    """

    place: str
    value: float
    symbol: str = ""


@dataclass(frozen=True)
class Term:
    """One summand: the product of its factors."""

    factors: tuple[Factor, ...]
    value: float


@dataclass(frozen=True)
class Quantity:
    """A named intermediate value; `place` is its place in a tensor, if it is an element of one."""

    name: str
    value: float
    place: str = ""


@dataclass(frozen=True)
class Choice:
    """The router's figures for one expert: logit, score, the value that decided (`choice`), and weight."""

    expert: int
    logit: float
    score: float | None
    choice: float
    group: int | None
    chosen: bool
    weight: float


@dataclass(frozen=True)
class Derivation:
    """The computation of a value: the largest terms, the sum of the other terms, intermediate values, and the result in
    float64.

    `origin` is the operand that contributes most, as (printed name, index).
    """

    computed: float
    terms: tuple[Term, ...] = ()
    others: int = 0
    others_sum: float = 0.0
    quantities: tuple[Quantity, ...] = ()
    experts: tuple[Choice, ...] = ()
    notes: tuple[str, ...] = ()
    origin: tuple[str, tuple[int, ...]] | None = None


def linear(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain Σ x[i] · W[out,i] + b[out], with at most `most` products, the largest in magnitude (NaN is largest)."""
    read, unit = scene.read(place, 0, index[:-1]), index[-1]
    parameter = scene.weight(place, "weight")
    assert parameter is not None
    name, weight, share, symbol = parameter
    row = weight[unit].double()
    products = read.row * row
    order = _largest(products)
    terms = tuple(
        _product(
            Factor(read.at(i), read.row[i].item()),
            Factor(written(name, (*share, unit, i)), row[i].item(), written(symbol, (i, unit))),
        )
        for i in order[:most]
    )
    rest = products[order[most:]].tolist()
    summed = [products.tolist()]
    quantities: tuple[Quantity, ...] = ()
    if bias := scene.weight(place, "bias"):
        value = bias[1][unit].item()
        quantities = (Quantity(written(bias[3], (unit,)), value, written(bias[0], (*bias[2], unit))),)
        summed.append([value])
    total = exact_sum([value for values in summed for value in values])
    return Derivation(total, terms, len(rest), exact_sum(rest), quantities, origin=origin_of(read, order[0]))


def activation(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain the activation, with its slope (0 beyond a limit) and the ratio f(x)/x."""
    op = op_of(place, Activation)
    read = scene.read(place, 0, index[:-1])
    x = read.row[index[-1]]
    assert place.step is not None
    learned = {p: parameter[1].double() for p in op.parameters() if (parameter := scene.weight(place, p))}
    m = with_learned(NAMESPACE, learned) if learned else NAMESPACE
    inside, y = clipped(op, x, m), value(replace(op, plus=0.0), x, m)
    free = unlimited(op, inside, m)
    quantities = [Quantity("x", x.item(), read.at(index[-1]))]
    if op.low is not None or op.high is not None:
        quantities.append(Quantity("clipped x", inside.item()))
    quantities += [Quantity(name, number.item(), f"{place.step.output}.{name}") for name, number in learned.items()]
    plain = replace(op, low=None, high=None, most=None, plus=0.0)
    quantities.append(Quantity(plain.formula(("x",), str), free.item()))
    if op.most is not None:
        quantities.append(Quantity(f"at most {op.most:g}", y.item()))
    quantities.append(Quantity("slope there", slope(op, x, m).item()))
    if inside != 0:
        name = "value" if op.soft_cap or op.most else f"{op.function}(x)"
        quantities.append(Quantity(f"{name} / x", (y / inside).item() + 0.0))  # turns -0 into 0
    if op.plus:
        quantities.append(Quantity("plus", op.plus))
    notes = []
    if inside != x and not x.isnan():
        notes.append(f"x is clipped to {inside.item():g}: the slope is 0 there")
    if y != free and not free.isnan():
        notes.append(f"the value is limited to {op.most:g}: the slope is 0 there")
    return Derivation(
        y.item() + op.plus, quantities=tuple(quantities), notes=tuple(notes), origin=origin_of(read, index[-1])
    )


def multiply(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain the elementwise product of all inputs; an input with one feature multiplies all features of its token."""
    reads, factors = _elements(scene, place, index)
    origin = _largest_of(reads, factors, index)
    if factor := scene.weight(place, "factor"):
        at = index[-1] if len(factor[1]) > 1 else 0
        factors.append(Factor(written(factor[0], (at,)), factor[1][at].item(), factor[3]))
    return Derivation(math.prod(f.value for f in factors), (_product(*factors),), origin=origin)


def add(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain the sum of all inputs; the last input is multiplied by the op's scale."""
    reads, factors = _elements(scene, place, index)
    scale = op_of(place, Add).scale
    terms = [_product(factor) for factor in factors]
    if scale != 1:
        terms[-1] = _product(Factor("scale", scale), factors[-1])
    heaviest = [Factor(f.place, term.value) for f, term in zip(factors, terms, strict=True)]
    if bias := scene.weight(place, "bias"):
        terms.append(_product(Factor(written(bias[0], (index[-1],)), bias[1][index[-1]].double().item())))
    total = exact_sum([term.value for term in terms])
    return Derivation(total, tuple(terms), origin=_largest_of(reads, heaviest, index))


def norm(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain LayerNorm (x - mean) / √(variance + eps) or RMSNorm x / √(mean(x²) + eps), followed by weight and bias.

    If the weight multiplies the input, x is that product.
    """
    op, feature = op_of(place, Norm), index[-1]
    read = scene.read(place, 0, index[:-1])
    first = scene.weight(place, "weight") if op.weigh == "input" else None
    if first:
        read = replace(read, row=read.row * (first[1].double() + (1 if op.weight == "one_plus" else 0)))
    x, mean = read.row[feature], read.row.mean()
    centred = read.row - mean if op.kind == "layernorm" else read.row
    spread = centred.square().mean()
    root = (spread + op.eps).sqrt()
    normed = centred[feature] / root
    name = "variance" if op.kind == "layernorm" else "mean square"
    product = f"{'(1 + weight)' if op.weight == 'one_plus' else 'weight'} · {read.at(feature)}"
    quantities = [Quantity("x", x.item(), product if first else read.at(feature))]
    quantities += [Quantity("mean", mean.item())] if op.kind == "layernorm" else []
    quantities += [
        Quantity(name, spread.item()),
        Quantity("eps", op.eps),
        Quantity(f"√({name} + eps)", root.item()),
        Quantity("normalised x", normed.item()),
    ]
    total = normed
    if (weight := scene.weight(place, "weight")) and not first:
        quantities.append(Quantity("weight", weight[1][feature].item(), written(weight[0], (*weight[2], feature))))
        by = weight[1][feature].double() + (1 if op.weight == "one_plus" else 0)
        quantities += [Quantity("1 + weight", by.item())] if op.weight == "one_plus" else []
        total = total * by
    if bias := scene.weight(place, "bias"):
        quantities.append(Quantity("bias", bias[1][feature].item(), written(bias[0], (*bias[2], feature))))
        total = total + bias[1][feature].double()
    at = _largest(centred)[0]
    part = centred[at].square() / centred.square().sum()
    largest = f"{read.at(at)}{' times its weight' if first else ''} = {read.row[at].item():.6g}"
    notes = (f"{largest} alone contributes {100 * part.item():.3g} % of the {name}",)
    return Derivation(total.item(), quantities=tuple(quantities), notes=notes, origin=origin_of(read, feature))


def dropout(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain x in eval mode; in training, x / (1 - p) if x is kept, else 0. If there is no mask, the result shows
    whether x was kept."""
    op = op_of(place, Dropout)
    read = scene.read(place, 0, index[:-1])
    x, origin = read.row[index[-1]].item(), origin_of(read, index[-1])
    quantities: tuple[Quantity, ...] = (Quantity("x", x, read.at(index[-1])),)
    if not scene.mode.train:
        return Derivation(x, quantities=quantities, notes=("eval mode: dropout changes nothing",), origin=origin)
    assert place.step is not None
    mask = scene.mode.masks.get(place.step.output)
    mask_value = bool(mask[index]) if mask is not None else None
    kept = bool(scene.tensors[place.name][index] != 0) if mask_value is None else mask_value
    if x == 0 and mask_value is None:
        return Derivation(0.0, quantities=quantities, notes=("x is zero: kept or dropped, it stays 0",), origin=origin)
    if not kept:
        return Derivation(
            0.0, quantities=quantities, notes=(f"dropped (each value is dropped with p = {op.p:g})",), origin=origin
        )
    scale = 1 / (1 - op.p)
    quantities += (Quantity("1 / (1 - p)", scale),)
    return Derivation(x * scale, quantities=quantities, notes=(f"kept, and scaled (p = {op.p:g})",), origin=origin)


def experts(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain Σ route[e] · expert_e with a term per chosen expert, or Σ expert_e if the route scales the input."""
    op = op_of(place, Experts)
    assert place.step is not None
    leading, feature = index[:-1], index[-1]
    x, route = scene.read(place, 0, leading), scene.read(place, 1, leading)
    last = op.program[-1].output
    chosen = route.row[op.entries].nonzero().flatten().tolist()
    first = range(len(route.row))[op.entries].start
    terms: list[Term] = []
    origins: list[tuple[str, tuple[int, ...]]] = []
    for expert in chosen:
        name = f"{place.name}.{expert}.{last}"
        inner = TensorPlace(name, op.program[-1], op.program, place.step, expert)
        at = (scene.tokens(inner).index(_flat(leading, scene.tensors[place.name].shape[:-1])), feature)
        out = Factor(written(name, at), scene.tensors[name][at].double().item())
        by = Factor(route.at(first + expert), route.row[first + expert].item())
        terms.append(_product(by, out) if op.weigh == "output" else _product(out))
        origins.append((name, at))
    identity = exact_sum(route.row[-op.identity :].tolist()) if op.identity else 0.0
    if identity:
        by, token = Factor("weights of identity experts", identity), Factor(x.at(feature), x.row[feature].item())
        terms.append(_product(by, token))
        origins.append((x.name, (*x.leading, feature)))
    notes = () if op.weigh == "output" else ("the route's weights multiply the experts' inputs, not their outputs",)
    order = _largest(torch.tensor([term.value for term in terms], dtype=torch.float64))
    total = exact_sum([term.value for term in terms])
    ranked = tuple(terms[at] for at in order)
    return Derivation(total, ranked, notes=notes, origin=origins[order[0]] if order else None)


def all_reduce(scene: Scene, place: TensorPlace, index: tuple[int, ...], most: int) -> Derivation:
    """Explain the sum over ranks: this rank's part, and the sum of the other ranks' parts."""
    read = scene.read(place, 0, index[:-1])
    part, total = read.row[index[-1]].item(), scene.tensors[place.name][index].double().item()
    quantities = (
        Quantity("this rank's part", part, read.at(index[-1])),
        Quantity("the other ranks' part", total - part),
    )
    return Derivation(total, quantities=quantities, origin=origin_of(read, index[-1]))


# --- shared functions
# ----------------------------------------------------------------------------------------------------


def _elements(scene: Scene, place: TensorPlace, index: tuple[int, ...]) -> tuple[list[Read], list[Factor]]:
    """Return the element of every input that corresponds to `index`; an input of one feature has only one element."""
    assert place.step is not None
    reads = [scene.read(place, which, index[:-1]) for which in range(len(place.step.inputs))]
    features = [index[-1] if read.row.shape[0] > 1 else 0 for read in reads]
    return reads, [Factor(r.at(f), r.row[f].item()) for r, f in zip(reads, features, strict=True)]


def _largest_of(
    reads: Sequence[Read], factors: Sequence[Factor], index: tuple[int, ...]
) -> tuple[str, tuple[int, ...]]:
    """Return the input that contributes most, as (printed name, index)."""
    best = _largest(torch.tensor([factor.value for factor in factors], dtype=torch.float64))[0]
    return origin_of(reads[best], index[-1] if reads[best].row.shape[0] > 1 else 0)


def _product(*factors: Factor) -> Term:
    return Term(factors, math.prod(factor.value for factor in factors))


def _largest(values: Tensor) -> list[int]:
    """Return positions sorted by descending absolute value; NaN first, ties in order."""
    return [int(at) for at in values.abs().argsort(descending=True, stable=True)]


def origin_of(read: Read, feature: int) -> tuple[str, tuple[int, ...]]:
    """Return the place of an operand, as (printed name, index)."""
    return read.name.rpartition(" · ")[2], (*read.leading, feature)


def _flat(index: tuple[int, ...], shape: Sequence[int]) -> int:
    """Return the flat index of an element in row-major order."""
    flat = 0
    for at, size in zip(index, shape, strict=True):
        flat = flat * size + at
    return flat


def op_of(place: TensorPlace, kind: type[_Kind]) -> _Kind:
    """Return the op of a place's step, of the expected class."""
    assert place.step is not None
    assert isinstance(place.step.op, kind)
    return place.step.op
