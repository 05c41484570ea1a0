"""Identify the mixture of experts that a module computes: its weights by their shapes, and what the experts compute and
how they are chosen by the module's outputs.

If the weights of all other experts are zero, a module returns one expert's output, multiplied for each token by that
expert's share. So one expert's outputs are compared up to a factor for each token, and the factors of all experts are
the routing weights, which are compared with those of each known rule. The whole block is compared with the module last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from ffncli.block.recipe import FFNSpec, MoE, route_of, steps
from ffncli.block.steps import Shape, Step
from ffncli.block.symbols import right_hand_side
from ffncli.run.engine.execute import run
from ffncli.run.user.identify import (
    ACTIVATIONS,
    ArrangementSearch,
    ModuleSample,
    Norms,
    View,
    Wiring,
    biases,
    errors_of,
    identify,
    wirings,
)
from ffncli.run.user.probe import Runner

MOST_EXPERTS = 512
_CLOSE = 1e-5  # between measured shares and those of a rule; the whole block is compared more closely


@dataclass(frozen=True)
class ExpertViews:
    """A canonical tensor of all experts, [experts, ...]: the same view of each expert's own parameter (`names`), or of
    its slice of a single parameter [experts, ...]."""

    names: tuple[str, ...]
    view: View

    def slices(self, parameters: Mapping[str, Tensor]) -> list[Tensor]:
        """Return each expert's part of the tensor, as a view of the parameters."""
        first, *rest = (parameters[name] for name in self.names)
        return [self.view.of({self.view.parameter: one}) for one in ([first, *rest] if rest else first.unbind(0))]

    def of(self, parameters: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor, taken from `parameters`."""
        return torch.stack(self.slices(parameters))

    def write(self, parameters: Mapping[str, Tensor], tensor: Tensor) -> None:
        """Write the tensor into `parameters`."""
        for part, one in zip(self.slices(parameters), tensor, strict=True):
            part.copy_(one)

    def __str__(self) -> str:
        return str(self.view)


@dataclass(frozen=True)
class MixtureMatch:
    """The mixture that a module computes: its block, where each weight is in the module, and the largest relative error
    of its outputs."""

    block: FFNSpec
    views: Mapping[str, View | ExpertViews]
    error: float
    tied: tuple[str, ...] = ()

    @property
    def activation(self) -> str:
        """The activation of the experts."""
        return self.block.activation

    def weights(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the canonical weights taken from the module's parameters."""
        return {name: view.of(parameters).contiguous() for name, view in self.views.items()}

    def spec(self, parameters: Mapping[str, Tensor]) -> FFNSpec:
        """Return the block as a spec."""
        return self.block

    def evidence(self, parameters: Mapping[str, Tensor]) -> Iterator[str]:
        """Yield the lines of evidence for the block."""
        moe, block = self.block.moe, steps(self.block)
        assert moe is not None
        route = next(right_hand_side(step, block) for step in block if step.output == "route")
        yield f"activation: {self.activation} matches its outputs to {self.error:.1e}"
        weights = {name: view for name, view in self.views.items() if name.endswith(".weight")}
        where = ", ".join(f"{name.removesuffix('.weight')} = {view}" for name, view in weights.items())
        yield f"{moe.experts} experts, {'gated' if self.block.gated else 'plain'}: {where}"
        yield f"route: {route} matches the experts' shares of its outputs"


@dataclass(frozen=True)
class _ExpertLayout:
    """Which of a module's parameters may be the router and the experts: for each weight of an expert its shape and its
    parameters (one for each expert, or a single one for all)."""

    experts: int
    router: View
    shapes: Mapping[str, Shape]
    members: Mapping[str, tuple[str, ...]]

    def rest(self, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that are neither the router's nor the experts'."""
        taken = {self.router.parameter, *(name for names in self.members.values() for name in names)}
        return {name: p for name, p in parameters.items() if name not in taken and p.shape != (self.experts,)}


def identify_mixture(twin: nn.Module, runner: Runner, drawn: ModuleSample) -> MixtureMatch | str:
    """Return the match of the mixture that the module computes, or why there is none. The module has the parameters
    `drawn`, to which it is reset."""
    reasons = ["its router and experts are not found by their shapes"]
    values = {name: tensor.clone() for name, tensor in drawn.parameters.items()}
    for layout in _expert_layouts(twin, runner.d_model):
        try:
            with torch.no_grad():
                match = _Search(twin, runner, replace(drawn, parameters=values), layout).match()
        finally:
            _fill(twin, values)
        if not isinstance(match, str):
            return match
        reasons.append(match)
    return reasons[-1]


def _fill(twin: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            parameter.copy_(values[name])


class _Search:
    """The comparison of one layout with the module's outputs."""

    def __init__(self, twin: nn.Module, runner: Runner, drawn: ModuleSample, layout: _ExpertLayout) -> None:
        self.twin, self.runner, self.drawn, self.layout = twin, runner, drawn, layout
        self.values = dict(drawn.parameters)
        # smaller logits, so that no share is rounded to 0 or 1
        self.values[layout.router.parameter] = self.values[layout.router.parameter] / 8
        self.live = dict(twin.named_parameters())

    def match(self) -> MixtureMatch | str:
        """Return the match, or the first step at which it fails."""
        made = self._contributions()
        if made is None:
            return "its output without experts is not 0"
        expert = self._expert(made)
        if expert is None:
            return "its experts compute no block known here"
        spec, wiring = expert
        shares = self._shares(made, spec, wiring)
        route = None if shares is None else self._route(spec, shares)
        if route is None:
            return "its routing is none known here"
        moe, views = route
        stacks = {name: ExpertViews(self.layout.members[view.parameter], view) for name, view in wiring.items()}
        shared = self._shared(spec)
        if shared is None:
            return "its shared experts compute another block than the others"
        more, shared_views = shared
        block = replace(spec, moe=replace(moe, **more))
        error = self._error(block, {**views, **stacks, **shared_views})
        if error > self.drawn.tolerance:
            return f"its experts and routing are known, but its output is {error:.1e} off"
        return MixtureMatch(block, {**views, **stacks, **shared_views}, error)

    def _contributions(self) -> Tensor | None:
        """Return what each expert adds to the output, [experts, tokens, d_model]; None if there is an output without
        experts."""
        layout, x = self.layout, self.drawn.x
        everything = {name: ExpertViews(names, View(name)) for name, names in layout.members.items()}
        kept = [stack.of(self.values) for stack in everything.values()]
        slices = [stack.slices(self.live) for stack in everything.values()]
        _fill(self.twin, self.values)
        for name in layout.rest(self.values):
            self.live[name].zero_()
        for part in (one for parts in slices for one in parts):
            part.zero_()
        if self.runner(self.twin, x).any():
            return None
        out = []
        for expert in range(layout.experts):
            for parts, tensor in zip(slices, kept, strict=True):
                parts[expert].copy_(tensor[expert])
            out.append(self.runner(self.twin, x).to(x.dtype))
            for parts in slices:
                parts[expert].zero_()
        return torch.stack(out)

    def _of_expert(self, expert: int) -> dict[str, Tensor]:
        members = self.layout.members.items()
        return {name: ExpertViews(names, View(name)).slices(self.values)[expert] for name, names in members}

    def _expert(self, made: Tensor) -> tuple[FFNSpec, Wiring] | None:
        """Return the block of one expert and the places of its weights, from the busiest expert's outputs, which are
        known up to a factor for each token."""
        used = made.abs().amax(-1) > 0
        busiest = int(used.sum(1).argmax())
        tokens = used[busiest]
        if not tokens.any():
            return None
        parameters, x = self._of_expert(busiest), self.drawn.x[tokens]
        sample = ModuleSample(parameters, x, made[busiest][tokens], self.drawn.tolerance, ())
        search = ArrangementSearch(sample)
        for wiring in wirings(self.layout.shapes, self.runner.d_model):
            if len({view.parameter for view in wiring.values()}) < len(self.layout.shapes):
                continue  # every weight of an expert has a role
            if "gate.weight" in wiring and ("gate.bias" in wiring) != ("up.bias" in wiring):
                continue
            outputs = search.down(wiring, Norms(), len(x), self.runner.d_model)
            share = (outputs * sample.y).sum(-1, keepdim=True) / (outputs * outputs).sum(-1, keepdim=True)
            errors = errors_of(share * outputs, sample.y)
            fitting = (name for name, e in zip(ACTIVATIONS, errors, strict=True) if e <= sample.tolerance)
            if name := next(fitting, None):
                return _spec(name, wiring, parameters), wiring
        return None

    def _shares(self, made: Tensor, spec: FFNSpec, wiring: Wiring) -> Tensor | None:
        """Return each expert's share of the output, [tokens, experts]; None if an expert computes another block."""
        block, out = steps(spec), []
        for expert, theirs in enumerate(made):
            parameters = self._of_expert(expert)
            weights = {name: view.of(parameters) for name, view in wiring.items()}
            ours = run(block, weights, {"x": self.drawn.x})
            share = (ours * theirs).sum(-1) / (ours * ours).sum(-1)
            if errors_of((share[:, None] * ours)[None], theirs)[0] > _CLOSE:
                return None
            out.append(torch.where(theirs.abs().amax(-1) > 0, share, 0.0))
        return torch.stack(out, -1)

    def _route(self, spec: FFNSpec, shares: Tensor) -> tuple[MoE, dict[str, View | ExpertViews]] | None:
        """Return the rule whose routing weights are the shares, and the places of the router's weights."""
        chosen = {int(n) for n in (shares != 0).sum(-1)}
        if len(chosen) != 1:
            return None
        top_k, experts = chosen.pop(), self.layout.experts
        vectors = [name for name, p in self.values.items() if p.shape == (experts,)]
        named = biases({name: tuple(p.shape) for name, p in self.values.items()}).get(self.layout.router.parameter)
        logits = self.drawn.x @ self.layout.router.of(self.values).T
        for bias, correction in product(_first([*vectors, None], named), [*vectors, None]):
            if correction is not None and correction == bias:
                continue
            shifted = logits if bias is None else logits + self.values[bias]
            weights = {} if correction is None else {"route.correction": self.values[correction]}
            for rule in _rules(experts, top_k, exact=self.drawn.tolerance < _CLOSE):
                rule = replace(rule, router_bias=bias is not None, correction=correction is not None)
                route = Step("route", route_of(replace(spec, moe=rule)), ("router",))
                ours = run((route,), weights, {"router": shifted})
                if not torch.equal(ours != 0, shares != 0):
                    continue
                ratio = (shares / ours)[ours != 0]
                scale = float(f"{float(ratio.median()):.6g}")
                if float((ratio / scale - 1).abs().max()) > _CLOSE:
                    continue
                views: dict[str, View | ExpertViews] = {"router.weight": self.layout.router}
                views |= {} if bias is None else {"router.bias": View(bias)}
                views |= {} if correction is None else {"route.correction": View(correction)}
                return replace(rule, scale=scale), views
        return None

    def _shared(self, spec: FFNSpec) -> tuple[dict[str, Any], dict[str, View | ExpertViews]] | None:
        """Return the fields and views of shared experts, from the output without routed experts; empty if there is no
        such output, None if it is that of another block."""
        _fill(self.twin, self.values)
        for name in (name for names in self.layout.members.values() for name in names):
            self.live[name].zero_()
        y = self.runner(self.twin, self.drawn.x).to(self.drawn.x.dtype)
        if not y.any():
            return {}, {}
        rest = self.layout.rest(self.values)
        match = identify(ModuleSample(rest, self.drawn.x, y, self.drawn.tolerance, (), residual=False, pre=False))
        if match is None or match.error > self.drawn.tolerance or match.norms != Norms() or match.residual:
            return None
        theirs = match.spec(rest)
        if replace(theirs, d_ff=spec.d_ff) != spec:
            return None
        return {"shared_experts": 1, "shared_d_ff": theirs.d_ff}, {f"shared.{n}": v for n, v in match.views.items()}

    def _error(self, block: FFNSpec, views: Mapping[str, View | ExpertViews]) -> float:
        """Return the relative error of the whole block with the drawn parameters."""
        weights = {name: view.of(self.drawn.parameters) for name, view in views.items()}
        return errors_of(run(steps(block), weights, {"x": self.drawn.x})[None], self.drawn.y)[0]


def _spec(activation: str, wiring: Wiring, parameters: Mapping[str, Tensor]) -> FFNSpec:
    d_model, d_ff = wiring["down.weight"].of(parameters).shape
    bias = "up.bias" in wiring
    down_bias = None if ("down.bias" in wiring) == bias else not bias
    return FFNSpec(d_model, d_ff, activation, gated="gate.weight" in wiring, bias=bias, down_bias=down_bias)


def _first(names: list[str | None], first: str | None) -> list[str | None]:
    """Return the names, beginning with `first`, if it is one of them."""
    return sorted(names, key=lambda name: name != first) if first else names


def _rules(experts: int, top_k: int, exact: bool) -> Iterator[MoE]:
    """Yield the rules to try, the usual ones first. A module that is not `exact` in float64 scores in float32."""
    ways: list[dict[str, Any]] = [{"renormalise": True}, {"renormalise": False}]
    ways = ways[::-1] if top_k == experts else ways
    ways.append({"order": "choose_first", "renormalise": False})
    for score, way in product(("softmax", "sigmoid", "sqrtsoftplus"), ways):
        yield MoE(experts, top_k, score=score, score_dtype="input" if exact else "fp32", **way)


# --- which parameters may be the experts' -----------------------------------------------------------------------------

_CONVOLUTIONS = (nn.Conv1d, nn.ConvTranspose1d)


def is_mixture(module: nn.Module) -> bool:
    """Return whether a module seems to hold experts and a router: several matrices for each of n experts, in lists or
    in parameters [n, ...], and a matrix with n rows or columns."""
    parameters = dict(module.named_parameters())
    several = Counter(len(names) for _, names in _listed(module) if _dim(parameters, names) > 1)
    plain = [part for part in module.modules() if not isinstance(part, _CONVOLUTIONS)]
    shapes = [tuple(p.shape) for part in plain for p in part.parameters(recurse=False)]
    experts = {n for n, count in several.items() if count > 1} | {shape[0] for shape in shapes if len(shape) == 3}
    return bool(experts & {size for shape in shapes if len(shape) == 2 for size in shape})


def _dim(parameters: Mapping[str, Tensor], names: tuple[str, ...]) -> int:
    return parameters[names[0]].dim() if {*names} <= {*parameters} else 0


def _expert_layouts(module: nn.Module, d_model: int) -> Iterator[_ExpertLayout]:
    """Yield every choice of a router, a matrix [experts, d_model] or its transpose, with all parameters that have a
    tensor for each expert; vectors of experts in one parameter belong to a matrix by their names."""
    parameters = dict(module.named_parameters())
    listed = {name: names for name, names in _listed(module) if _dim(parameters, names)}
    inside = {name for names in listed.values() for name in names}
    for router, matrix in parameters.items():
        if matrix.dim() != 2 or router in inside:
            continue
        for transposed, (experts, width) in ((False, matrix.shape), (True, matrix.shape[::-1])):
            if width != d_model or not 1 < experts <= MOST_EXPERTS:
                continue
            members = {name: names for name, names in listed.items() if len(names) == experts}
            members |= {
                name: (name,)
                for name, p in parameters.items()
                if name not in inside and name != router and p.dim() > 1 and p.shape[0] == experts
            }
            shapes = {n: tuple(parameters[names[0]].shape)[len(names) == 1 :] for n, names in members.items()}
            paired = {*biases(shapes).values()}
            lone = [n for n, names in members.items() if len(names) == 1 and len(shapes[n]) == 1 and n not in paired]
            for name in lone:
                del members[name], shapes[name]
            if any(len(shape) > 1 for shape in shapes.values()):
                yield _ExpertLayout(experts, View(router, transposed), shapes, members)


def _listed(module: nn.Module) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield (a name, the parameters of that name in each entry) for lists and dicts whose entries have the same
    parameters: `experts.w1.weight` for `experts.0.w1.weight`, ..."""
    for path, part in module.named_modules():
        prefix = f"{path}." if path else ""
        for entries in (part._modules, part._parameters):
            keys = list(entries)
            several = len(keys) > 1 and (isinstance(part, nn.ModuleDict) or all(key.isdigit() for key in keys))
            shapes = [_shapes(entries[key]) for key in keys] if several else []
            if shapes and shapes[0] and all(one == shapes[0] for one in shapes):
                for name in shapes[0]:
                    names = tuple(f"{prefix}{key}{'.' if name else ''}{name}" for key in keys)
                    yield f"{path}{'.' if name else ''}{name}", names


def _shapes(entry: nn.Module | nn.Parameter | None) -> dict[str, Shape]:
    """Return the shapes of an entry's parameters; those of a parameter have an empty name."""
    if isinstance(entry, nn.Module):
        return {name: tuple(p.shape) for name, p in entry.named_parameters()}
    return {} if entry is None else {"": tuple(entry.shape)}
