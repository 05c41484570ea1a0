"""trace: run a block and record every intermediate as numbers a person or a script can use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import torch
from torch import Tensor

from ffncli.block.cost import Cost, step_costs
from ffncli.block.steps import Experts, Step, block_inputs, ffn_span, input_shapes, right_hand_side, weight_symbol
from ffncli.errors import FFNError
from ffncli.run.execute import EVAL, Event, Mode, execute
from ffncli.show.tensors import edges

_NOTHING = Cost()


@dataclass(frozen=True)
class Parameter:
    """A step's parameter: its canonical name (`up.weight`), how the formula prints it (`W1`), torch's shape."""

    name: str
    symbol: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class StepRecord:
    """One line of a trace. Statistics are over finite values (None where there are none), std with divisor n.

    `zeros` and `negatives` count values, `params` is what the step owns, `flops` its forward work on this input.
    Inside an expert, `tokens` are the flat indices of the tokens that it received, one per row; else None. Where
    dropout was active, `live` counts the values that were not zero before it, `dropped` those of them that are now.
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
    negatives: int
    nan: int
    inf: int
    params: int
    flops: int
    parameters: tuple[Parameter, ...]
    values: Any
    values_index: tuple[tuple[int, ...], ...]
    tokens: tuple[int, ...] | None = None
    live: int | None = None
    dropped: int | None = None


@dataclass(frozen=True)
class Trace:
    """A block's trace: where its FFN begins and ends, and every step, the block's inputs first.

    `tensors` are the intermediates that were asked to be kept, by their printed names.
    """

    ffn_input: str
    ffn_output: str
    steps: tuple[StepRecord, ...]
    tensors: Mapping[str, Tensor] = field(default_factory=dict, compare=False, repr=False)

    def step(self, name: str) -> StepRecord:
        """The record of that name. Raises FFNError where there is none."""
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
) -> Trace:
    """Run `steps` on `inputs` ([..., d_model] each) and record every intermediate.

    `show` values per axis are kept (None: all). `inside` names the experts whose own steps are recorded too (None:
    all), `keep` the steps and inputs whose whole tensors stay, those inside experts by their printed names (None: all
    that are recorded); others are freed after their last use.
    """
    costs = step_costs(steps, {name: tuple(tensor.shape) for name, tensor in inputs.items()})
    records = [_record(name, tensor, show) for name, tensor in inputs.items()]
    kept = {name: tensor for name, tensor in inputs.items() if keep is None or name in keep}
    with torch.no_grad():
        for event in execute(steps, weights, inputs, mode):
            if keep is not None and event.name in keep:
                kept[event.name] = event.tensor
            if event.expert is None:
                found = _record(event.name, event.tensor, show, event.step, steps, costs[event.name])
            elif inside is None or event.expert in inside:
                found = _inner(event, steps, show)
            else:
                continue
            records.append(_with_drops(found, records) if mode.train and found.op == "dropout" else found)
            if keep is None:
                kept[event.name] = event.tensor
    return Trace(*ffn_span(steps), tuple(records), kept)


def _with_drops(after: StepRecord, records: Sequence[StepRecord]) -> StepRecord:
    """A dropout's record with what it dropped, seen against its input's."""
    before = next(record for record in records if record.name == after.inputs[0])
    return replace(after, live=prod(before.shape) - before.zeros, dropped=after.zeros - before.zeros)


def _inner(event: Event, steps: Sequence[Step], show: int | None) -> StepRecord:
    """A step inside an expert: its rows are the tokens routed there, its inputs go by the names of the whole block."""
    outer, _, _ = event.name.rpartition(".")
    experts = next(s for s in steps if s.output == outer.split(".")[0])
    assert isinstance(experts.op, Experts)
    program = experts.op.program
    cost = step_costs(program, input_shapes(program, (event.tensor.shape[0],)))[event.step.output]
    (entry,) = block_inputs(program)
    renamed = tuple(experts.inputs[0] if name == entry else name for name in event.step.inputs)
    found = _record(event.name, event.tensor, show, replace(event.step, inputs=renamed), program, cost)
    inner = {step.output for step in program}
    names = tuple(f"{outer}.{name}" if name in inner else name for name in found.inputs)
    return replace(found, inputs=names, tokens=tuple(event.tokens.tolist()) if event.tokens is not None else None)


def _record(
    name: str,
    tensor: Tensor,
    show: int | None,
    step: Step | None = None,
    steps: Sequence[Step] = (),
    cost: Cost = _NOTHING,
) -> StepRecord:
    """The record of one tensor; without a step it is an input of the block."""
    index, values = _excerpt(tensor, show)
    return StepRecord(
        name=name,
        op=type(step.op).__name__.lower() if step else "input",
        formula=right_hand_side(step, steps) if step else name,
        inputs=step.inputs if step else (),
        shape=tuple(tensor.shape),
        dtype=str(tensor.dtype).removeprefix("torch."),
        **_statistics(tensor),
        params=cost.params + cost.norm_params,
        flops=cost.flops,
        parameters=_parameters(step, steps) if step else (),
        values=values,
        values_index=index,
    )


def _parameters(step: Step, steps: Sequence[Step]) -> tuple[Parameter, ...]:
    if isinstance(step.op, Experts):
        steps = step.op.program
    out = []
    for name, axes in step.parameters().items():
        owner, _, own = name.rpartition(".")
        out.append(Parameter(name, weight_symbol(owner, own, steps), tuple(axis.size for axis in axes)))
    return tuple(out)


def _excerpt(tensor: Tensor, show: int | None) -> tuple[tuple[tuple[int, ...], ...], Any]:
    """(indices per axis, nested lists of the values there): the first and last of every axis, `show` together."""
    index = tuple(edges(size, size if show is None else show) for size in tensor.shape)
    for axis, kept in enumerate(index):
        tensor = tensor.index_select(axis, torch.tensor(kept, dtype=torch.long, device=tensor.device))
    return index, tensor.double().cpu().tolist()


def _statistics(tensor: Tensor) -> dict[str, Any]:
    """min, max, mean, std of the finite values; counts of zeros, negatives, NaN and Inf."""
    flat = tensor.detach().flatten()
    finite = flat.isfinite()
    nan, bad = int(flat.isnan().sum()), int((~finite).sum())
    values = flat if not bad else flat[finite]
    moments: dict[str, float | None] = dict.fromkeys(("min", "max", "mean", "std"))
    if values.numel():
        mean = values.mean(dtype=torch.float64).item()
        spread = (values.double() - mean).square().mean().sqrt().item()
        low, high = values.min().item(), values.max().item()
        moments = {"min": low, "max": high, "mean": mean, "std": spread}
    counts = {"zeros": int((flat == 0).sum()), "negatives": int((flat < 0).sum()), "nan": nan, "inf": bad - nan}
    return {**moments, **counts}
