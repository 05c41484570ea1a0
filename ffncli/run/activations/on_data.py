"""The actual inputs of a model's activations, and statistics of what other activations return for these inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf, isfinite, sqrt

import torch
from torch import Tensor

from ffncli.block.activations import SOFT_CAPPED, TABLE
from ffncli.block.steps import (
    Activation,
    Experts,
    Step,
    block_inputs,
    ffn_span,
    ffn_steps,
    parameters,
    walk,
)
from ffncli.block.symbols import right_hand_side
from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import activation, apply, execute, mix, possible, received, unmixed
from ffncli.run.engine.inputs import InputSource
from ffncli.run.engine.prepare import Prepared, Token, prepare
from ffncli.run.measure.gap import Agreement, agreement
from ffncli.run.measure.statistics import Distribution, Moments, NotFinite, Sampler, near_zero, where_not_finite
from ffncli.run.pretrained.capture import prepared, run_model
from ffncli.run.pretrained.prompt import Prompt, layers_of, reached

_CHUNK = 1 << 21  # values of an activation per chunk: 16 MB in float64


@dataclass(frozen=True)
class LayerData:
    """One layer's activations, the origin of its `weights`, and the `agreement` with the model's own FFN."""

    stack: str
    layer: int
    tokens: int
    weights: str
    activations: tuple[ActivationInput, ...]
    agreement: Agreement | None
    not_finite: tuple[NotFinite, ...]


@dataclass(frozen=True)
class ActivationData:
    """The requested layers of the model, each stack's tokens, and notes on the run."""

    model: Resolved
    layers: tuple[LayerData, ...]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...]


def activations_on_data(
    resolved: Resolved, prompt: Prompt | None, others: Sequence[str], *, layer: int | str | None = None,
    input: InputSource | None = None, leading: tuple[int, ...] | None = None, dtype: str | None = None,
    device: str = "cpu", seed: int | None = None,
) -> ActivationData:  # fmt: skip
    """Collect the inputs of the activations in one layer, or in every layer if `layer` is `all`, and the outputs of
    `others` for these inputs.

    With a prompt the model runs once, and each layer is processed as soon as it has run. Without a prompt every layer
    gets the same input, chosen by `prepare`. `others` are canonical names.
    """
    layers = layers_of(resolved) if layer == "all" else [resolved.model.layer(layer)]
    if prompt is None:
        notes: dict[str, None] = {}
        rows = []
        for one in layers:
            ready = prepare(resolved, one, input=input, leading=leading, dtype=dtype, device=device, seed=seed)
            rows.append(look(ready, _ffn_input(ready), others))
            notes |= dict.fromkeys(ready.notes)
        return ActivationData(resolved, tuple(rows), {}, tuple(notes))
    layers, silent = reached(resolved, layers) if layer == "all" else (layers, ())
    data: dict[Layer, LayerData] = {}
    tokens: dict[str, tuple[Token, ...]] = {}
    doubts: dict[str, None] = {}

    def reached_layer(layer: Layer, layer_tokens: tuple[Token, ...], enters: Tensor, leaves: Tensor) -> None:
        ready = prepared(resolved, layer, layer_tokens, enters, leaves, (), dtype, device)
        data[layer] = look(ready, enters, others)
        tokens[layer.stack] = layer_tokens
        doubts.update(dict.fromkeys(ready.notes))

    run_notes = run_model(resolved, layers, prompt, reached_layer, dtype=dtype, device=device)
    ordered = tuple(data[layer] for layer in layers if layer in data)
    return ActivationData(resolved, ordered, tokens, (*silent, *run_notes, *doubts))


def _ffn_input(ready: Prepared) -> Tensor:
    """Return the FFN's input: the block's input, or the output of the steps before the FFN."""
    start, _ = ffn_span(ready.steps)
    if start in ready.inputs:
        return ready.inputs[start]
    names = [step.output for step in ready.steps]
    head = ready.steps[: names.index(start) + 1]
    with torch.no_grad():
        return next(e.tensor for e in execute(head, ready.weights, ready.inputs, ready.mode) if e.name == start)


def look(ready: Prepared, enters: Tensor, others: Sequence[str]) -> LayerData:
    """Run one layer's FFN on `enters` [..., d_model] a few tokens at a time, with its own activation and with `others`.

    Tensors of width d_ff are not kept. Raise FFNError if no token reaches the layer.
    """
    steps, layer, flat = ffn_steps(ready.steps), ready.layer, enters.reshape(-1, enters.shape[-1])
    start, _ = ffn_span(steps)
    acts = [step for _, step in walk(steps) if is_act(step)]
    original = next(step.op.function for step in acts if isinstance(step.op, Activation))
    statistics = SwapStatistics(tuple(dict.fromkeys((original, *others))), _most(steps, flat.shape[0]))
    ours: list[Tensor] = []
    with torch.no_grad():
        for rows in _chunks(flat, steps):
            outs = run_variants(steps, ready.weights, {start: rows}, statistics.names, statistics.add)
            statistics.add_outputs(outs)
            if ready.reference is not None:
                ours.append(outs[0])
    if not statistics.places:
        raise FFNError(f"no token reaches an activation of {layer.stack} layer {layer.index}", "give more tokens")
    model_agreement = agreement(torch.cat(ours), ready.reference) if ready.reference is not None else None
    bad = (*where_not_finite("input", {start: flat}), *where_not_finite("weight", ready.weights))
    return LayerData(layer.stack, layer.index, flat.shape[0], ready.origin, statistics.inputs(), model_agreement, bad)


def _chunks(flat: Tensor, steps: Sequence[Step]) -> Iterator[Tensor]:
    """Yield a few tokens at a time, fewer if d_ff is larger."""
    widest = max(axis.size for axes in parameters(steps).values() for axis in axes if axis.name == "d_ff")
    size = max(1, _CHUNK // widest)
    for at in range(0, flat.shape[0], size):
        yield flat[at : at + size]


def _most(steps: Sequence[Step], tokens: int) -> Mapping[str, int]:
    """Return the maximum number of rows that an activation can receive: a token may go to several experts."""
    most = {"": tokens}
    for step in steps:
        if isinstance(step.op, Experts):
            route = next(s for s in steps if s.output == step.inputs[1])
            most[step.output] = tokens * getattr(route.op, "top_k", 1)
    return most


# A block is run once for several activations: everything that does not depend on the activation is computed once. A
# callback receives the input and the outputs of each activation. Experts are run one after the other.

# (the step's whole name, the step, the expert or None, its input [rows, d_ff], each activation's output for that input)
Watch = Callable[[str, Step, int | None, Tensor, Sequence[Tensor]], None]


def is_act(step: Step) -> bool:
    """Return whether a step is the block's own activation, as opposed to a clip of up, a router's score or the mix."""
    return isinstance(step.op, Activation) and step.output.rpartition(".")[2] == "act"


def run_variants(
    steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor], names: Sequence[str],
    watch: Watch, place: tuple[str, int | None] = ("", None),
) -> list[Tensor]:  # fmt: skip
    """Return the last step's output with each activation of `names` in place of the block's own, in eval mode.

    `inputs` are flat, [tokens, d_model]. The block's own activation keeps its learned parameters, other activations use
    the initial values of theirs. `watch` is called for every activation as it runs; `place` is (the prefix of the
    activation's name, its expert).
    """
    tensors = {name: [tensor] for name, tensor in inputs.items()}
    last_use = {name: at for at, step in enumerate(steps) for name in step.inputs}
    for at, step in enumerate(steps):
        x = [tensors[name] for name in step.inputs]
        if isinstance(step.op, Experts):
            out = _experts(step, step.op, x[0][0], x[1][0], weights, names, watch)
        else:
            params = {name.rpartition(".")[2]: weights[name] for name in step.parameters()}
            with possible(step, x[0][0]):
                if isinstance(step.op, Activation) and is_act(step):
                    out = [_instead(step.op, name, params, x[0][0]) for name in names]
                    watch(place[0] + step.output, step, place[1], x[0][0], out)
                else:
                    several = max(len(versions) for versions in x)
                    out = [apply(step, params, [v[min(i, len(v) - 1)] for v in x]) for i in range(several)]
        tensors[step.output] = out
        for name in {*step.inputs}:
            if last_use[name] == at:
                del tensors[name]
        del x, out
    return tensors[steps[-1].output]


def _instead(op: Activation, name: str, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Apply the activation `name` to x in place of `op`, with the limits and the added constant of `op`.

    The soft cap of `op` is left out if the activation has no linear factor.
    """
    if name == op.function:
        return activation(op, params, x)
    learned = {key: torch.tensor(value, dtype=x.dtype, device=x.device) for key, value in TABLE[name].learned.items()}
    soft_cap = op.soft_cap if name in SOFT_CAPPED else None
    return activation(replace(op, function=name, soft_cap=soft_cap), learned, x)


def _experts(
    step: Step,
    op: Experts,
    x: Tensor,
    route: Tensor,
    weights: Mapping[str, Tensor],
    names: Sequence[str],
    watch: Watch,
) -> list[Tensor]:
    outs = [unmixed(op, x, route) for _ in names]
    (entry,) = block_inputs(op.program)
    for one in received(step, op, x, route, weights):
        place = (f"{step.output}.", one.expert)
        results = run_variants(op.program, one.weights, {entry: one.x}, names, watch, place)
        for out, result in zip(outs, results, strict=True):
            mix(out, one, result)
    return outs


_BLOCK = 1 << 15  # values per block: fits a cache, and is too small for torch to use several threads
_BLOCK_ON_GPU = 1 << 24


@dataclass(frozen=True)
class ActivationOutput:
    """The output of one activation: the block's own activation, or another activation in its place.

    `mean` and `variance` (divisor n) are computed over the finite values. `zero_share` is the share of values with |y|
    ≤ NEAR_ZERO, `exact_zero_share` the share of values equal to 0. `dead_units` counts units that are 0 for every
    token, `near_dead_units` units within NEAR_ZERO of 0 for every token. Differences from the output y₀ of the block's
    own activation are computed where y and y₀ are finite: `max_difference` = max|y - y₀|, at the input
    `max_difference_at`; `relative_difference` = ‖y - y₀‖ / ‖y₀‖. `output_change` is the relative difference of the
    FFN's output if all of the layer's activations are replaced at once; None if the FFN's original output is 0
    throughout.
    """

    name: str
    mean: float | None
    variance: float | None
    zero_share: float
    exact_zero_share: float
    dead_units: int
    near_dead_units: int
    nan: int
    inf: int
    max_difference: float | None
    max_difference_at: float | None
    relative_difference: float | None
    output_change: float | None


@dataclass(frozen=True)
class ActivationInput:
    """One activation of a layer: `act` in a dense FFN, `experts.act` for all routed experts together, `shared.act`.

    `input` describes the function's input, after the step's clip, which changed `clipped` of the values. `units` counts
    the units of all `experts` together; `experts` is the number of experts that received a token, None outside experts.
    `made` holds the output of each activation, the block's own activation first.
    """

    step: str
    formula: str
    units: int
    experts: int | None
    clipped: int
    input: Distribution
    made: tuple[ActivationOutput, ...]


@dataclass
class _Differences:
    """Σ(y - y₀)² (`apart`) and Σy₀² (`reference`) over the elements where y and y₀ are finite."""

    apart: float = 0.0
    reference: float = 0.0
    any: bool = False

    def add(self, y: Tensor, reference: Tensor) -> Tensor:
        """Return y - y₀ in float64; where y or y₀ is not finite, it is 0."""
        apart, reference = (y - reference).flatten(), reference.flatten()
        squares = torch.dot(apart, apart).item(), torch.dot(reference, reference).item()
        if not isfinite(sum(squares)):
            both = y.isfinite().flatten() & reference.isfinite()
            apart, reference = torch.where(both, apart, 0.0), torch.where(both, reference, 0.0)
            squares = torch.dot(apart, apart).item(), torch.dot(reference, reference).item()
            self.any |= bool(both.any())
        else:
            self.any = True
        self.apart += squares[0]
        self.reference += squares[1]
        return apart

    @property
    def relative(self) -> float | None:
        """Return ‖y - y₀‖ / ‖y₀‖; None if y₀ is 0 throughout and y is not, or if no value was finite."""
        if not self.reference:
            return None if self.apart or not self.any else 0.0
        ratio = sqrt(self.apart) / sqrt(self.reference)
        return ratio if ratio < inf else None


@dataclass
class _OutputStatistics:
    """The statistics of one activation's output in one step, so far."""

    moments: Moments = field(default_factory=Moments)
    differences: _Differences = field(default_factory=_Differences)
    loudest: dict[int | None, Tensor] = field(default_factory=dict)  # maps an expert to max|y| of every unit
    largest: float = 0.0
    at: float | None = None

    def add(self, expert: int | None, z: Tensor, y: Tensor, reference: Tensor) -> None:
        """Add y = f(z) [rows, d_ff] and its difference from `reference`, the block's own activation of z in float64."""
        wide = y.double()
        size = wide.abs()
        self.moments.merge(wide, size, near_zero(y.dtype))
        loud = size.amax(0)
        self.loudest[expert] = torch.maximum(self.loudest[expert], loud) if expert in self.loudest else loud
        apart = self.differences.add(wide, reference)
        low, high = (end.item() for end in apart.aminmax())
        if max(-low, high) > self.largest:
            self.largest = max(-low, high)
            self.at = z.flatten()[int((apart.abs() == self.largest).nonzero()[0])].item()

    def made(self, name: str, bound: float, change: float | None) -> ActivationOutput:
        t = self.moments
        dead, near = (sum(int((loud <= b).sum()) for loud in self.loudest.values()) for b in (0.0, bound))
        mean, variance = (t.mean, t.variance) if t.finite else (None, None)
        return ActivationOutput(
            name, mean, variance, t.near_zeros / t.values, t.zeros / t.values, dead, near, t.nan, t.inf,
            self.largest if self.differences.any else None, self.at, self.differences.relative, change,
        )  # fmt: skip


@dataclass
class _SwappedStep:
    """The statistics of one activation step of a layer, so far."""

    name: str
    step: Step
    sampler: Sampler
    outputs: Mapping[str, _OutputStatistics]
    dtype: torch.dtype
    clipped: int = 0


class SwapStatistics:
    """The statistics of a layer so far: its activations by name, and the change of the FFN's output by each of `names`
    (the block's own activation first). `most` is the maximum number of rows of an activation, by the experts' name (""
    outside experts)."""

    def __init__(self, names: tuple[str, ...], most: Mapping[str, int]) -> None:
        self.names, self.most = names, most
        self.places: dict[str, _SwappedStep] = {}
        self.changes = {name: _Differences() for name in names}

    def add(self, name: str, step: Step, expert: int | None, z: Tensor, made: Sequence[Tensor]) -> None:
        """Add one run of an activation; the signature is `Watch`."""
        if name not in self.places:
            rows = self.most[name.partition(".")[0] if expert is not None else ""]
            outputs = {other: _OutputStatistics() for other in self.names}
            self.places[name] = _SwappedStep(name, step, Sampler(rows, z.shape[-1]), outputs, z.dtype)
        place, op = self.places[name], step.op
        assert isinstance(op, Activation)
        if op.low is not None or op.high is not None:
            clipped = z.clamp(op.low, op.high)
            place.clipped += int(((clipped != z) & ~z.isnan()).sum())
            z = clipped
        size = max(1, (_BLOCK_ON_GPU if z.is_cuda else _BLOCK) // z.shape[-1])
        for at in range(0, z.shape[0], size):
            block = slice(at, at + size)
            place.sampler.add(z[block])
            reference = made[0][block].double()
            for other, y in zip(self.names, made, strict=True):
                place.outputs[other].add(expert, z[block], y[block], reference)

    def add_outputs(self, outs: Sequence[Tensor]) -> None:
        """Add the FFN's output with each activation."""
        reference = outs[0].double()
        for name, out in zip(self.names, outs, strict=True):
            self.changes[name].add(out.double(), reference)

    def inputs(self) -> tuple[ActivationInput, ...]:
        """Return a record for every activation step."""
        records = []
        for place in self.places.values():
            bound = near_zero(place.dtype)
            made = tuple(m.made(name, bound, self.changes[name].relative) for name, m in place.outputs.items())
            experts = [e for e in place.outputs[self.names[0]].loudest if e is not None]
            units = place.sampler.width * (len(experts) or 1)
            formula = right_hand_side(place.step, ())
            values = place.sampler.distribution()
            records.append(
                ActivationInput(place.name, formula, units, len(experts) or None, place.clipped, values, made)
            )
        return tuple(records)
