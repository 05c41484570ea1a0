"""All layers of a model in one table: what each FFN does to its tokens. One layer's weights are in memory at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ffncli.block.steps import Step, ffn_span
from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.run.agreement import Agreement, agreement
from ffncli.run.capture import prepared, run_model
from ffncli.run.execute import EVAL, execute
from ffncli.run.not_finite import NotFinite, where_not_finite
from ffncli.run.prepare import Request, prepare
from ffncli.run.statistics import statistics
from ffncli.run.tokens import Asked, Token
from ffncli.run.units import unit_statistics


@dataclass(frozen=True)
class ActiveUnit:
    """A hidden unit and its mean |act| over the tokens; of a routed expert over those that it received."""

    unit: int
    mean_abs: float
    expert: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class LayerRow:
    """One layer's FFN over the tokens.

    Of the values after the activation `zero_share` are exactly zero, `near_zero_share` within NEAR_ZERO of it (as
    block/units.py has it). Of the `units` (of all experts that received a token) `dead_units` are exactly zero for
    every token, `near_dead_units` within NEAR_ZERO of it. Norms are mean L2 norms of a token, `gain` is the output's
    over the input's. `agreement` is with the model's own FFN, None without a prompt. `not_finite` are the inputs and
    weights with NaN or Inf, and the first step with any.
    """

    stack: str
    layer: int
    tokens: int
    zero_share: float | None
    near_zero_share: float | None
    units: int
    dead_units: int
    near_dead_units: int
    most_active: tuple[ActiveUnit, ...]
    input_norm: float
    output_norm: float
    gain: float | None
    agreement: Agreement | None = None
    not_finite: tuple[NotFinite, ...] = ()


@dataclass(frozen=True)
class Survey:
    """Every layer that has an FFN, in order, what the model was given (each stack's tokens), and what is to be said.

    `input` is what each layer was given where no model ran.
    """

    rows: tuple[LayerRow, ...]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...]
    input: str | None = None


def survey(model: Resolved, request: Request, asked: Asked | None = None, top: int = 3) -> Survey:
    """One row per layer: on what truly enters it when the model reads the prompt, else on the request's input.

    With a prompt the model runs once; as soon as a layer has run, its own weights are read and run beside it.
    """
    layers = layers_of(model)
    rows: dict[Layer, LayerRow] = {}
    tokens: dict[str, tuple[Token, ...]] = {}
    if asked is None:
        notes: tuple[str, ...] = ()
        for layer in layers:
            ready = prepare(model, replace(request, layer=f"{layer.stack}.{layer.index}"))
            rows[layer] = survey_layer(layer, ready.steps, ready.weights, ready.inputs, None, top)
            notes = ready.notes
            if ready.origin.startswith("random"):
                notes += (f"{ready.origin}, the same in all layers of one shape: no file holds {model.name}'s",)
        count, given = rows[layers[0]].tokens, request.input or "randn"
        said = f"{given}, {count} token{'s' * (count != 1)}, the same for every layer"
        return Survey(tuple(rows[layer] for layer in layers), {}, notes, said)

    def seen(layer: Layer, given: tuple[Token, ...], entering: Tensor, leaving: Tensor) -> None:
        ready = prepared(model, layer, request, given, entering, leaving)
        rows[layer] = survey_layer(layer, ready.steps, ready.weights, ready.inputs, leaving, top)
        tokens[layer.stack] = given

    layers, silent = reached(model, layers)
    notes = run_model(model, layers, asked, request, seen)
    return Survey(tuple(rows[layer] for layer in layers if layer in rows), tokens, (*silent, *notes))


def layers_of(resolved: Resolved) -> list[Layer]:
    """Every layer that has an FFN, stack by stack. FFNError for bare dimensions, which have none."""
    if resolved.model.bare:
        raise FFNError(f"--layer all: {resolved.name} is one block and has no layers", "leave --layer out")
    stacks = list(dict.fromkeys(group.stack for group in resolved.groups))
    every = [Layer(group.stack, index, group.spec) for group in resolved.groups for index in group.layers]
    return sorted(every, key=lambda layer: (stacks.index(layer.stack), layer.index))


def reached(resolved: Resolved, layers: Sequence[Layer]) -> tuple[list[Layer], tuple[str, ...]]:
    """(those of the layers that a prompt can reach, what there is to say of the others): Whisper's encoder hears."""
    if resolved.model.model_type != "whisper" or all(layer.stack == "decoder" for layer in layers):
        return list(layers), ()
    return [layer for layer in layers if layer.stack == "decoder"], ("a prompt cannot reach the encoder",)


def survey_layer(
    layer: Layer, steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor],
    reference: Tensor | None, top: int,
) -> LayerRow:  # fmt: skip
    """Run one layer's steps and keep figures alone; `reference` is what the model's own FFN gives, where it ran."""
    start, end = ffn_span(steps)
    norms = {name: _mean_norm(tensor) for name, tensor in inputs.items()}
    seen, rows, found = _Activations(top), next(iter(inputs.values())).shape[:-1].numel(), None
    bad = [*where_not_finite("input", inputs), *where_not_finite("weight", weights)]
    finite = True
    with torch.no_grad():
        for event in execute(steps, weights, inputs, EVAL):
            if finite and (first := where_not_finite("step", {event.name: event.tensor})):
                finite, bad = False, [*bad, *first]
            if event.name in (start, end):
                norms[event.name] = _mean_norm(event.tensor)
            if event.name == end and reference is not None:
                found = agreement(event.tensor, reference)
            if event.name.rpartition(".")[2] == "act":
                seen.add(event.tensor, event.expert, event.name.startswith("shared"))
    before, after = norms[start], norms[end]
    return LayerRow(
        layer.stack, layer.index, rows, *seen.shares(), seen.units, seen.dead, seen.near_dead, seen.most_active(),
        before, after, after / before if before else None, found, tuple(bad),
    )  # fmt: skip


def _mean_norm(tensor: Tensor) -> float:
    """The mean L2 norm of a token."""
    return float(torch.linalg.vector_norm(tensor.double(), dim=-1).mean())


@dataclass
class _Activations:
    """Counts over all activations of a layer: one in a dense FFN, one per expert that has a token in a MoE."""

    top: int
    values: int = 0
    zeros: int = 0
    near_zeros: int = 0
    units: int = 0
    dead: int = 0
    near_dead: int = 0
    active: list[ActiveUnit] = field(default_factory=list)

    def add(self, tensor: Tensor, expert: int | None, shared: bool) -> None:
        """Count one activation's output [..., d_ff]."""
        values, units = statistics(tensor), unit_statistics(tensor, self.top)
        self.values += tensor.numel()
        self.zeros += values.zeros
        self.near_zeros += values.near_zeros
        self.units += units.units
        self.dead += units.dead
        self.near_dead += units.near_dead
        self.active += (ActiveUnit(unit.unit, unit.mean_abs, expert, shared) for unit in units.most_active)

    def shares(self) -> tuple[float | None, float | None]:
        """(zeros, near zeros) over all values; None where there are none."""
        return (self.zeros / self.values, self.near_zeros / self.values) if self.values else (None, None)

    def most_active(self) -> tuple[ActiveUnit, ...]:
        """The units of largest mean |act|, the largest first."""
        return tuple(sorted(self.active, key=lambda unit: -unit.mean_abs)[: self.top])
