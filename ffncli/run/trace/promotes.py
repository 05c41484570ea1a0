"""`promotes`: the hidden units of a layer that raise the logit of one token, and those that lower it.

What a unit writes is its column c of the down projection. With the direction g in which a residual stream raises the
token's logit, c alone gives g·c over its own size; as a part of the stream after the layer, the unit gives its
activation times g·c over the size of that stream. Everything between a unit and the stream is linear once the router's
weights and the branch's norm are fixed: activation times gradient is a unit's part, and the parts of all units, with
the biases', add up to the FFN's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, option
from ffncli.models.model import Resolved
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.unit_events import UnitEvents, UnitGroup
from ffncli.run.pretrained.tokens import one_token, token_text
from ffncli.run.trace.head import divisor, head_of
from ffncli.run.trace.stream import last_norm, to_stream

OPTION = option("promotes")


@dataclass(frozen=True)
class UnitLogit:
    """What one unit does to the token's logit. `alone` is the logit of its column of the down projection, normalised
    alone, as if it were the whole residual stream.

    With a prompt: `activation` is the unit's value, `logit` what it adds to the logit as a part of the residual stream
    after the layer. Both are None without one, and for units of experts that do not get the token; `logit` is None too
    where the logits are not a sum of parts. `part` is "", "experts" or "shared".
    """

    part: str
    expert: int | None
    unit: int
    alone: float
    activation: float | None = None
    logit: float | None = None


@dataclass(frozen=True)
class PromotingUnits:
    """The units that raise the logit of the token `id` most, and those that lower it most: by `logit` at a `row` of the
    prompt, without one by `alone`.

    `residual_rms` is the size of the residual stream after the layer, as in `DirectLogits`; `units` is how much all
    units of the layer add to the logit, `output` how much the FFN does, biases included. They are None without a
    prompt.
    """

    id: int
    text: str | None
    row: int | None
    residual_rms: float | None
    units: float | None
    output: float | None
    promoting: tuple[UnitLogit, ...]
    suppressing: tuple[UnitLogit, ...]


def promoting_units(
    model: Resolved,
    ready: Prepared,
    text: str,
    rows: Sequence[int],
    most: int,
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[PromotingUnits, ...]:
    """The `most` units at each end for a token, its `text` or `id:N`: a record for each of the prompt's `rows`, or one
    without a prompt.

    Raises FFNError for a text that is not one token, and as `head_of` does.
    """
    with head_of(model, ready.layer, dtype, device, OPTION) as head:
        token = one_token(head.tokenizer, text, len(next(head.logits(torch.zeros(1, ready.layer.spec.d_model)))))
        named = token, token_text(head.tokenizer, token)
        logits = head.token_logits(token)
        alone = {
            group: logits(_alone(model, ready, group, dtype, device)).tolist()
            for group in UnitEvents(ready.steps).groups
        }
        if ready.stream is None or head.norm is None:
            return (PromotingUnits(*named, None, None, None, None, *_ends(_units(alone), most)),)
        direction, out = head.direction(token), []
        for row in rows:
            size = float(divisor(ready.stream[row], head.norm))
            parts, output = _parts(ready, row, direction / size)
            units = _units(alone, parts)
            total = sum(unit.logit for unit in units if unit.logit is not None)
            out.append(PromotingUnits(*named, row, size, total, output, *_ends(units, most)))
        return tuple(out)


def _alone(model: Resolved, ready: Prepared, group: UnitGroup, dtype: str | None, device: str) -> Tensor:
    """The columns of a group as vectors [d_ff, d_model], each through the norm of its branch.

    Raises FFNError for columns that are not d_model wide.
    """
    columns = UnitEvents(ready.steps).columns(group, ready.weights).T
    if columns.shape[1] != ready.layer.spec.d_model:
        what = f"{OPTION}: the units of this layer write into {columns.shape[1]} dimensions"
        raise FFNError(what, "another projection makes them d_model wide")
    return last_norm(model, ready.layer, to_stream(ready, columns, columns).vectors, dtype, device)


def _parts(ready: Prepared, row: int, direction: Tensor) -> tuple[dict[UnitGroup, tuple[Tensor, Tensor]], float]:
    """(for each group that a row reaches, its units' values [d_ff] and what each adds in a direction of the residual
    stream, what the FFN adds in it).
    """
    inputs = {name: x.flatten(0, -2)[row : row + 1] for name, x in ready.inputs.items()}
    inputs = {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    unit_events, values, output = UnitEvents(ready.steps), dict[UnitGroup, Tensor](), torch.ones(0)
    with torch.enable_grad():
        for event in execute(ready.steps, ready.weights, inputs, EVAL):
            output, units = event.tensor, unit_events.of(event)
            if units is not None:
                values[units.group] = units.values
        whole = output.detach().requires_grad_()
        stream = to_stream(ready, whole, output.detach())
        added = (stream.vectors.double()[0] @ direction.to(whole.device)) * stream.factors[0].to(whole.device)
        (towards,) = torch.autograd.grad(added, whole)
        slopes = torch.autograd.grad((output * towards).sum(), [*values.values()])
    parts = {
        group: (x[0].detach(), x[0].detach().double() * slope[0].double())
        for (group, x), slope in zip(values.items(), slopes, strict=True)
    }
    return parts, float(added)


def _units(
    alone: Mapping[UnitGroup, Sequence[float]], parts: Mapping[UnitGroup, tuple[Tensor, Tensor]] = {}
) -> list[UnitLogit]:
    """A record for each unit."""
    out = []
    for group, logits in alone.items():
        expert = group.expert if group.experts > 1 else None
        here = parts.get(group)
        pairs = [(None, None)] * len(logits) if here is None else zip(*(x.tolist() for x in here), strict=True)
        out += [
            UnitLogit(group.part, expert, unit, value, *pair)
            for unit, (value, pair) in enumerate(zip(logits, pairs, strict=True))
        ]
    return out


def _ends(units: Sequence[UnitLogit], most: int) -> tuple[tuple[UnitLogit, ...], tuple[UnitLogit, ...]]:
    """The first and the last by what they add, or, where nothing says that, by their columns alone."""
    reached = [unit for unit in units if unit.logit is not None] or units
    order = sorted(reached, key=lambda unit: unit.alone if unit.logit is None else unit.logit)
    return tuple(order[: -most - 1 : -1]), tuple(order[:most])
