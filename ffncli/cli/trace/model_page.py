"""What a run of the real model adds to a trace: its tokens, the agreement with its own FFN, the chosen experts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ffncli.block.steps import Experts
from ffncli.show.parts import Line, Part
from ffncli.show.tables import Table
from ffncli.show.tensors import edges

if TYPE_CHECKING:
    from ffncli.run.measure.gap import Agreement
    from ffncli.run.pretrained.tokens import Token
    from ffncli.run.trace.session import Session

_LONGEST = 12  # characters of a token's text in a label: a row of eight values still fits 100 columns


def label(token: Token) -> str:
    """A token as a row's label: `3 " world"`, or its number where nothing says its text."""
    return f"{token.position} {named(token.id, token.text)}"


def named(number: int, text: str | None) -> str:
    """A token's text in quotation marks; `#1917` without one."""
    if text is None:
        return f"#{number}"
    return f'"{text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"}"'


def listed(tokens: Sequence[Token]) -> str:
    """`3 tokens: 0 "Hello", 1 " my", 2 " dear"`, the first and the last of many."""
    some = ", ".join(label(tokens[i]) for i in edges(len(tokens), 8))
    return f"{len(tokens)} token{'s' * (len(tokens) != 1)}: {some}"


def labels(tokens: Sequence[Token]) -> tuple[str, ...]:
    """Labels for the rows of a trace; none without a prompt."""
    return tuple(map(label, tokens))


def model_run_lines(session: Session) -> list[Part]:
    """What the model read, and how far our output is from its own; nothing without a run of it."""
    run = session.model_run
    return [Line(listed(run.tokens)), Line(agreement_text(run.agreement))] if run else []


def agreement_text(found: Agreement) -> str:
    """One line: how far our steps are from the model's own FFN."""
    if not found.max_error:
        return "the model's own FFN gives the same"  # NaN for NaN, and 0 for -0: equal, and not always bit for bit
    ulps = "" if found.ulps is None else f", {found.ulps:.3g} units in the last place there"
    error, relative = f"max error {found.max_error:.2e}", f"relative {found.relative_error:.2e}"
    return f"against the model's own FFN: {error}, {relative}{ulps}"


def routes_table(session: Session) -> list[Part]:
    """A table of the experts that were chosen for each token, and their weights."""
    steps, rows = session.prepared.steps, labels(session.tokens)
    experts = {step.inputs[1]: step.op.experts.size for step in steps if isinstance(step.op, Experts)}
    table = []
    for one in session.routes:
        pairs = zip(one.experts, one.weights, strict=True)
        texts = [f"{_expert(e, experts[one.step])}: {weight:.4f}" for e, weight in pairs]
        table.append((rows[one.token] if rows else str(one.token), ", ".join(texts)))
    return [Table(("token", "expert: weight"), table, title="The chosen experts, heaviest first")]


def _expert(number: int, count: int) -> str:
    """A routed expert by its number; the identities have those behind the last."""
    return str(number) if number < count else f"identity {number}"
