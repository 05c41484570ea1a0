"""Pages about tokens: the results of `--unembed` and `--promotes`, and the sets of tokens that a sampler picks from."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from typing import TYPE_CHECKING, Any, TypeAlias

from ffncli.cli.common.summaries import in_json, label, named
from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.tensors import number_text

if TYPE_CHECKING:
    from ffncli.run.engine.prepare import Token
    from ffncli.run.trace.routing import Sampling
    from ffncli.run.trace.session import Session
    from ffncli.run.trace.unembed import PromotedTokens, TokenLogit, UnitLogit

    Sets: TypeAlias = Sampling | PromotedTokens


NOTHING = "some values are NaN, so there is nothing to pick"
_OUTPUT = "the FFN's output through the final norm and head: normalised alone, then as a part of the residual stream"
_MOST_LISTED = 4
_MORE = "-v also shows the steps"
_UNIT = (
    "the unit's column of the down projection alone, through the norm of its branch, if any, the final norm"
    " and the head; the sign is that of the activation"
)
_UNIT_AT = (
    "what the unit adds to the FFN's output, through the final norm and head: normalised alone, then as a part of the"
    " residual stream"
)
_ALONE = "alone: the logit of the unit's column of the down projection, normalised alone"
_PART = "logit: what the unit adds as a part of the residual stream, activation × column over the stream's RMS"


def unembed_json(session: Session) -> list[dict[str, Any]] | None:
    """Return the records with the keys of docs/commands/trace.md; None if nothing was unembedded."""
    records = in_json(session.unembed)
    return records and [{name: value for name, value in record.items() if name != "vocab"} for record in records]


def unembed_parts(session: Session, digits: int, with_steps: bool) -> list[Part]:
    """Show one table per position or sign; nothing if nothing was unembedded."""
    if session.unembed is None:
        return []
    parts: list[Part] = [Heading("unembed", _about(session))]
    parts += [part for one in session.unembed for part in _parts(one, session.tokens, digits)]
    return parts if with_steps else [*parts, Line(_MORE, quiet=True)]


def _about(session: Session) -> str:
    """Describe what is unembedded."""
    if session.training_step is not None and session.training_step.lr is not None:
        return "what one training step adds to the FFN's output, normalised alone, through the final norm and head"
    return _OUTPUT if session.question.neuron is None else _UNIT_AT if session.tokens else _UNIT


def promotes_parts(session: Session, digits: int, with_steps: bool) -> list[Part]:
    """Show the units that promote a token and those that suppress it; nothing if this was not requested."""
    if session.promotes is None:
        return []
    parts: list[Part] = []
    for one in session.promotes:
        after = "" if one.row is None else f" after token {label(session.tokens[one.row])}"
        what = f"{named(one.id, one.text)}{after}"
        for title, units in (("promote", one.promoting), ("suppress", one.suppressing)):
            parts.append(_units_table(f"units that {title} {what}", units))
        if one.units is not None and one.output is not None:
            total, output = number_text(one.units, digits), number_text(one.output, digits)
            parts.append(Line(f"all units of the layer add {total} to its logit, the FFN with its biases {output}"))
    parts += [Line(_ALONE, quiet=True)] + ([Line(_PART, quiet=True)] if session.tokens else [])
    return parts if with_steps else [*parts, Line(_MORE, quiet=True)]


def _units_table(title: str, units: Sequence[UnitLogit]) -> Table:
    """Show one row per unit; columns without any value are omitted."""
    places = [f"{one.part}." if one.expert is None and one.part else "" for one in units]
    names = [f"{one.expert}:{one.unit}" if one.expert is not None else f"{at}{one.unit}"
             for at, one in zip(places, units, strict=True)]  # fmt: skip
    routed = any(one.expert is not None for one in units)
    columns: dict[str, list[Any]] = {
        "expert:unit" if routed else "unit": names,
        "activation": [one.activation for one in units],
        "logit": [one.logit for one in units],
        "alone": [one.alone for one in units],
    }
    shown = {name: values for name, values in columns.items() if any(value is not None for value in values)}
    return Table(tuple(shown), list(zip(*shown.values(), strict=True)), title)


def _title(one: PromotedTokens, tokens: Sequence[Token]) -> str:
    """Return a title such as `after token 3 "sat"` or `unit 7 of expert 3, negative`."""
    at = "" if one.row is None else f"after token {label(tokens[one.row]) if tokens else one.row}"
    if one.neuron is None:
        return at
    unit = f"unit {one.neuron}" + ("" if one.expert is None else f" of expert {one.expert}")
    if one.activation is not None:
        return f"{unit} {at}, activation {one.activation:.4g}"
    return f"{unit}, {'positive' if one.sign == 1 else 'negative'}"


def _parts(one: PromotedTokens, tokens: Sequence[Token], digits: int) -> list[Part]:
    """Show the tokens and the sets that each one is in; the first token is the argmax."""
    title = _title(one, tokens)
    if not one.promoted:
        return [Heading(f"{title}: {NOTHING}")]
    rows = [
        (named(t.id, t.text), t.id, t.logit, t.probability, t.cumulative, t.in_top_k, t.in_top_p) for t in one.promoted
    ]
    argmax = one.promoted[0]
    return [
        Table(
            ("token", "id", "logit", "probability", *columns(one)),
            rows,
            title=f"{title}: argmax {named(argmax.id, argmax.text)}",
        ),
        Line(sets_text(one, one.vocab, digits)),
        *more(one, len(rows), "--top-tokens"),
        Line(f"suppressed: {_listed(one.suppressed, digits)}"),
        *_direct(one, title, digits),
    ]


def _direct(one: PromotedTokens, title: str, digits: int) -> list[Part]:
    """Show the tokens promoted by the vector as a part of the residual stream."""
    if one.direct is None:
        return []
    size = f"{title}, divided by the residual stream's RMS {number_text(one.direct.residual_rms, digits)}"
    lines = [f"{what}: {_listed(tokens, digits)}" for what, tokens in (
        ("promoted", one.direct.promoted), ("suppressed", one.direct.suppressed))]  # fmt: skip
    return [Line(size), *map(Line, lines)]


def _listed(tokens: Sequence[TokenLogit], digits: int) -> str:
    """Return the first few tokens as text such as `" Paris" 3.12, " the" 2.9`."""
    return ", ".join(f"{named(t.id, t.text)} {number_text(t.logit, digits)}" for t in tokens[:_MOST_LISTED]) or "none"


def sampling_parts(session: Session, digits: int) -> list[Part]:
    """Show one table per position of a final layer's probabilities; nothing if there are none."""
    if session.sampling is None:
        return []
    vocab = session.step("probs").shape[-1]
    return [part for one in session.sampling for part in _sampling_parts(one, vocab, digits)]


def sets_text(one: Sets, vocab: int, digits: int) -> str:
    """Return text such as `top 5 with mass 0.4391, top-p 0.9 needs 31 of 60 with mass 0.9012`."""

    def number(value: float | None) -> str:
        return number_text(nan if value is None else value, digits)

    return (
        f"top {one.top_k} with mass {number(one.top_k_mass)}, "
        f"top-p {one.top_p:g} needs {one.top_p_count or 0:,} of {vocab:,} with mass {number(one.top_p_mass)}"
    )


def columns(one: Sets) -> tuple[str, ...]:
    """Return the columns that show which sets an entry is in."""
    return ("cumulative", f"top {one.top_k}", f"top-p {one.top_p:g}")


def more(one: Sets, listed: int, option: str) -> list[Part]:
    """Return how many entries of the top-p set follow the `listed` entries, and which `option` shows them; [] if none
    are left."""
    rest = (one.top_p_count or 0) - listed
    return [Line(f"… {rest:,} more in the top-p set; {option} {one.top_p_count} shows them", True)] if rest > 0 else []


def _sampling_parts(one: Sampling, vocab: int, digits: int) -> list[Part]:
    """Show the most probable entries and the sets that each one is in; the first entry is the argmax."""
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
