"""Running a block and recording every intermediate as figures, including figures on hidden units."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ffncli.block.cost import Cost, step_costs
from ffncli.block.steps import (
    Activation,
    Dropout,
    Experts,
    Step,
    block_inputs,
    ffn_span,
    input_shapes,
)
from ffncli.block.symbols import right_hand_side, weight_symbol
from ffncli.block.value import unit_steps
from ffncli.errors import FFNError
from ffncli.run.engine.execute import EVAL, Event, Mode, execute
from ffncli.run.measure.statistics import NotFinite, Units, statistics, unit_statistics, where_not_finite
from ffncli.show.tensors import edges

_NOTHING = Cost()


@dataclass(frozen=True)
class Parameter:
    """A step's parameter: its canonical name (`up.weight`), its symbol in formulas (`W1`), its shape in torch."""

    name: str
    symbol: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """The record of one step. Statistics are computed over finite values (None if there are no finite values); std has
    divisor n.

    `zeros`, `near_zeros` (|x| ≤ NEAR_ZERO) and `negatives` are counts of values; `near_zero_share` is the fraction of
    near zeros. `histogram` counts every `histogram_stride`-th finite value (1: all) in equal bins from min to max.
    `params` is the number of the step's parameters, `flops` its forward FLOPs for this input. Inside an expert,
    `tokens` are the flat indices of the expert's tokens, one per row; otherwise None. If the step is an active dropout,
    `live` counts the nonzero values of its input, and `dropped` the values that dropout set to zero. `units` describes
    hidden units, if the step's values are hidden units (`unit_steps`). `min_at` and `max_at` are the indices of the
    first minimum and the first maximum in the step's tensor.
    """

    name: str
    op: str
    formula: str
    inputs: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    min: float | None
    max: float | None
    mean: float | None
    std: float | None
    zeros: int
    near_zeros: int
    near_zero_share: float | None
    negatives: int
    nan: int
    inf: int
    histogram: tuple[int, ...]
    histogram_stride: int
    params: int
    flops: int
    parameters: tuple[Parameter, ...]
    values: Any
    values_index: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...] | None = None
    live: int | None = None
    dropped: int | None = None
    units: Units | None = None
    min_at: tuple[int, ...] | None = None
    max_at: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Trace:
    """A block's trace: the names of the FFN's input and output, and the records of all steps, the block's inputs first.

    `tensors` are the kept intermediates, by their printed names.
    """

    ffn_input: str
    ffn_output: str
    steps: tuple[StepRecord, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def step(self, name: str) -> StepRecord:
        """Return the record of the step `name`."""
        for record in self.steps:
            if record.name == name:
                return record
        raise FFNError(f"no step '{name}'", "steps: " + ", ".join(record.name for record in self.steps))


def trace(
    steps: Sequence[Step],
    weights: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    mode: Mode = EVAL,
    show: int | None = 8,
    inside: frozenset[int] | None = frozenset(),
    keep: frozenset[str] | None = frozenset(),
    top_units: int = 0,
) -> Trace:
    """Run `steps` on `inputs` ([..., d_model] each) and record every intermediate.

    `show` is the number of values recorded per axis (None: all). `inside` lists the experts whose inner steps are also
    recorded (None: all experts). `keep` lists, by printed name, the steps and inputs whose complete tensors are kept
    (None: all that are recorded); other tensors are freed or overwritten after their last use. `top_units` is the
    number of hidden units to record individually.
    """
    costs = step_costs(steps, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
    look = _Look(show, top_units)
    records = [_record(name, tensor, look) for name, tensor in inputs.items()]
    kept = {name: tensor for name, tensor in inputs.items() if keep is None or name in keep}
    with torch.no_grad():
        for event in execute(steps, weights, inputs, mode, keep):
            if keep is not None and event.name in keep:
                kept[event.name] = event.tensor
            if isinstance(event.step.op, Dropout) and not mode.train and event.expert is None:
                record = _handed_on(event, records, steps, costs[event.name])
                # A Linear reads the dropout's output, so the units' `writes` belong to this step, not to its input.
                if top_units:
                    record = replace(record, units=_units(event, steps, weights, top_units))
            elif event.expert is None:
                units = _units(event, steps, weights, top_units)
                record = _record(event.name, event.tensor, look, event.step, steps, costs[event.name], units)
            elif inside is None or event.expert in inside:
                record = _inner(event, steps, weights, look)
            else:
                continue
            records.append(_with_drops(record, records) if mode.train and record.op == "dropout" else record)
            if keep is None:
                kept[event.name] = event.tensor
    return Trace(*ffn_span(steps), tuple(records), kept)


def input_record(name: str, tensor: Tensor) -> StepRecord:
    """Record a tensor [..., features] that is not computed by a step of the block."""
    return _record(name, tensor, _Look(8, 0))


@dataclass(frozen=True)
class _Look:
    """The amount of detail to record: values per axis (None: all), and the number of individual units."""

    show: int | None
    top_units: int


def _handed_on(event: Event, records: Sequence[StepRecord], steps: Sequence[Step], cost: Cost) -> StepRecord:
    """Record a step that returns its input unchanged, by copying the input's record."""
    before = next(record for record in records if record.name == event.step.inputs[0])
    formula = right_hand_side(event.step, steps)
    return replace(
        before, name=event.name, op="dropout", formula=formula, inputs=event.step.inputs, params=0, flops=cost.flops,
        parameters=(),
    )  # fmt: skip


def _with_drops(after: StepRecord, records: Sequence[StepRecord]) -> StepRecord:
    """Add the counts of live and dropped values to a dropout's record, by comparison with its input."""
    before = next(record for record in records if record.name == after.inputs[0])
    return replace(after, live=prod(before.shape) - before.zeros, dropped=after.zeros - before.zeros)


def _inner(event: Event, steps: Sequence[Step], weights: Mapping[str, Tensor], look: _Look) -> StepRecord:
    """Record a step inside an expert, on the tokens routed to it; inputs are named as in the block."""
    outer, _, _ = event.name.rpartition(".")
    experts = next(s for s in steps if s.output == outer.split(".")[0])
    assert isinstance(experts.op, Experts)
    assert event.expert is not None
    program = experts.op.program
    cost = step_costs(program, input_shapes(program, (event.tensor.shape[0],)))[event.step.output]
    (entry,) = block_inputs(program)
    renamed = tuple(experts.inputs[0] if name == entry else name for name in event.step.inputs)
    inside = experts.op.of_one(weights, event.expert - experts.op.first, experts.prefix)
    units = _units(event, program, inside, look.top_units)
    record = _record(event.name, event.tensor, look, replace(event.step, inputs=renamed), program, cost, units)
    inner = {step.output for step in program}
    names = tuple(f"{outer}.{name}" if name in inner else name for name in record.inputs)
    return replace(record, inputs=names, tokens=tuple(event.tokens.tolist()) if event.tokens is not None else None)


def _units(event: Event, program: Sequence[Step], weights: Mapping[str, Tensor], top: int) -> Units | None:
    """Return statistics of the step's hidden units over its tokens; None if its values are not hidden units."""
    readers = unit_steps(program)
    if event.step.output not in readers or not event.tensor.numel():
        return None
    reader = readers[event.step.output]
    down = weights[f"{reader}.weight"] if reader is not None else None
    units = unit_statistics(event.tensor, top, down)
    if event.tokens is None:
        return units
    tokens = event.tokens.tolist()
    largest, active = (
        tuple(replace(unit, token=tokens[unit.token]) for unit in order)
        for order in (units.largest_norm, units.most_active)
    )
    per_token = tuple(replace(one, token=tokens[one.token]) for one in units.per_token)
    return replace(units, largest_norm=largest, most_active=active, per_token=per_token)


def _record(
    name: str,
    tensor: Tensor,
    look: _Look,
    step: Step | None = None,
    steps: Sequence[Step] = (),
    cost: Cost = _NOTHING,
    units: Units | None = None,
) -> StepRecord:
    """Record one tensor; it is an input of the block if `step` is None."""
    index, values = excerpt(tensor, look.show)
    summary = statistics(tensor)
    return StepRecord(
        name=name,
        op=step.op.name if step else "input",
        formula=right_hand_side(step, steps) if step else name,
        inputs=step.inputs if step else (),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        **vars(summary),
        near_zero_share=summary.near_zeros / tensor.numel() if tensor.numel() else None,
        params=cost.params + cost.norm_params,
        flops=cost.flops,
        parameters=_parameters(step, steps) if step else (),
        values=values,
        values_index=index,
        units=units,
    )


def _parameters(step: Step, steps: Sequence[Step]) -> tuple[Parameter, ...]:
    if isinstance(step.op, Experts):
        steps = step.op.program
    out = []
    for name, axes in step.parameters().items():
        owner, _, kind = name.rpartition(".")
        out.append(Parameter(name, weight_symbol(owner, kind, steps), tuple(axis.size for axis in axes)))
    return tuple(out)


def excerpt(tensor: Tensor, show: int | None) -> tuple[tuple[tuple[int, ...], ...], Any]:
    """Return (indices per axis, nested lists of values) of the first and last indices, `show` per axis in total."""
    index = tuple(edges(size, size if show is None else show) for size in tensor.shape)
    if any(len(kept) < size for kept, size in zip(index, tensor.shape, strict=True)):
        axes = [torch.tensor(kept, dtype=torch.long, device=tensor.device) for kept in index]
        tensor = tensor[torch.meshgrid(*axes, indexing="ij")]  # copies only the selected values, no axis in full
    return index, tensor.double().cpu().tolist()


def find_not_finite(result: Trace, weights: Mapping[str, Tensor]) -> tuple[NotFinite, ...]:
    """Return all inputs and weights that contain NaN or Inf, and the first step that does."""
    not_finite = [NotFinite("input", r.name, r.nan, r.inf) for r in result.steps if r.op == "input" and r.nan + r.inf]
    not_finite += where_not_finite("weight", weights)
    first = next((r for r in result.steps if r.op != "input" and r.nan + r.inf), None)
    if first:
        not_finite.append(NotFinite("step", first.name, first.nan, first.inf))
    return tuple(not_finite)


@dataclass(frozen=True)
class UnitGroup:
    """A group of units: the units of the routed expert with index `expert` out of `experts`, of the part `shared`, or
    of a dense FFN (`part` is empty)."""

    part: str
    expert: int = 0
    experts: int = 1


DENSE = UnitGroup("")


@dataclass(frozen=True)
class UnitEvent:
    """The values of a group's units [tokens, d_ff], and the output of the activation that produced them."""

    group: UnitGroup
    values: Tensor
    active: Tensor


class UnitEvents:
    """A detector of hidden units in a block's events, which must be passed to it in order."""

    def __init__(self, block: Sequence[Step]) -> None:
        self._block = block
        self._mixtures = {step.output: step for step in block if isinstance(step.op, Experts)}
        self._active: dict[str, Tensor] = {}

    @property
    def groups(self) -> list[UnitGroup]:
        """All groups of units, including a group per expert."""
        outer = dict.fromkeys(name.rpartition(".")[0] for name in unit_steps(self._block))
        routed = {name: _experts(step).experts.size for name, step in self._mixtures.items()}
        return [*map(UnitGroup, outer), *(UnitGroup(name, e, n) for name, n in routed.items() for e in range(n))]

    def of(self, event: Event) -> UnitEvent | None:
        """Return the units in an event; None if the event is another intermediate."""
        owner, _, name = event.name.rpartition(".")
        op, program = event.step.op, self._program(owner)
        if isinstance(op, Activation) and op.function != "identity":
            self._active = {owner: event.tensor}
        if program.get(name) is None or owner not in self._active:
            return None
        return UnitEvent(self._group(owner, event.expert), event.tensor, self._active[owner])

    def columns(self, group: UnitGroup, weights: Mapping[str, Tensor]) -> Tensor:
        """Return a group's down projection [written, d_ff]: each column is the vector that a unit writes at activation
        1."""
        reader = next(name for name in self._program(group.part).values() if name)
        return self._inside(group, weights)[f"{reader}.weight"]

    def rows(self, group: UnitGroup, weights: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the matrices [d_ff, read] whose rows a group's units read the input with: gate and up, or up alone."""
        prefix = f"{group.part}." if group.part not in ("", *self._mixtures) else ""
        inside = self._inside(group, weights)
        return [inside[name] for name in (f"{prefix}gate.weight", f"{prefix}up.weight") if name in inside]

    def _inside(self, group: UnitGroup, weights: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        step = self._mixtures.get(group.part)
        return weights if step is None else _experts(step).of_one(weights, group.expert, step.prefix)

    def _program(self, owner: str) -> Mapping[str, str | None]:
        """Return the unit steps of the whole block, or of one expert's program, each with the Linear that reads it."""
        if (step := self._mixtures.get(owner.partition(".")[0])) is not None:
            return unit_steps(_experts(step).program)
        readers = unit_steps(self._block)
        return {name.rpartition(".")[2]: reader for name, reader in readers.items() if name.rpartition(".")[0] == owner}

    def _group(self, owner: str, expert: int | None) -> UnitGroup:
        root = owner.partition(".")[0]
        return (
            UnitGroup(owner) if expert is None else UnitGroup(root, expert, _experts(self._mixtures[root]).experts.size)
        )


def _experts(step: Step) -> Experts:
    assert isinstance(step.op, Experts)
    return step.op
