"""The tokens that an FFN's output or a hidden unit promotes, and the units that promote a token.

A vector passes through the model's own final norm and head (the logit lens). A unit writes its column c of the down
projection, times its activation a. Let g be the direction in which the residual stream raises a token's logit. On its
own, c contributes g·c / size(c) to the logit; as part of the residual stream s after the layer, the unit contributes a
· g·c / size(s). If the router's weights and the branch's norm are fixed, everything between a unit and the stream is
linear: a unit's contribution is its activation times the gradient, and the contributions of all units and biases add up
to the contribution of the FFN.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from ffncli.block.steps import ffn_sum, routes
from ffncli.errors import FFNError, option
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.trace import DENSE, Trace, UnitEvents, UnitGroup
from ffncli.run.pretrained.tokens import one_token, positions, token_text
from ffncli.run.trace.head import Head, divisor, head_of, last_norm, to_stream
from ffncli.run.trace.question import TOP_TOKENS, Question, TraceSubject
from ffncli.run.trace.routing import sampling

PROMOTING_UNITS = 10


def unembedded(
    question: Question, subject: TraceSubject, prepared: Prepared, result: Trace
) -> "tuple[PromotedTokens, ...]":
    """Return the tokens promoted by the FFN's output at positions (default: the last), or by a unit, after any norms
    between the FFN and the residual stream."""
    output = result.tensors[ffn_sum(prepared.steps)].flatten(0, -2)
    rows = _chosen_rows(question, prepared, output.shape[0])
    if question.neuron is None:
        stream = prepared.stream
        vectors = [Added(output[row], row, stream=None if stream is None else stream[row]) for row in rows]
    elif prepared.tokens:
        vectors = of_unit_at(prepared, question.neuron, subject.experts, rows)
    else:
        vectors = of_unit(prepared, question.neuron, subject.experts)
    top_k, top_p = question.sets
    limits = TokenLimits(question.top_tokens or max(TOP_TOKENS, top_k), top_k, top_p)
    outputs = torch.stack([one.vector if one.output is None else one.output for one in vectors])
    carried, factors = to_stream(prepared, torch.stack([one.vector for one in vectors]), outputs)
    parts = zip(vectors, carried, factors.tolist(), strict=True)
    in_stream = [replace(one, vector=vector, factor=one.factor * factor) for one, vector, factor in parts]
    out = unembed(subject.model, prepared.layer, in_stream, limits, question.dtype, question.device)
    question.check_top_k(out[0].vocab)
    return out


def _chosen_rows(question: Question, prepared: Prepared, count: int) -> tuple[int, ...]:
    """Return the rows of the input to unembed, by default the last row."""
    # With a prompt, the input has only the chosen rows.
    chosen = bool(prepared.tokens) and question.position is not None
    return positions("all" if chosen else str(question.position or "-1"), count)


_UNEMBED = option("unembed")
_SUMS = ("down", "experts", "moe")  # outputs of an FFN that are plain sums of the vectors that units write


@dataclass(frozen=True)
class Promoted:
    """A token promoted by a vector: its logit, and its probability after a softmax over the vocabulary.

    `cumulative` is the total probability of this token and all tokens ranked above it.
    """

    id: int
    text: str | None
    logit: float
    probability: float
    cumulative: float
    in_top_k: bool
    in_top_p: bool


@dataclass(frozen=True)
class TokenLogit:
    """A token and its logit."""

    id: int
    text: str | None
    logit: float


@dataclass(frozen=True)
class DirectLogits:
    """The contribution of a vector to the logits, as part of the residual stream after the layer. The final norm
    divides the vector by the stream's RMS, `residual_rms` (with LayerNorm: the stream's standard deviation), not by the
    vector's own RMS. `promoted` and `suppressed` are the tokens with the largest and the smallest contributions."""

    residual_rms: float
    promoted: tuple[TokenLogit, ...]
    suppressed: tuple[TokenLogit, ...]


@dataclass(frozen=True)
class TokenLimits:
    """The number of tokens to list (`top`), and the K and P of the top-k and top-p sets."""

    top: int
    top_k: int
    top_p: float


@dataclass(frozen=True)
class PromotedTokens:
    """The tokens promoted by the FFN's output for an input `row`, or by the hidden unit `neuron` (in a mixture, of
    `expert`).

    A unit's vector is its column of the down projection times `activation`, the unit's value for the `row` (in a
    mixture also times the router's weight); without a prompt, it is the column times `sign`. The top-k and top-p sets
    are defined as in `Sampling`, over a vocabulary of `vocab` tokens. `promoted` is sorted by descending logit;
    `suppressed` contains the tokens with the smallest logits, in ascending order. For these logits, the vector is
    normalised on its own, as if it were the whole residual stream; `direct` is its contribution as part of the residual
    stream, if there is a prompt and the logits are a sum of parts. If a logit is NaN, there are no promoted tokens and
    no sets.
    """

    row: int | None
    neuron: int | None
    expert: int | None
    sign: int | None
    activation: float | None
    vocab: int
    argmax: int | None
    top_k: int
    top_k_mass: float | None
    top_p: float
    top_p_count: int | None
    top_p_mass: float | None
    promoted: tuple[Promoted, ...]
    suppressed: tuple[TokenLogit, ...] = ()
    direct: DirectLogits | None = None


@dataclass(frozen=True)
class Added:
    """A vector [d_model] from an FFN: the FFN's output for a `row` of the input, or the vector that one hidden unit
    writes.

    A unit's vector is the column `neuron` of the down projection (of `expert`, in a mixture) times `sign`, or times the
    `activation` for the `row`. If the vector is part of an FFN's `output` [d_model] and of the residual `stream`
    [d_model] after the layer, these are stored too; the part is `factor` times the vector. `factor` is NaN if there is
    no such part.
    """

    vector: Tensor
    row: int | None = None
    neuron: int | None = None
    expert: int | None = None
    sign: int | None = None
    activation: float | None = None
    output: Tensor | None = None
    stream: Tensor | None = None
    factor: float = 1.0


def of_unit(ready: Prepared, neuron: int, experts: frozenset[int] | None) -> list[Added]:
    """Return the vectors that a unit writes for positive and negative activation, in every one of `experts`."""
    down = ready.weights["down.weight"]
    numbers = sorted(experts or ()) if ready.layer.spec.moe else (None,)
    columns = [(expert, (down if expert is None else down[expert])[:, neuron]) for expert in numbers]
    return [Added(sign * column, None, neuron, expert, sign) for expert, column in columns for sign in (1, -1)]


def of_unit_at(ready: Prepared, neuron: int, experts: frozenset[int] | None, rows: Sequence[int]) -> list[Added]:
    """Return the vectors that a unit writes for a prompt's rows, in each of `experts` that receives the row."""
    block, end, moe = ready.steps, ffn_sum(ready.steps), ready.layer.spec.moe
    unit_events, mixtures = UnitEvents(block), routes(block)
    values: list[tuple[int, int | None, float, Tensor]] = []
    route = output = torch.ones(0)
    for event in execute(block, ready.weights, ready.inputs, EVAL, keep=frozenset([end, *mixtures])):
        route = event.tensor if event.name in mixtures else route
        output = event.tensor
        units = unit_events.of(event)
        if units is None or (event.expert not in (experts or ()) if moe else units.group != DENSE):
            continue
        column = unit_events.columns(units.group, ready.weights)[:, neuron]
        tokens = range(len(units.values)) if event.tokens is None else event.tokens.tolist()
        for value, row in zip(units.values[:, neuron].tolist(), tokens, strict=True):
            if row in rows:
                weight = route[row, event.expert] if moe and moe.weigh == "output" else 1.0
                values.append((row, event.expert, value, value * weight * column))
    if not values:
        what = f"{option('neuron', neuron)}: these tokens are not routed to the experts of {option('expert')}"
        raise FFNError(what, "without a prompt the unit's column of the down projection is shown")
    factor = 1.0 if end in _SUMS else nan
    return [
        Added(
            vector, row, neuron, expert, None, value, output[row],
            None if ready.stream is None else ready.stream[row], factor,
        )
        for row, expert, value, vector in sorted(values, key=lambda one: one[:2])
    ]  # fmt: skip


def unembed(
    model: Resolved,
    layer: Layer,
    added: Sequence[Added],
    limits: TokenLimits,
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[PromotedTokens, ...]:
    """Return the tokens that each vector promotes when `layer`'s FFN adds it to the residual stream."""
    vectors = last_norm(model, layer, torch.stack([one.vector for one in added]), dtype, device)
    with head_of(model, layer, dtype, device, _UNEMBED) as head:
        return tuple(
            replace(_best(one, row, head.tokenizer, limits), direct=_direct(one, head, limits))
            for one, row in zip(added, head.logits(vectors), strict=True)
        )


def _direct(one: Added, head: Head, limits: TokenLimits) -> DirectLogits | None:
    """Return the vector's contribution as part of the residual stream; None if it is not a part of the stream."""
    if one.stream is None or isnan(one.factor) or head.norm is None:
        return None
    size = float(divisor(one.stream, head.norm))
    logits = head.part(one.vector, size) * one.factor
    return DirectLogits(size, *(_ends(logits, largest, head.tokenizer, limits.top) for largest in (True, False)))


def _ends(logits: Tensor, largest: bool, tokenizer: Any, most: int) -> tuple[TokenLogit, ...]:
    """Return at most `most` tokens, those with the largest or the smallest logits."""
    if logits.isnan().any():
        return ()
    values, ids = logits.topk(min(most, len(logits)), largest=largest)
    return tuple(
        TokenLogit(i, token_text(tokenizer, i), value) for i, value in zip(ids.tolist(), values.tolist(), strict=True)
    )


def _best(one: Added, logits: Tensor, tokenizer: Any, limits: TokenLimits) -> PromotedTokens:
    every = logits
    # Sort by logit: probabilities far below the largest underflow to 0 and would tie.
    logits, ids = logits.sort(descending=True, stable=True)
    sets = sampling(logits.softmax(-1), limits.top_k, limits.top_p, limits.top)[0]
    rows = zip(sets.candidates[: limits.top], logits.tolist(), ids.tolist(), strict=False)
    tokens = tuple(
        Promoted(i, token_text(tokenizer, i), logit, one.probability, one.cumulative, one.in_top_k, one.in_top_p)
        for one, logit, i in rows
    )
    # `sets` has ranks instead of token ids, because it was computed from sorted logits; take the id from `tokens`.
    argmax = tokens[0].id if tokens else None
    return PromotedTokens(
        one.row, one.neuron, one.expert, one.sign, one.activation, len(logits), argmax, sets.top_k, sets.top_k_mass,
        sets.top_p, sets.top_p_count, sets.top_p_mass, tokens, _ends(every, False, tokenizer, limits.top),
    )  # fmt: skip


_PROMOTES = option("promotes")


@dataclass(frozen=True)
class UnitLogit:
    """The effect of one unit on a token's logit. `alone` is the logit of the unit's column of the down projection,
    normalised on its own, as if it were the whole residual stream.

    `activation` is the unit's value, and `logit` its contribution to the logit as part of the residual stream after the
    layer. Both are None without a prompt, for units of experts that do not receive the token, and if the logits are not
    a sum of parts. `part` is "", "experts" or "shared".
    """

    part: str
    expert: int | None
    unit: int
    alone: float
    activation: float | None = None
    logit: float | None = None


@dataclass(frozen=True)
class PromotingUnits:
    """The units that raise the logit of the token `id` most, and the units that lower it most: ordered by `logit` at a
    `row` of the prompt, or by `alone` without a prompt.

    `residual_rms` is the size of the residual stream after the layer, as in `DirectLogits`; `units` is the total
    contribution of all units of the layer to the logit, `output` the contribution of the whole FFN, biases included.
    All three are None without a prompt.
    """

    id: int
    text: str | None
    row: int | None
    residual_rms: float | None
    units: float | None
    output: float | None
    promoting: tuple[UnitLogit, ...]
    suppressing: tuple[UnitLogit, ...]


def promoting(question: Question, subject: TraceSubject, prepared: Prepared) -> tuple[PromotingUnits, ...] | None:
    """Return the units that raise and that lower a token's logit; None if not requested. With a prompt there is a
    record per chosen row, otherwise a single record."""
    if question.promotes is None:
        return None
    most, d_model = question.top_units or PROMOTING_UNITS, prepared.layer.spec.d_model
    with head_of(subject.model, prepared.layer, question.dtype, question.device, _PROMOTES) as head:
        token = one_token(head.tokenizer, question.promotes, len(next(head.logits(torch.zeros(1, d_model)))))
        named = token, token_text(head.tokenizer, token)
        logits, groups = head.token_logits(token), UnitEvents(prepared.steps).groups
        alone = {group: logits(_alone(question, subject.model, prepared, group)).tolist() for group in groups}
        if prepared.stream is None or head.norm is None:
            return (PromotingUnits(*named, None, None, None, None, *_unit_ends(_units(alone), most)),)
        direction, out = head.direction(token), []
        for row in _chosen_rows(question, prepared, len(prepared.tokens)):
            size = float(divisor(prepared.stream[row], head.norm))
            parts, output = _parts(prepared, row, direction / size)
            units = _units(alone, parts)
            total = sum(unit.logit for unit in units if unit.logit is not None)
            out.append(PromotingUnits(*named, row, size, total, output, *_unit_ends(units, most)))
        return tuple(out)


def _alone(question: Question, model: Resolved, ready: Prepared, group: UnitGroup) -> Tensor:
    """Return a unit group's down-projection columns as vectors [d_ff, d_model], after the branch's norm."""
    columns = UnitEvents(ready.steps).columns(group, ready.weights).T
    if columns.shape[1] != ready.layer.spec.d_model:
        what = f"{_PROMOTES}: the units of this layer write into {columns.shape[1]} dimensions"
        raise FFNError(what, "another projection makes them d_model wide")
    return last_norm(model, ready.layer, to_stream(ready, columns, columns)[0], question.dtype, question.device)


def _parts(ready: Prepared, row: int, direction: Tensor) -> tuple[dict[UnitGroup, tuple[Tensor, Tensor]], float]:
    """Return (parts, whole). `parts` maps each group of units that a row reaches to the units' values [d_ff] and their
    contributions [d_ff] along `direction` in the residual stream; `whole` is the contribution of the FFN."""
    inputs = {name: x.flatten(0, -2)[row : row + 1] for name, x in ready.inputs.items()}
    inputs = {name: x.clone().requires_grad_() if x.is_floating_point() else x for name, x in inputs.items()}
    unit_events, values, output = UnitEvents(ready.steps), dict[UnitGroup, Tensor](), torch.ones(0)
    with torch.enable_grad():
        for event in execute(ready.steps, ready.weights, inputs, EVAL):
            output, units = event.tensor, unit_events.of(event)
            if units is not None:
                values[units.group] = units.values
        whole = output.detach().requires_grad_()
        vectors, factors = to_stream(ready, whole, output.detach())
        added = (vectors.double()[0] @ direction.to(whole.device)) * factors[0].to(whole.device)
        (towards,) = torch.autograd.grad(added, whole)
        # With the route's weights and the norm fixed, output is linear in the units: value · slope is a unit's part.
        slopes = torch.autograd.grad((output * towards).sum(), [*values.values()])
    parts = {
        group: (x[0].detach(), x[0].detach().double() * slope[0].double())
        for (group, x), slope in zip(values.items(), slopes, strict=True)
    }
    return parts, float(added)


def _units(
    alone: Mapping[UnitGroup, Sequence[float]], parts: Mapping[UnitGroup, tuple[Tensor, Tensor]] = {}
) -> list[UnitLogit]:
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


def _unit_ends(units: Sequence[UnitLogit], most: int) -> tuple[tuple[UnitLogit, ...], tuple[UnitLogit, ...]]:
    """Return the units with the largest and the smallest contribution (if unknown, `alone`), at most `most` each."""
    reached = [unit for unit in units if unit.logit is not None] or units
    order = sorted(reached, key=lambda unit: unit.alone if unit.logit is None else unit.logit)
    return tuple(order[: -most - 1 : -1]), tuple(order[:most])
