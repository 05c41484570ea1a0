"""A real model's tokens as labels, and its agreement with our steps in words."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from ffncli.show.tensors import edges
from ffncli.show.text import plural

if TYPE_CHECKING:
    from ffncli.run.engine.prepare import Token
    from ffncli.run.measure.gap import Agreement

_LONGEST = 12  # characters of a token's text in a label: a row of eight values still fits 100 columns


def label(token: Token) -> str:
    """A token as a row's label: `3 " world"`, or its number if the text is not known."""
    return f"{token.position} {named(token.id, token.text)}"


def named(number: int, text: str | None) -> str:
    """A token's text in quotation marks; `#1917` if it has none."""
    if text is None:
        return f"#{number}"
    return f'"{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"}"'


def listed(tokens: Sequence[Token]) -> str:
    """`3 tokens: 0 "Hello", 1 " my", 2 " dear"`, the first and last ones of many."""
    shown = edges(len(tokens), 8)
    some = "".join(f"{', ' if i == last + 1 else ' … '}{label(tokens[i])}" for last, i in pairwise((-1, *shown)))
    return f"{len(tokens)} {plural('token', len(tokens))}: {some.removeprefix(', ')}"


def labels(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Labels for the rows of a trace; none without a prompt."""
    return tuple(map(label, tokens))


def agreement_text(agreement: Agreement) -> str:
    """One line: the difference of our steps from the model's own FFN."""
    if not agreement.max_error:
        return "matches the model's own FFN exactly"  # NaN for NaN, and 0 for -0: equal, and not always bit for bit
    ulps = "" if agreement.ulps is None else f", {agreement.ulps:.3g} units in the last place there"
    error, relative = f"max error {agreement.max_error:.2e}", f"relative {agreement.relative_error:.2e}"
    return f"against the model's own FFN: {error}, {relative}{ulps}"
