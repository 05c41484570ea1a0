"""The sets that a sampler picks from, as JSON and as tables."""

from __future__ import annotations

from math import nan
from typing import TYPE_CHECKING, TypeAlias

from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.tensors import number_text

if TYPE_CHECKING:
    from ffncli.run.trace.sampling import Sampling
    from ffncli.run.trace.session import Session
    from ffncli.run.trace.unembed import PromotedTokens

    Sets: TypeAlias = Sampling | PromotedTokens

NOTHING = "some are not numbers, so there is nothing to pick"


def sampling_parts(session: Session, digits: int) -> list[Part]:
    """A table for each position of a final layer's probabilities; nothing without."""
    if session.sampling is None:
        return []
    vocab = session.step("probs").shape[-1]
    return [part for one in session.sampling for part in _parts(one, vocab, digits)]


def sets_text(one: Sets, vocab: int, digits: int) -> str:
    """`top 5 with mass 0.4391, top-p 0.9 needs 31 of 60 with mass 0.9012`."""

    def number(value: float | None) -> str:
        return number_text(nan if value is None else value, digits)

    return (
        f"top {one.top_k} with mass {number(one.top_k_mass)}, "
        f"top-p {one.top_p:g} needs {one.top_p_count or 0:,} of {vocab:,} with mass {number(one.top_p_mass)}"
    )


def columns(one: Sets) -> tuple[str, ...]:
    """The columns that say which sets an entry is in."""
    return ("cumulative", f"top {one.top_k}", f"top-p {one.top_p:g}")


def more(one: Sets, listed: int, option: str) -> list[Part]:
    """A quiet line for the entries of the top-p set beyond the `listed` ones; `option` N lists N. Nothing without."""
    rest = (one.top_p_count or 0) - listed
    return [Line(f"… {rest:,} more in the top-p set; {option} {one.top_p_count} shows them", True)] if rest > 0 else []


def _parts(one: Sampling, vocab: int, digits: int) -> list[Part]:
    """The most probable entries with their sets marked; the first is the argmax."""
    where = ",".join(map(str, one.position))
    if not one.candidates:
        return [Heading(f"probs of token {where}: {NOTHING}")]
    title = f"probs of token {where}: argmax {one.argmax}, {sets_text(one, vocab, digits)}"
    rows = [
        (str(c.id), number_text(c.probability, digits), number_text(c.cumulative, digits), c.in_top_k, c.in_top_p)
        for c in one.candidates
    ]
    table = Table(("id", "probability", *columns(one)), rows, title)
    return [table, *more(one, len(rows), "--show")]
