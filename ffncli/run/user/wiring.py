"""Which of a module's parameters could be a block's gate, up, down and norms: every arrangement of fitting shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from itertools import permutations, product

from torch import Tensor

from ffncli.block.recipe import NormKind, NormPosition, NormWeight
from ffncli.block.steps import Shape
from ffncli.dataclass import dataclass

MOST_MATRICES = 6  # more are not a dense block; the arrangements of three grow with the cube
_MOST_VECTORS = 4
EPS = (1e-5, 1e-6, 1e-8, 1e-12)


@dataclass(frozen=True)
class View:
    """A canonical tensor inside a module's parameter: [out, in] after transposing, then rows start:stop:step."""

    parameter: str
    transposed: bool = False
    start: int | None = None
    stop: int | None = None
    step: int | None = None

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """The tensor; a 1×1 convolution's weight counts as a matrix."""
        tensor = parameters[self.parameter]
        tensor = tensor.reshape(tensor.shape[:2])
        return (tensor.T if self.transposed else tensor)[self.start : self.stop : self.step]

    def __str__(self) -> str:
        rows = "" if self == View(self.parameter, self.transposed) else f"[{self.start or 0}:{self.stop or ''}"
        rows += f":{self.step}]" if self.step else "]" if rows else ""
        return self.parameter + ("ᵀ" if self.transposed else "") + rows


Wiring = Mapping[str, View]  # canonical name (`up.weight`) → its place


@dataclass(frozen=True)
class Norms:
    """One way to normalise a block; `views` are the places of the norms' parameters."""

    kind: NormKind = "none"
    position: NormPosition = "pre"
    eps: float = 1e-5
    weight: NormWeight = "plain"
    bias: bool = False
    views: Wiring = field(default_factory=dict, hash=False)

    @property
    def pre(self) -> bool:
        """Whether it normalises the input."""
        return self.kind != "none" and self.position in ("pre", "pre+branch")

    @property
    def closes(self) -> bool:
        """Whether it normalises the output."""
        return self.kind != "none" and self.position != "pre"


@dataclass(frozen=True)
class _Projection:
    view: View
    width: int


def matrices(shapes: Mapping[str, Shape], d_model: int) -> dict[str, tuple[int, int]]:
    """The parameters that can be a projection: [out, in], or [out, in, 1, ...] as in 1×1 convolutions."""
    out = {}
    for name, shape in shapes.items():
        if len(shape) >= 2 and set(shape[2:]) <= {1} and d_model in shape[:2]:
            out[name] = (shape[0], shape[1])
    return out


def wirings(shapes: Mapping[str, Shape], d_model: int) -> Iterator[Wiring]:
    """Every arrangement of the module's matrices as a plain or gated block, with their biases.

    A matrix has one role, unless there is only one matrix. Biases belong to their matrix by name; a matrix without one
    has no bias in the block.
    """
    sizes = matrices(shapes, d_model)
    rises, falls = _projections(sizes, d_model), _projections(sizes, d_model, fall=True)
    for up, down in product(rises, falls):
        if up.view.parameter == down.view.parameter and len(sizes) > 1:
            continue
        if up.width == down.width:
            yield _with_biases({"up": up.view, "down": down.view}, shapes)
        if up.width == 2 * down.width:
            for gate, other in _halves(up.view, down.width):
                yield _with_biases({"gate": gate, "up": other, "down": down.view}, shapes)
    for gated, up, down in product(rises, rises, falls):
        names = {part.view.parameter for part in (gated, up, down)}
        if len(names) == 3 and gated.width == up.width == down.width:
            yield _with_biases({"gate": gated.view, "up": up.view, "down": down.view}, shapes)


def biases(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Matrix → its bias, by name: `up.weight` and `up.bias`, `w1` and `b1`, `W_up` and `b_up`."""
    out = {}
    for name, shape in shapes.items():
        if len(shape) < 2:
            continue
        stem, dot, last = name.rpartition(".")
        spelt = [re.sub("weight|kernel", "bias", last), re.sub("[wW]", "b", last), re.sub("[wW]", "B", last)]
        spelt.append(f"{last}_bias")
        candidates = [stem + dot + text for text in spelt if text != last]
        match = next((c for c in candidates if len(shapes.get(c, ())) == 1), None)
        if match:
            out[name] = match
    return out


def norms(shapes: Mapping[str, Shape], d_model: int, eps: Sequence[float]) -> list[Norms]:
    """No norm first, then every norm that the module's vectors allow, those that use the most vectors first."""
    taken = set(biases(shapes).values())
    vectors = [name for name, shape in shapes.items() if shape == (d_model,) and name not in taken][:_MOST_VECTORS]
    places: dict[NormPosition, tuple[str, ...]] = {
        "pre": ("norm",), "post": ("post_norm",), "branch": ("post_norm",), "pre+branch": ("norm", "post_norm"),
    }  # fmt: skip
    parameter_sets: tuple[tuple[NormWeight, bool], ...] = (
        ("plain", True), ("plain", False), ("one_plus", True), ("one_plus", False), ("none", False),
    )  # fmt: skip
    kinds: tuple[NormKind, ...] = ("layernorm", "rmsnorm")
    out = []
    for (position, steps), kind, (weight, bias) in product(places.items(), kinds, parameter_sets):
        param_names = (*(["weight"] if weight != "none" else []), *(["bias"] if bias else []))
        names = [f"{step}.{parameter}" for step in steps for parameter in param_names]
        for chosen in permutations(vectors, len(names)):
            views = {name: View(vector) for name, vector in zip(names, chosen, strict=True)}
            out += [Norms(kind, position, e, weight, bias, views) for e in eps]
    return [Norms(), *sorted(out, key=lambda choice: -len(choice.views))]


def _projections(sizes: Mapping[str, tuple[int, int]], d_model: int, fall: bool = False) -> list[_Projection]:
    """Every view of a matrix as a map from d_model (or, with `fall`, to d_model), the stored orientation first."""
    out = []
    for name, (first, second) in sizes.items():
        for transposed in (False, True):
            rows, columns = (second, first) if transposed else (first, second)
            width, fixed = (columns, rows) if fall else (rows, columns)
            if fixed == d_model:
                out.append(_Projection(View(name, transposed), width))
    return out


def _halves(fused: View, width: int) -> Iterator[tuple[View, View]]:
    """Gate and up inside one matrix: concatenated or interleaved by rows, either one first."""
    name, transposed = fused.parameter, fused.transposed
    first, second = View(name, transposed, None, width), View(name, transposed, width)
    even, odd = View(name, transposed, None, None, 2), View(name, transposed, 1, None, 2)
    yield from ((first, second), (second, first), (even, odd), (odd, even))


def _with_biases(weights: Mapping[str, View], shapes: Mapping[str, Shape]) -> Wiring:
    paired = biases(shapes)
    out = {}
    for role, view in weights.items():
        out[f"{role}.weight"] = view
        bias = paired.get(view.parameter)
        rows = shapes[view.parameter][1 if view.transposed else 0]
        if bias is not None and shapes[bias] == (rows,):
            out[f"{role}.bias"] = View(bias, False, view.start, view.stop, view.step)
    return out
