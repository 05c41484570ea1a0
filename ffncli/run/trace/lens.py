"""The parts of a trace's answer about the vocabulary: promoted tokens, promoting units, a sampler's sets.

What runs the model's head is imported where it is needed: it takes transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffncli.run.engine.prepare import Prepared
from ffncli.run.engine.trace import Trace
from ffncli.run.trace.question import Question, TraceSubject
from ffncli.run.trace.sampling import Sampling, sampling

if TYPE_CHECKING:
    from ffncli.run.trace.promotes import PromotingUnits
    from ffncli.run.trace.unembed import PromotedTokens

TOP_TOKENS = 10
PROMOTING_UNITS = 10


def unembedded(
    question: Question, subject: TraceSubject, prepared: Prepared, result: Trace
) -> tuple[PromotedTokens, ...]:
    """The tokens that the FFN's output promotes after the chosen tokens (default: the last), or a hidden unit's effect.

    Raises FFNError for more tokens to sample from than the vocabulary has.
    """
    from ffncli.run.trace.unembed import TokenLimits, of_rows, of_unit, of_unit_at, promoted

    output = result.tensors[result.ffn_output].flatten(0, -2)
    rows = _rows(question, prepared, output.shape[0])
    if question.neuron is None:
        vectors = of_rows(output, rows, prepared.stream)
    elif prepared.tokens:
        vectors = of_unit_at(prepared, question.neuron, subject.experts, rows)
    else:
        vectors = of_unit(prepared, question.neuron, subject.experts)
    top_k, top_p = question.sets
    limits = TokenLimits(question.top_tokens or max(TOP_TOKENS, top_k), top_k, top_p)
    out = promoted(subject.model, prepared, vectors, limits, question.dtype, question.device)
    question.check_top_k(out[0].vocab)
    return out


def _rows(question: Question, prepared: Prepared, count: int) -> tuple[int, ...]:
    """The rows of the input that the lens looks at, the last by default."""
    from ffncli.run.pretrained.tokens import positions

    chosen = bool(prepared.tokens) and question.position is not None  # a prompt's rows are already the chosen ones
    return positions("all" if chosen else str(question.position or "-1"), count)


def promoting(question: Question, subject: TraceSubject, prepared: Prepared) -> tuple[PromotingUnits, ...] | None:
    """The units that promote a token; None if that was not requested."""
    if question.promotes is None:
        return None
    from ffncli.run.trace.promotes import promoting_units

    most = question.top_units or PROMOTING_UNITS
    rows = _rows(question, prepared, len(prepared.tokens)) if prepared.tokens else ()
    text = question.promotes
    return promoting_units(subject.model, prepared, text, rows, most, question.dtype, question.device)


def sampler_sets(question: Question, result: Trace) -> tuple[Sampling, ...] | None:
    """The sets from which a sampler may pick after a final layer; None without such a layer."""
    probs = result.tensors.get("probs")
    return None if probs is None else sampling(probs, *question.sets, question.values_shown)
