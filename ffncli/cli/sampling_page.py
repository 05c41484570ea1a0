"""The sets that a sampler picks from, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import nan
from typing import TYPE_CHECKING

from ffncli.show.parts import Answer, Heading, Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import number_text

if TYPE_CHECKING:
    from ffncli.cli.traced import Traced
    from ffncli.run.sampling import Sampling

NOTHING = "some are no numbers, so there is nothing to pick"


def with_sampling(page: Answer, traced: Traced, top_k: int, top_p: float) -> Answer:
    """The trace's answer with `sampling`: one record and one table per position."""
    from ffncli.run.sampling import sampling

    found = sampling(traced.result.tensors["probs"], top_k, top_p, traced.show)
    vocab = traced.result.step("probs").shape[-1]
    tables = [part for one in found for part in _parts(one, vocab, traced.digits)]
    body = {**page.body, "sampling": [asdict(one) for one in found]}
    return replace(page, body=body, parts=[*page.parts, *tables])


def sets_text(one: Sampling, vocab: int, digits: int) -> str:
    """`top 5 with mass 0.4391, top-p 0.9 needs 31 of 60 with mass 0.9012`."""

    def number(value: float | None) -> str:
        return number_text(nan if value is None else value, digits)

    return (
        f"top {one.top_k} with mass {number(one.top_k_mass)}, "
        f"top-p {one.top_p:g} needs {one.top_p_count or 0:,} of {vocab:,} with mass {number(one.top_p_mass)}"
    )


def columns(one: Sampling) -> tuple[str, ...]:
    """The columns that say which sets an entry is in."""
    return ("cumulative", f"top {one.top_k}", f"top-p {one.top_p:g}")


def more(one: Sampling, listed: int, option: str) -> list[Part]:
    """A quiet line for what the top-p set has beyond the `listed` entries; `option` N lists N. Nothing without."""
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
