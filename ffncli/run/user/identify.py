"""Identify the block that a module computes, by comparing its outputs with the outputs of every arrangement of its
parameters.

`wirings` yields the arrangements: every assignment of matrices with fitting shapes to gate, up and down; `norms` lists
the choices of norms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import permutations, product
from math import inf
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.activations import TABLE
from ffncli.block.recipe import FFNSpec, NormKind, NormPosition, NormWeight, steps
from ffncli.block.steps import Axis, Norm, Shape
from ffncli.run.engine.execute import function, norm, run

ACTIVATIONS = tuple(name for name, row in TABLE.items() if not row.learned)
_SCREENED = 4  # tokens for the first try of every arrangement; an arrangement that fits is tried on all tokens
_ROWS = 16  # output values compared per token, unless an output norm needs all values


@dataclass(frozen=True)
class ModuleSample:
    """A module's output `y` for the input `x`, both [tokens, d_model], computed with `parameters` in x's dtype.

    `tolerance` is the largest relative error at which another computation counts as the same; `eps` are the epsilons to
    try for norms. `residual` is True if the module adds its input, `pre` is True if it normalises its input; each is
    None if unknown.
    """

    parameters: Mapping[str, Tensor]
    x: Tensor
    y: Tensor
    tolerance: float
    eps: tuple[float, ...]
    residual: bool | None = None
    pre: bool | None = None

    def allows(self, choice: Norms) -> bool:
        """Return whether the module may be a block with the norms `choice`."""
        return self.pre in (None, choice.pre) and not (self.residual and choice.position == "post")


@dataclass(frozen=True)
class Match:
    """A candidate block: where its weights are in the module, and the largest relative error of its outputs.

    `errors` are the errors of all activations in the same arrangement.
    """

    activation: str
    wiring: Wiring
    norms: Norms
    residual: bool
    error: float
    errors: Mapping[str, float]

    @property
    def next_best(self) -> tuple[str, float]:
        """The second-best activation and its error."""
        name = min((n for n in self.errors if n != self.activation), key=lambda n: self.errors[n])
        return name, self.errors[name]

    @property
    def views(self) -> Wiring:
        """The part of a parameter that holds each weight, norms included, by canonical name."""
        return {**self.wiring, **self.norms.views}

    @property
    def mixed_bias(self) -> bool:
        """Whether only one of gate and up has a bias."""
        return "gate.weight" in self.wiring and ("gate.bias" in self.wiring) != ("up.bias" in self.wiring)

    @property
    def tied(self) -> tuple[str, ...]:
        """The parameters of the down projection that are also those of another projection: `weight`, `bias`."""
        others = {view.parameter for name, view in self.wiring.items() if not name.startswith("down.")}
        names = [name for name, view in self.wiring.items() if name.startswith("down.") and view.parameter in others]
        return tuple(name.removeprefix("down.") for name in names)

    def weights(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the canonical weights taken from the module's parameters."""
        return {name: view.of(parameters).contiguous() for name, view in self.views.items()}

    def spec(self, parameters: Mapping[str, Tensor]) -> FFNSpec:
        """Return the block as a spec."""
        d_model, d_ff = self.wiring["down.weight"].of(parameters).shape
        return FFNSpec(
            d_model, d_ff, self.activation, gated="gate.weight" in self.wiring, bias="up.bias" in self.wiring,
            down_bias=_unless_same("down.bias" in self.wiring, "up.bias" in self.wiring), tied=self.tied,
            norm=self.norms.kind, norm_position=self.norms.position, norm_eps=self.norms.eps,
            norm_weight=self.norms.weight, norm_bias=self.norms.bias, residual=self.residual,
        )  # fmt: skip

    def evidence(self, parameters: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield the lines of evidence for the block."""
        other, off = self.next_best
        yield f"activation: {self.activation} matches its outputs to {self.error:.1e} (next best: {other}, {off:.1e})"
        weights = {n.removesuffix(".weight"): view for n, view in self.wiring.items() if n.endswith(".weight")}
        where = ", ".join(f"{name} = {view}" for name, view in weights.items())
        yield f"{'gated' if 'gate' in weights else 'plain'}: {where}"
        d_ff, down = self.spec(parameters).d_ff, weights["down"].parameter
        yield f"d_ff: {d_ff}, from {down} {list(parameters[down].shape)}"
        if self.norms.kind != "none":
            parts = ", ".join(f"{name} = {view}" for name, view in self.norms.views.items()) or "no parameters"
            yield f"norm: {self.norms.kind}, {self.norms.position}, eps {self.norms.eps:g}: {parts}"
        if self.residual:
            yield "residual: the input is added to the block's result"


def _unless_same(value: bool, usual: bool) -> bool | None:
    return None if value == usual else value


def identify(probe: ModuleSample) -> Match | None:
    """Return the first arrangement that reproduces the module's outputs within the tolerance, else the nearest
    arrangement.

    Return None if no two matrices of the module can form a block. The search ignores all names except bias names.
    """
    search = ArrangementSearch(probe)
    shapes = {name: tuple(tensor.shape) for name, tensor in probe.parameters.items()}
    d_model = probe.x.shape[-1]
    arrangements = list(wirings(shapes, d_model))
    best: Match | None = None
    for choice, wiring in product(filter(probe.allows, norms(shapes, d_model, probe.eps)), arrangements):
        match = search.best(wiring, choice, _SCREENED)
        if match.error <= probe.tolerance:
            match = search.best(wiring, choice, len(probe.x))
        if match.error <= probe.tolerance:
            return match
        if best is None or match.error < best.error:
            best = match
    return best


class BlockMatch(Protocol):
    """What a module is found to compute: a dense block, or a mixture of experts."""

    @property
    def activation(self) -> str:
        """The block's activation."""

    @property
    def error(self) -> float:
        """The largest relative error of its outputs."""

    @property
    def views(self) -> Mapping[str, WeightPlace]:
        """Where the module holds each weight, by canonical name."""

    @property
    def tied(self) -> tuple[str, ...]:
        """The parameters of the down projection that are also those of another projection."""

    def spec(self, parameters: Mapping[str, Tensor]) -> FFNSpec:
        """Return the block as a spec."""

    def weights(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the canonical weights taken from the module's parameters."""

    def evidence(self, parameters: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield the lines of evidence for the block."""


class WeightPlace(Protocol):
    """Where a module holds a canonical tensor."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the module's parameters that hold the tensor."""

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, taken from `parameters`."""

    def write(self, parameters: Mapping[str, Tensor], tensor: Tensor) -> None:
        """Write the tensor into `parameters`."""


def confirmed(match: BlockMatch, probe: ModuleSample) -> float:
    """Return the relative error of the match's block, run step by step by the reference execution."""
    block = steps(match.spec(probe.parameters))
    return errors_of(run(block, match.weights(probe.parameters), {"x": probe.x})[None], probe.y)[0]


@dataclass(frozen=True)
class Norms:
    """A choice of norms for a block; `views` tell where the norms' parameters are."""

    kind: NormKind = "none"
    position: NormPosition = "pre"
    eps: float = 1e-5
    weight: NormWeight = "plain"
    bias: bool = False
    views: Wiring = field(default_factory=dict, hash=False)

    @property
    def pre(self) -> bool:
        """Whether there is a norm on the block's input."""
        return self.kind != "none" and self.position in ("pre", "pre+branch")

    @property
    def closes(self) -> bool:
        """Whether there is a norm on the block's output."""
        return self.kind != "none" and self.position != "pre"


@dataclass
class ArrangementSearch:
    """A search that computes the errors of all activations at once, and common parts of arrangements only once. The
    caches are `plain` for blocks without a norm on the input and `normed` for blocks with the input norm of `choice`.
    """

    probe: ModuleSample
    choice: Norms = field(default_factory=Norms)
    plain: dict[tuple[object, ...], Tensor] = field(default_factory=dict)
    normed: dict[tuple[object, ...], Tensor] = field(default_factory=dict)

    def best(self, wiring: Wiring, choice: Norms, tokens: int) -> Match:
        """Return the best activation for an arrangement, with or without a residual, on the first `tokens` tokens."""
        x, y = self.probe.x[:tokens], self.probe.y[:tokens]
        rows = len(x[0]) if choice.closes else _ROWS
        down = self.down(wiring, choice, tokens, rows)
        matches: list[Match] = []
        for residual in (False, True):
            out = _normed(down, "post_norm", choice, self.probe) if choice.position.endswith("branch") else down
            out = out + x[:, :rows] if residual else out
            out = _normed(out, "post_norm", choice, self.probe) if choice.position == "post" else out
            errors = dict(zip(ACTIVATIONS, errors_of(out, y[:, :rows]), strict=True))
            fitting = [name for name in ACTIVATIONS if errors[name] <= self.probe.tolerance]
            # The first fitting activation, in the table's order: gelu comes before gelu_10.
            name = fitting[0] if fitting else min(errors, key=lambda n: errors[n])
            matches.append(Match(name, wiring, choice, residual, errors[name], errors))
        return min(matches, key=lambda match: match.error)

    def down(self, wiring: Wiring, choice: Norms, tokens: int, rows: int) -> Tensor:
        """Return the down projection's first `rows` outputs for every activation: [activations, tokens, rows]."""
        if self.choice != choice:
            self.choice, self.normed = choice, {}
        cache = self.normed if choice.pre else self.plain
        key = (*wiring.values(), tokens, rows)
        if key not in cache:
            x = _normed(self.probe.x[:tokens], "norm", choice, self.probe) if choice.pre else self.probe.x[:tokens]
            raised = {role: self._rise(x, role, wiring, cache) for role in ("gate", "up") if f"{role}.weight" in wiring}
            hidden = torch.stack([function(name)(raised.get("gate", raised["up"])) for name in ACTIVATIONS])
            hidden = hidden * raised["up"] if "gate" in raised else hidden
            cache[key] = self._linear(hidden, "down", wiring, rows)
        return cache[key]

    def _rise(self, x: Tensor, role: str, wiring: Wiring, cache: dict[tuple[object, ...], Tensor]) -> Tensor:
        key = (wiring[f"{role}.weight"], wiring.get(f"{role}.bias"), len(x))
        if key not in cache:
            cache[key] = self._linear(x, role, wiring)
        return cache[key]

    def _linear(self, x: Tensor, role: str, wiring: Wiring, rows: int | None = None) -> Tensor:
        bias = wiring.get(f"{role}.bias")
        weight = wiring[f"{role}.weight"].of(self.probe.parameters)[:rows]
        return functional.linear(x, weight, None if bias is None else bias.of(self.probe.parameters)[:rows])


def _normed(x: Tensor, step: str, choice: Norms, probe: ModuleSample) -> Tensor:
    """Return x [..., d_model] after the norm `step` (`norm` or `post_norm`), if `choice` has that norm."""
    if choice.kind == "none":
        return x
    op = Norm(choice.kind, Axis("d_model", x.shape[-1]), choice.eps, choice.weight, choice.bias)
    params = {p: choice.views[f"{step}.{p}"].of(probe.parameters) for p in op.parameters()}
    return norm(op, params, x)


def errors_of(candidates: Tensor, y: Tensor) -> list[float]:
    """Return, for each of the candidates [n, tokens, values], the maximum over tokens of max|a - b| / max|b|."""
    size = y.abs().amax(-1)
    # Errors of a token whose output is nearly 0 are relative to the other tokens; if all are 0, errors are absolute.
    size = size.clamp(min=1e-6 * float(size.max()) or 1.0)
    worst = ((candidates - y).abs().amax(-1) / size).amax(-1).double()
    return torch.nan_to_num(worst, nan=inf, posinf=inf).tolist()


MOST_MATRICES = 6  # no dense block has more; the number of gated arrangements grows with the cube of this limit
_MOST_VECTORS = 4
EPS = (1e-5, 1e-6, 1e-8, 1e-12)


@dataclass(frozen=True)
class View:
    """A canonical tensor inside a module's parameter: transposed to [out, in] if needed, then rows start:stop:step."""

    parameter: str
    transposed: bool = False
    start: int | None = None
    stop: int | None = None
    step: int | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """The name of the parameter, as for tensors that are held in several."""
        return (self.parameter,)

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, taken from `parameters`; the weight of a 1×1 convolution becomes a matrix."""
        tensor = parameters[self.parameter]
        tensor = tensor.reshape(tensor.shape[:2])
        return (tensor.T if self.transposed else tensor)[self.start : self.stop : self.step]

    def write(self, parameters: Mapping[str, Tensor], tensor: Tensor) -> None:
        """Write the tensor into `parameters`."""
        self.of(parameters).copy_(tensor)

    def __str__(self) -> str:
        rows = "" if self == View(self.parameter, self.transposed) else f"[{self.start or 0}:{self.stop or ''}"
        rows += f":{self.step}]" if self.step else "]" if rows else ""
        return self.parameter + ("ᵀ" if self.transposed else "") + rows


Wiring = Mapping[str, View]  # maps a canonical name (`up.weight`) to its view in the module


def matrices(shapes: Mapping[str, Shape], d_model: int) -> dict[str, tuple[int, int]]:
    """Return the shapes of possible projections: [out, in], or [out, in, 1, ...] as in 1×1 convolutions."""
    out = {}
    for name, shape in shapes.items():
        if len(shape) >= 2 and set(shape[2:]) <= {1} and d_model in shape[:2]:
            out[name] = (shape[0], shape[1])
    return out


def wirings(shapes: Mapping[str, Shape], d_model: int) -> Iterator[Wiring]:
    """Yield every arrangement of the module's matrices as a plain or gated block, with their biases.

    Each matrix has one role, but the down projection's may be that of another projection (tied matrices). A matrix's
    bias is recognised by its name (`biases`), the biases of tied matrices also by their sizes; a projection whose
    matrix has no such bias has none.
    """
    sizes = matrices(shapes, d_model)
    rises, falls = _projections(sizes, d_model), _projections(sizes, d_model, fall=True)
    for (up, wide), (down, d_ff) in product(rises, falls):
        if up.parameter == down.parameter and len(sizes) > 1:
            continue
        if wide == d_ff:
            yield from _with_any_biases({"up": up, "down": down}, shapes)
        if wide == 2 * d_ff:
            for gate, other in _halves(up, d_ff):
                yield _with_biases({"gate": gate, "up": other, "down": down}, shapes)
    for (gate, gate_width), (up, wide), (down, d_ff) in product(rises, rises, falls):
        apart = len({gate.parameter, up.parameter, down.parameter})
        tied = len(sizes) == 2 and gate.parameter != up.parameter
        if (apart == 3 or tied) and gate_width == wide == d_ff:
            yield from _with_any_biases({"gate": gate, "up": up, "down": down}, shapes)


def biases(shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return each matrix's bias, found by name: `up.weight` and `up.bias`, `w1` and `b1`, `W_up` and `b_up`."""
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
    """Return the choices: no norm, then every norm that the module's vectors allow, most vectors first."""
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
    for (position, normed), kind, (weight, bias) in product(places.items(), kinds, parameter_sets):
        param_names = (*(["weight"] if weight != "none" else []), *(["bias"] if bias else []))
        names = [f"{step}.{parameter}" for step in normed for parameter in param_names]
        for chosen in permutations(vectors, len(names)):
            views = {name: View(vector) for name, vector in zip(names, chosen, strict=True)}
            out += [Norms(kind, position, e, weight, bias, views) for e in eps]
    return [Norms(), *sorted(out, key=lambda choice: -len(choice.views))]


def _projections(sizes: Mapping[str, tuple[int, int]], d_model: int, fall: bool = False) -> list[tuple[View, int]]:
    """Return (view, width) of every matrix as a map from d_model (with `fall`, to it), untransposed views first."""
    out = []
    for name, (first, second) in sizes.items():
        for transposed in (False, True):
            rows, columns = (second, first) if transposed else (first, second)
            width, fixed = (columns, rows) if fall else (rows, columns)
            if fixed == d_model:
                out.append((View(name, transposed), width))
    return out


def _halves(fused: View, width: int) -> Iterator[tuple[View, View]]:
    """Yield gate and up as parts of one fused matrix: concatenated or with alternating rows, gate first or up first."""
    name, transposed = fused.parameter, fused.transposed
    first, second = View(name, transposed, None, width), View(name, transposed, width)
    even, odd = View(name, transposed, None, None, 2), View(name, transposed, 1, None, 2)
    yield from ((first, second), (second, first), (even, odd), (odd, even))


def _with_any_biases(weights: Mapping[str, View], shapes: Mapping[str, Shape]) -> Iterator[Wiring]:
    """Yield the arrangement with the biases that names show; for tied matrices, whose biases no name shows, also with
    every other choice of vectors that fit."""
    named = _with_biases(weights, shapes)
    yield named
    if len({view.parameter for view in weights.values()}) == len(weights):
        return
    shown_by_name = {role: named[f"{role}.bias"] for role in weights if f"{role}.bias" in named and role != "down"}
    taken = {view.parameter for view in shown_by_name.values()}
    roles = [role for role in weights if role not in shown_by_name]
    choices: list[list[View | None]] = []
    for role in roles:
        rows = shapes[weights[role].parameter][1 if weights[role].transposed else 0]
        choices.append(
            [None, *(View(name) for name, shape in shapes.items() if shape == (rows,) and name not in taken)]
        )
    bare = {name: view for name, view in named.items() if name.endswith(".weight")}
    bare |= {f"{role}.bias": view for role, view in shown_by_name.items()}
    for chosen in product(*choices):
        vectors = {f"{role}.bias": view for role, view in zip(roles, chosen, strict=True) if view is not None}
        if len({view.parameter for view in vectors.values()}) == len(vectors):
            yield {**bare, **vectors}


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
