"""The logit lens on an FFN: which tokens a vector promotes, through the model's own final norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isnan, nan
from typing import Any

import torch
from torch import Tensor

from ffncli.block.steps import ffn_span, routes
from ffncli.dataclass import dataclass
from ffncli.errors import FFNError, option
from ffncli.models.model import Layer, Resolved
from ffncli.run.engine.execute import EVAL, execute
from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.unit_events import DENSE, UnitEvents
from ffncli.run.pretrained.tokens import token_text
from ffncli.run.trace.head import Head, divisor, head_of
from ffncli.run.trace.sampling import sampling
from ffncli.run.trace.stream import last_norm, to_stream

OPTION = option("unembed")
_SUMS = ("down", "experts", "moe")  # outputs of an FFN to which what a unit writes is added as it is


@dataclass(frozen=True)
class Promoted:
    """A token with its logit for the vector, and the probability after a softmax over the vocabulary.

    `cumulative` is the mass of all tokens at least as probable, itself included.
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
    """A token with a logit."""

    id: int
    text: str | None
    logit: float


@dataclass(frozen=True)
class DirectLogits:
    """What a vector adds to the logits as a part of the residual stream after the layer, with the size of that stream:
    the final norm divides the vector by the stream's `residual_rms` (of a LayerNorm: its standard deviation), not by
    its own. `promoted` and `suppressed` are the tokens of the largest and of the smallest sums.
    """

    residual_rms: float
    promoted: tuple[TokenLogit, ...]
    suppressed: tuple[TokenLogit, ...]


@dataclass(frozen=True)
class TokenLimits:
    """How many tokens are listed, and the sampler's sets: the `top_k` likeliest, and those that make up `top_p`."""

    top: int
    top_k: int
    top_p: float


@dataclass(frozen=True)
class PromotedTokens:
    """The tokens promoted by the FFN's output for an input `row`, or by a unit: `neuron`, of `expert` in a mixture.

    A unit's vector is its column of the down projection times `activation`, its value for the `row` (in a mixture times
    the router's weight too), or, without a prompt, times `sign`. The sets are as in `Sampling`, of a vocabulary of
    `vocab` tokens; `promoted` are sorted by logit, the largest first. The vector is normalised alone, as if it were the
    whole residual stream; `direct` has it as a part of that, if a prompt gives one and the logits are a sum of parts.
    `suppressed` are the tokens of smallest logit, the smallest first. If a logit is not a number, nothing is promoted
    or picked.
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
    """A vector [d_model] from an FFN: its output for a `row` of the input, or the vector that one hidden unit writes.

    For a unit it is the column `neuron` of the down projection (of `expert`'s, if there are several) times `sign`, or
    times the `activation` for the `row`. Of a vector that is a part of the FFN's `output` [d_model], and so of the
    residual `stream` after the layer [d_model], both are here; `factor` makes it that part, NaN if it is not one.
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


def of_rows(output: Tensor, rows: Sequence[int], stream: Tensor | None = None) -> list[Added]:
    """The FFN's output vectors for some rows of [tokens, d_model], with the residual stream after the layer there."""
    return [Added(output[row], row, stream=None if stream is None else stream[row]) for row in rows]


def of_unit(ready: Prepared, neuron: int, experts: frozenset[int] | None) -> list[Added]:
    """The vectors that a hidden unit writes for a positive and a negative activation, in each of `experts`."""
    down = ready.weights["down.weight"]
    numbers = sorted(experts or ()) if ready.layer.spec.moe else (None,)
    columns = [(expert, (down if expert is None else down[expert])[:, neuron]) for expert in numbers]
    return [Added(sign * column, None, neuron, expert, sign) for expert, column in columns for sign in (1, -1)]


def of_unit_at(ready: Prepared, neuron: int, experts: frozenset[int] | None, rows: Sequence[int]) -> list[Added]:
    """The vectors that a hidden unit writes for some rows of a prompt, in those of `experts` that get the row.

    Raises FFNError if no row gets there.
    """
    block, end, moe = ready.steps, ffn_span(ready.steps)[1], ready.layer.spec.moe
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


def promoted(
    model: Resolved,
    ready: Prepared,
    added: Sequence[Added],
    limits: TokenLimits,
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[PromotedTokens, ...]:
    """The tokens that each vector promotes, after the norm that it passes first, if any.

    Raises FFNError as `unembed` does.
    """
    outputs = torch.stack([one.vector if one.output is None else one.output for one in added])
    stream = to_stream(ready, torch.stack([one.vector for one in added]), outputs)
    parts = zip(added, stream.vectors, stream.factors.tolist(), strict=True)
    in_stream = [replace(one, vector=vector, factor=one.factor * factor) for one, vector, factor in parts]
    return unembed(model, ready.layer, in_stream, limits, dtype, device)


def unembed(
    model: Resolved,
    layer: Layer,
    added: Sequence[Added],
    limits: TokenLimits,
    dtype: str | None = None,
    device: str = "cpu",
) -> tuple[PromotedTokens, ...]:
    """The tokens that every vector promotes; each is added to the residual stream by `layer`'s FFN.

    Raises FFNError if no head reads that stream, and for models without a vocabulary.
    """
    vectors = last_norm(model, layer, torch.stack([one.vector for one in added]), dtype, device)
    with head_of(model, layer, dtype, device, OPTION) as head:
        return tuple(
            replace(_best(one, row, head.tokenizer, limits), direct=_direct(one, head, limits))
            for one, row in zip(added, head.logits(vectors), strict=True)
        )


def _direct(one: Added, head: Head, limits: TokenLimits) -> DirectLogits | None:
    """The vector as a part of the residual stream; None if there is no such part."""
    if one.stream is None or isnan(one.factor) or head.norm is None:
        return None
    size = float(divisor(one.stream, head.norm))
    logits = head.part(one.vector, size) * one.factor
    return DirectLogits(size, *(_ends(logits, largest, head.tokenizer, limits.top) for largest in (True, False)))


def _ends(logits: Tensor, largest: bool, tokenizer: Any, most: int) -> tuple[TokenLogit, ...]:
    """The tokens of the largest logits, or of the smallest."""
    if logits.isnan().any():
        return ()
    values, ids = logits.topk(min(most, len(logits)), largest=largest)
    return tuple(
        TokenLogit(i, token_text(tokenizer, i), value) for i, value in zip(ids.tolist(), values.tolist(), strict=True)
    )


def _best(one: Added, logits: Tensor, tokenizer: Any, limits: TokenLimits) -> PromotedTokens:
    every = logits
    # By the logits: far below the first, probabilities are 0 and have no order.
    logits, ids = logits.sort(descending=True, stable=True)
    sets = sampling(logits.softmax(-1), limits.top_k, limits.top_p, limits.top)[0]
    rows = zip(sets.candidates[: limits.top], logits.tolist(), ids.tolist(), strict=False)
    tokens = tuple(
        Promoted(
            i,
            token_text(tokenizer, i),
            logit,
            candidate.probability,
            candidate.cumulative,
            candidate.in_top_k,
            candidate.in_top_p,
        )
        for candidate, logit, i in rows
    )
    # A position in that order is not a token's number.
    argmax = tokens[0].id if tokens else None
    return PromotedTokens(
        one.row, one.neuron, one.expert, one.sign, one.activation, len(logits), argmax, sets.top_k, sets.top_k_mass,
        sets.top_p, sets.top_p_count, sets.top_p_mass, tokens, _ends(every, False, tokenizer, limits.top),
    )  # fmt: skip
