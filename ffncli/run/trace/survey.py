"""All layers of a model in one table: the effect of each FFN on its tokens.

One layer's weights are in memory at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ffncli.block.steps import Step, ffn_span, routes
from ffncli.errors import spelled
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.engine.inputs import InputSource
from ffncli.run.engine.prepare import Token, prepare
from ffncli.run.measure.gap import Agreement, agreement
from ffncli.run.measure.statistics import NotFinite, statistics, unit_statistics, where_not_finite
from ffncli.run.pretrained.capture import prepared, run_model
from ffncli.run.pretrained.loading import loading_notes
from ffncli.run.pretrained.prompt import Prompt, layers_of, reached
from ffncli.run.trace.question import SurveyQuestion
from ffncli.run.trace.routing import Routing, routing_of
from ffncli.show.text import plural

TOP_UNITS = 3


@dataclass(frozen=True)
class ActiveUnit:
    """A hidden unit and its mean |act| over the tokens; for a routed expert, over the tokens that it received."""

    unit: int
    mean_abs: float
    expert: int | None = None
    shared: bool = False


@dataclass(frozen=True)
class LayerRow:
    """One layer's FFN over the tokens.

    Of the values after the activation the share `zero_share` is exactly zero, `near_zero_share` within NEAR_ZERO (see
    block/value.py). Of the `units` (of all experts that received a token) `dead_units` are exactly zero for every
    token, `near_dead_units` within NEAR_ZERO of it. Norms are mean L2 norms of a token, `gain` is the output's over the
    input's. `agreement` is with the model's own FFN, None without a prompt. `not_finite` lists the inputs and weights
    with NaN or Inf, and the first such step. `routing` is the load of a mixture's experts.
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
class Survey:
    """Every layer of a model that has an FFN, in order: `rows`.

    `tokens` are each stack's, if the model read a `prompt` or token numbers; `input` is the input of each layer
    if no model ran. `notes` are remarks on the run.
    """

    model: Resolved
    rows: tuple[LayerRow, ...]
    tokens: Mapping[str, tuple[Token, ...]]
    notes: tuple[str, ...]
    prompt: str | None = None
    input: str | None = None

    @property
    def not_finite(self) -> tuple[LayerRow, ...]:
        """The layers with NaN or Inf: the first one matters, because it affects all later layers."""
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
    """Answer a question about all layers; `note` gets every remark at once."""
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
    after = (*model.notes, *map(str, model.differences), *survey_record.notes)
    for text in after:
        note(text)
    return replace(survey_record, notes=tuple(map(spelled, (*before, *after))))


def survey(
    resolved: Resolved, prompt: Prompt | None = None, top: int = TOP_UNITS, *, input: InputSource | None = None,
    leading: tuple[int, ...] | None = None, dtype: str | None = None, device: str = "cpu", seed: int | None = None,
) -> Survey:  # fmt: skip
    """Return one row per layer: on its actual input if the model reads a prompt, else on one that `prepare` takes.

    With a prompt the model runs once; as soon as a layer has run, its own weights are read and run in parallel to it.
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
                notes += (
                    f"{ready.origin}, the same in all layers of one shape: no file holds {resolved.model.name}'s",
                )
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
    """Run one layer's steps and keep only figures; `reference` is the output of the model's own FFN, if it ran."""
    start, end = ffn_span(steps)
    norms = {name: _mean_norm(tensor) for name, tensor in inputs.items()}
    activations, rows, agreed = _Activations(top), next(iter(inputs.values())).shape[:-1].numel(), None
    bad = [*where_not_finite("input", inputs), *where_not_finite("weight", weights)]
    finite, load, routing_steps = True, None, routes(steps)
    with torch.no_grad():
        for event in execute(steps, weights, inputs, EVAL):
            if finite and (first := where_not_finite("step", {event.name: event.tensor})):
                finite, bad = False, [*bad, *first]
            if event.name in (start, end):
                norms[event.name] = _mean_norm(event.tensor)
            if event.name in routing_steps:
                load = routing_of(steps, {event.name: event.tensor})
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
    """Counts over all activations of a layer: one in a dense FFN, one per expert that received a token in a MoE."""

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
        """Return (zeros, near zeros) over all values; None if there are none."""
        return (self.zeros / self.values, self.near_zeros / self.values) if self.values else (None, None)

    def most_active(self) -> tuple[ActiveUnit, ...]:
        """Return the units with the largest mean |act|, in descending order."""
        return tuple(sorted(self.active, key=lambda unit: -unit.mean_abs)[: self.top])
