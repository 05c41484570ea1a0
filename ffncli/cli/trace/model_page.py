"""The additions to a trace from a run of the real model: tokens, agreement with its own FFN, chosen experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffncli.block.steps import Experts
from ffncli.cli.common.model_run import agreement_text, labels, listed
from ffncli.show.parts import Line, Part, Table

if TYPE_CHECKING:
    from ffncli.run.trace.session import Session


def model_run_lines(session: Session) -> list[Part]:
    """The model's input, and the difference of our output from its own; nothing without a run of it."""
    run = session.model_run
    return [Line(listed(run.tokens)), Line(agreement_text(run.agreement))] if run else []


def routes_table(session: Session) -> list[Part]:
    """A table of the experts that were chosen for each token, and their weights."""
    steps, rows = session.prepared.steps, labels(session.tokens)
    experts = {step.inputs[1]: step.op.experts.size for step in steps if isinstance(step.op, Experts)}
    table = []
    for one in session.routes:
        pairs = zip(one.experts, one.weights, strict=True)
        texts = [f"{_expert(e, experts[one.step])}: {weight:.4f}" for e, weight in pairs]
        table.append((rows[one.token] if rows else str(one.token), ", ".join(texts) or "none: it is skipped"))
    return [Table(("token", "expert: weight"), table, title="The chosen experts, heaviest first")]


def _expert(number: int, count: int) -> str:
    """A routed expert by its number; identity experts have the numbers after the last."""
    return str(number) if number < count else f"identity {number}"
