"""The parts of a trace's answer about the vocabulary: promoted tokens, promoting units, a sampler's sets.

What runs the model's head is imported where it is needed: it takes transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffncli.run.engine.prepare import LayerRequest, Prepared
from ffncli.run.engine.trace import Trace
from ffncli.run.trace.question import CheckedQuestion, Question
from ffncli.run.trace.sampling import Sampling, sampling

if TYPE_CHECKING:
    from ffncli.run.trace.promotes import PromotingUnits
    from ffncli.run.trace.unembed import PromotedTokens

TOP_TOKENS = 10
PROMOTING_UNITS = 10


def unembedded(
    checked: CheckedQuestion, prepared: Prepared, result: Trace, request: LayerRequest
) -> tuple[PromotedTokens, ...]:
    """The tokens that the FFN's output promotes after the chosen tokens (default: the last), or a hidden unit's effect.

    Raises FFNError for a --sample-top-k above the vocabulary.
    """
    from ffncli.run.trace.unembed import TokenLimits, of_rows, of_unit, of_unit_at, promoted

    question, output = checked.question, result.tensors[result.ffn_output].flatten(0, -2)
    rows = _rows(question, prepared, output.shape[0])
    if question.neuron is None:
        vectors = of_rows(output, rows, prepared.stream)
    elif prepared.tokens:
        vectors = of_unit_at(prepared, question.neuron, checked.experts, rows)
    else:
        vectors = of_unit(prepared, question.neuron, checked.experts)
    top_k, top_p = question.sets
    limits = TokenLimits(question.top_tokens or max(TOP_TOKENS, top_k), top_k, top_p)
    out = promoted(checked.model, prepared, vectors, request, limits)
    question.check_top_k(out[0].vocab)
    return out


def _rows(question: Question, prepared: Prepared, count: int) -> tuple[int, ...]:
    """The rows of the input that the lens looks at, the last by default."""
    from ffncli.run.pretrained.tokens import positions

    chosen = bool(prepared.tokens) and question.position is not None  # a prompt's rows are already the chosen ones
    return positions("all" if chosen else question.position or "-1", count)


def promoting(checked: CheckedQuestion, prepared: Prepared, request: LayerRequest) -> tuple[PromotingUnits, ...] | None:
    """The units that promote a token; None if that was not requested."""
    question = checked.question
    if question.promotes is None:
        return None
    from ffncli.run.trace.promotes import promoting_units

    most = question.top_units or PROMOTING_UNITS
    rows = _rows(question, prepared, len(prepared.tokens)) if prepared.tokens else ()
    return promoting_units(checked.model, prepared, question.promotes, rows, request, most)


def sampler_sets(question: Question, result: Trace) -> tuple[Sampling, ...] | None:
    """The sets from which a sampler may pick after a final layer; None without such a layer."""
    probs = result.tensors.get("probs")
    return None if probs is None else sampling(probs, *question.sets, question.show)
