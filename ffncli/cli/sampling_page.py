"""The sets that a sampler picks from, as JSON and as tables."""

from __future__ import annotations

from dataclasses import asdict, replace
from math import nan
from typing import TYPE_CHECKING

from ffncli.show.parts import Answer, Heading, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import number_text

if TYPE_CHECKING:
    from ffncli.cli.traced import Traced
    from ffncli.run.sampling import Sampling


def with_sampling(page: Answer, traced: Traced, top_k: int, top_p: float) -> Answer:
    """The trace's answer with `sampling`: one record and one table per position."""
    from ffncli.run.sampling import sampling

    found = sampling(traced.result.tensors["probs"], top_k, top_p, traced.show)
    vocab = traced.result.step("probs").shape[-1]
    tables: list[Part] = [_table(one, vocab, traced.digits) for one in found]
    body = {**page.body, "sampling": [asdict(one) for one in found]}
    return replace(page, body=body, parts=[*page.parts, *tables])


def _table(one: Sampling, vocab: int, digits: int) -> Part:
    """The most probable entries with their sets marked; the first is the argmax."""

    def number(value: float | None) -> str:
        return number_text(nan if value is None else value, digits)

    where = ",".join(map(str, one.position))
    if not one.candidates:
        return Heading(f"probs of token {where}: some are no numbers, so there is nothing to pick")
    title = (
        f"probs of token {where}: argmax {one.argmax}, top {one.top_k} with mass {number(one.top_k_mass)}, "
        f"top-p {one.top_p:g} needs {one.top_p_count:,} of {vocab:,} with mass {number(one.top_p_mass)}"
    )
    rows = [(str(c.id), number(c.probability), number(c.cumulative), c.in_top_k, c.in_top_p) for c in one.candidates]
    return Table(("id", "probability", "cumulative", f"top {one.top_k}", f"top-p {one.top_p:g}"), rows, title)
