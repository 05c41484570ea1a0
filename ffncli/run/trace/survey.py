"""A survey: all layers of a model in one table, with the effect of each FFN on the tokens.

Only one layer's weights are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ffncli.block.steps import Step, ffn_span, routes
from ffncli.errors import spelled
from ffncli.frames import Tabular
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.engine.inputs import InputSource
from ffncli.run.engine.prepare import Token, prepare
from ffncli.run.engine.router_losses import routers
from ffncli.run.measure.gap import Agreement, agreement
from ffncli.run.measure.statistics import NotFinite, statistics, unit_statistics, where_not_finite
from ffncli.run.pretrained.capture import prepared, run_model
from ffncli.run.pretrained.loading import loading_notes
from ffncli.run.pretrained.prompt import Prompt, layers_of, reached
from ffncli.run.trace.question import SurveyQuestion
from ffncli.run.trace.routing import Routing, routing_of
from ffncli.run.trace.training_step import LayerGradients, layer_gradients
from ffncli.show.text import plural

TOP_UNITS = 3


@dataclass(frozen=True)
class ActiveUnit:
    """A hidden unit and its mean |act| over the tokens; in a routed expert, over the tokens routed to the expert."""

    unit: int
    mean_abs: float
    expert: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class LayerRow:
    """Figures on one layer's FFN, computed over all tokens.

    `zero_share` is the fraction of values after the activation that are exactly zero, `near_zero_share` the fraction
    within NEAR_ZERO of zero (see block/value.py). `units` counts the hidden units (of all experts that received a
    token), `dead_units` the units that are zero for every token, `near_dead_units` the units within NEAR_ZERO of zero
    for every token. `input_norm` and `output_norm` are a token's mean L2 norm; `gain` is output_norm / input_norm.
    `agreement` compares the steps with the model's own FFN; None without a prompt. `not_finite` lists the inputs and
    weights that contain NaN or Inf, and the first step that does. `routing` is the load of the experts in a mixture.
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
    routing: Routing | None = None


@dataclass(frozen=True)
class Survey(Tabular):
    """A survey of a model; `rows` has a row for every layer that has an FFN, in order.

    `tokens` maps each stack to its tokens, if the model read a `prompt` or token ids; `input` describes the input of
    the layers if no model ran. `notes` are remarks on the run. With a backward pass, `loss` is the mean cross-entropy
    of the next tokens and `gradients` has a row for every layer.
    """

    model: Resolved
    rows: tuple[LayerRow, ...]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...]
    prompt: str | None = None
    input: str | None = None
    loss: float | None = None
    gradients: tuple[LayerGradients, ...] | None = None

    @property
    def not_finite(self) -> tuple[LayerRow, ...]:
        """The layers with NaN or Inf. The first such layer matters most, because it affects all later layers."""
        return tuple(row for row in self.rows if row.not_finite)

    def __repr__(self) -> str:
        lines = [f"<Survey of {self.model.model.name}: {len(self.rows)} layers"]
        for row in self.rows[:7]:
            gain = "" if row.gain is None else f", gain {row.gain:.3g}"
            lines.append(f"  {row.stack} {row.layer}: {row.dead_units:,} of {row.units:,} units dead{gain}")
        return "\n".join(lines) + ("\n  …>" if len(self.rows) > 7 else ">")


def survey_of(
    question: SurveyQuestion, model: Resolved, prompt: Prompt | None, note: Callable[[str], None] = lambda text: None
) -> Survey:
    """Answer a question about all layers; `note` is called with every remark as it arises."""
    before: tuple[str, ...] = ()
    if prompt:
        before = loading_notes(model, max(layer.index for layer in layers_of(model)), question.dtype)
    for text in before:
        note(text)
    top = TOP_UNITS if question.top_units is None else question.top_units
    survey_record = survey(
        model, prompt, top, input=question.input, leading=question.leading, dtype=question.dtype,
        device=question.device, seed=question.seed,
    )  # fmt: skip
    if question.backward and prompt is not None:
        layers, _ = reached(model, layers_of(model))
        loss, rows = layer_gradients(model, layers, prompt, question.dtype, question.device)
        survey_record = replace(survey_record, loss=loss, gradients=rows)
    after = (*model.notes, *map(str, model.differences), *survey_record.notes)
    for text in after:
        note(text)
    return replace(survey_record, notes=tuple(map(spelled, (*before, *after))))


def survey(
    resolved: Resolved, prompt: Prompt | None = None, top: int = TOP_UNITS, *, input: InputSource | None = None,
    leading: tuple[int, ...] | None = None, dtype: str | None = None, device: str = "cpu", seed: int | None = None,
) -> Survey:  # fmt: skip
    """Return one row per layer. With a prompt, a layer runs on its actual input in the model, otherwise on `input`.

    With a prompt, the model runs once; as soon as a layer has run, its weights are read and its steps are run for
    comparison.
    """
    layers = layers_of(resolved)
    rows: dict[Layer, LayerRow] = {}
    tokens: dict[str, tuple[Token, ...]] = {}
    if prompt is None:
        notes: tuple[str, ...] = ()
        for layer in layers:
            ready = prepare(resolved, layer, input=input, leading=leading, dtype=dtype, device=device, seed=seed)
            rows[layer] = survey_layer(layer, ready.steps, ready.weights, ready.inputs, None, top)
            notes = ready.notes
            if ready.origin.startswith("random"):
                why = f"no file contains the weights of {resolved.model.name}"
                notes += (f"{ready.origin}, the same in all layers of one shape: {why}",)
        count, given = rows[layers[0]].tokens, "randn" if input is None else input
        given = given if isinstance(given, str) else "an array"
        description = f"{given}, {count} {plural('token', count)}, the same for every layer"
        return Survey(resolved, tuple(rows[layer] for layer in layers), {}, notes, input=description)

    def seen(layer: Layer, given: tuple[Token, ...], entering: Tensor, leaving: Tensor) -> None:
        ready = prepared(resolved, layer, given, entering, leaving, (), dtype, device)
        rows[layer] = survey_layer(layer, ready.steps, ready.weights, ready.inputs, leaving, top)
        tokens[layer.stack] = given

    layers, silent = reached(resolved, layers)
    notes = run_model(resolved, layers, prompt, seen, dtype=dtype, device=device)
    every = tuple(rows[layer] for layer in layers if layer in rows)
    return Survey(resolved, every, tokens, (*silent, *notes), prompt.text)


def survey_layer(
    layer: Layer, steps: Sequence[Step], weights: Mapping[str, Tensor], inputs: Mapping[str, Tensor],
    reference: Tensor | None, top: int,
) -> LayerRow:  # fmt: skip
    """Run a layer's steps and keep only figures; `reference` is the output of the model's own FFN, if the model ran."""
    start, end = ffn_span(steps)
    norms = {name: _mean_norm(tensor) for name, tensor in inputs.items()}
    activations, rows, agreed = _Activations(top), next(iter(inputs.values())).shape[:-1].numel(), None
    bad = [*where_not_finite("input", inputs), *where_not_finite("weight", weights)]
    finite, load, routing_steps = True, None, routes(steps)
    logits, routed = {name for _, name in routers(steps).values()}, dict[str, Tensor]()
    with torch.no_grad():
        for event in execute(steps, weights, inputs, EVAL):
            if finite and (first := where_not_finite("step", {event.name: event.tensor})):
                finite, bad = False, [*bad, *first]
            if event.name in (start, end):
                norms[event.name] = _mean_norm(event.tensor)
            if event.name in logits:
                routed[event.name] = event.tensor.clone()
            if event.name in routing_steps:
                load = routing_of(steps, {**routed, event.name: event.tensor})
            if event.name == end and reference is not None:
                agreed = agreement(event.tensor, reference)
            if event.name.rpartition(".")[2] == "act":
                activations.add(event.tensor, event.expert, event.name.startswith("shared"))
    before, after = norms[start], norms[end]
    return LayerRow(
        layer.stack, layer.index, rows, *activations.shares(), activations.units, activations.dead,
        activations.near_dead, activations.most_active(), before, after, after / before if before else None,
        agreed, tuple(bad), load,
    )  # fmt: skip


def _mean_norm(tensor: Tensor) -> float:
    """Return the mean L2 norm of a token."""
    return float(torch.linalg.vector_norm(tensor.double(), dim=-1).mean())


@dataclass
class _Activations:
    """Counts over a layer's activation steps: one in a dense FFN, one per expert with tokens in a MoE."""

    top: int
    values: int = 0
    zeros: int = 0
    near_zeros: int = 0
    units: int = 0
    dead: int = 0
    near_dead: int = 0
    active: list[ActiveUnit] = field(default_factory=list)

    def add(self, tensor: Tensor, expert: int | None, shared: bool) -> None:
        """Add the output [..., d_ff] of one activation step to the counts."""
        values, units = statistics(tensor), unit_statistics(tensor, self.top)
        self.values += tensor.numel()
        self.zeros += values.zeros
        self.near_zeros += values.near_zeros
        self.units += units.units
        self.dead += units.dead
        self.near_dead += units.near_dead
        self.active += (ActiveUnit(unit.unit, unit.mean_abs, expert, shared) for unit in units.most_active)

    def shares(self) -> tuple[float | None, float | None]:
        """Return the fractions of (zeros, near zeros) among all values; None if there are no values."""
        return (self.zeros / self.values, self.near_zeros / self.values) if self.values else (None, None)

    def most_active(self) -> tuple[ActiveUnit, ...]:
        """Return the units with the largest mean |act|, in descending order."""
        return tuple(sorted(self.active, key=lambda unit: -unit.mean_abs)[: self.top])
