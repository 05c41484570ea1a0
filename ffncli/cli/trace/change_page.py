"""`--set` and `--ablate`: what changes at each step and in the model's prediction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ffncli.cli.common.model_run import label, labels, named
from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.tensors import number_text

if TYPE_CHECKING:
    from ffncli.run.engine.prepare import Token
    from ffncli.run.trace.session import Session
    from ffncli.run.what_if.prediction import PredictionChange


def changes_json(session: Session) -> list[dict[str, Any]] | None:
    """The steps' records under the keys of docs/json.md; None without a change."""
    return None if session.changes is None else [asdict(one) for one in session.changes]


def prediction_json(session: Session) -> dict[str, Any] | None:
    """The prediction's record; None without a change of a model that ran."""
    return None if session.prediction is None else asdict(session.prediction)


def change_parts(session: Session, digits: int, with_steps: bool) -> list[Part]:
    """A table of the steps, and one of the tokens whose probability changes most."""
    if session.changes is None:
        return []
    question, rows = session.question, labels(session.tokens)
    title = ", ".join([*(question.set or ()), *(question.ablate or ())])
    columns = ("step", "changed", "of", "at", "old", "new", "new - old", "relative")
    table = [
        (one.name, one.changed, one.values, _place(one.at, rows), one.old, one.new,
         one.difference if one.changed else None, one.relative)
        for one in session.changes
    ]  # fmt: skip
    parts: list[Part] = [Heading("what if", title), Table(columns, table)]
    parts.append(Line("at: where a step changes most; relative: ‖new - old‖ / ‖old‖ over the whole step", quiet=True))
    if session.prediction is not None:
        parts += _prediction(session.prediction, session.prepared.tokens, digits)
    return parts if with_steps else [*parts, Line("-v shows the steps of the unchanged block", quiet=True)]


def _place(at: Sequence[int] | None, rows: Sequence[str]) -> str | None:
    if at is None:
        return None
    return f"[{', '.join(map(str, (rows[at[0]], *at[1:]) if rows else at))}]"


def _prediction(change: PredictionChange, tokens: Sequence[Token], digits: int) -> list[Part]:
    last = next((token for token in tokens if token.position == change.position), None)
    after = label(last) if last is not None else str(change.position)
    rows = [
        (named(t.id, t.text), t.id, t.old_probability, t.new_probability, t.old_logit, t.new_logit)
        for t in change.tokens
    ]
    columns = ("token", "id", "old probability", "new probability", "old logit", "new logit")
    argmax = "another token is now the likeliest" if change.argmax_changed else "the likeliest token stays"
    figures = (
        f"largest change of a logit {number_text(change.logit_change, digits)}, divergence "
        f"{number_text(change.divergence, digits)} nats"
    )
    return [Table(columns, rows, f"The next token after token {after}"), Line(f"{argmax}; {figures}")]
