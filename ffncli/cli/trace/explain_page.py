"""How a number was computed, and what --set and --ablate change, as parts of a page built from records."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ffncli.cli.common.summaries import label, labels, named
from ffncli.show.parts import Heading, Line, Part, Table
from ffncli.show.tensors import Excerpt, number_text

if TYPE_CHECKING:
    from ffncli.run.engine.prepare import Token
    from ffncli.run.engine.trace import Trace
    from ffncli.run.explain.explain import Explanation
    from ffncli.run.pretrained.what_if import PredictionChange
    from ffncli.run.trace.session import Session


_COLUMNS = ("input", "x", "weight [out,in]", "as W [in,out]", "w", "x · w")
_USUAL_WIDTH = 80


def explanation_parts(session: Session, digits: int) -> list[Part]:
    """Show each explanation as a heading, its terms, the intermediate values, and the value itself on the last line.

    If the strings of the input's tokens are known, they are shown as well.
    """
    texts = tuple(token.text or "" for token in session.tokens)
    return [part for one in session.explain for part in _parts(one, session.trace, digits, texts)]


def _token(one: Explanation, leading: Sequence[int], tokens: Sequence[str]) -> str:
    """Return a label such as `token 3 'llo'` if the value is inside an expert or tokens have strings; otherwise ""."""
    flat = one.token
    if flat is None and tokens:
        flat = 0
        for at, size in zip(one.index, leading, strict=False):
            flat = flat * size + at
    if flat is None:
        return ""
    return f"token {flat}" + (f" {tokens[flat]!r}" if flat < len(tokens) else "")


def _parts(one: Explanation, result: Trace, digits: int, tokens: Sequence[str]) -> list[Part]:
    token = _token(one, result.steps[0].shape[:-1], tokens)
    parts: list[Part] = [Heading(_title(one), token)]
    precise = digits + 1
    if one.experts:
        parts.append(_experts(one, precise))
    if one.op == "linear":
        parts.append(_dot_product(one, precise))
    else:
        parts += [Line(text) for text in (*_terms(one, precise), *_quantities(one, precise))]
    parts += [Line(note, quiet=True) for note in one.notes]
    if one.op != "input":
        parts.append(Line(_rounding(one), quiet=True))
    parts.append(Line(f"{one.place} = {_printed(one, result, digits)}, in full {one.value!r}"))
    return parts


def _title(one: Explanation) -> str:
    if one.op == "input":
        return one.place
    return f"{one.place} in {one.formula}" if one.op == "gradient" else f"{one.place} in {one.name} = {one.formula}"


def _dot_product(one: Explanation, digits: int) -> Table:
    """Show the largest terms, the other terms in one row, the bias, and the sum.

    If long names would make the table wider than a usual terminal, the names move into the column headings.
    """
    rows: list[tuple[str, ...]] = [
        (x.place, _text(x.value, digits), w.place, w.symbol, _text(w.value, digits), _text(term.value, digits))
        for term in one.terms
        for x, w in (term.factors,)
    ]
    names = _COLUMNS
    if sum(max(map(len, column)) + 2 for column in zip(*rows, names, strict=True)) > _USUAL_WIDTH:
        (read, *_), (weight, *_), (symbol, *_) = (rows[0][at].rpartition("[") for at in (0, 2, 3))
        names = (read, "x", weight, symbol, "w", "x · w")
        rows = [
            tuple("[" + cell.rpartition("[")[2] if at in (0, 2, 3) else cell for at, cell in enumerate(row))
            for row in rows
        ]
    if one.others:
        rows.append((f"{one.others:,} others", "", "", "", "", _text(one.others_sum, digits)))
    rows += [("bias", "", q.place, q.name, "", _text(q.value, digits)) for q in one.quantities]
    rows.append(("sum", "", "", "", "", _text(one.computed, digits)))
    numbers = (1, 4, 5)
    columns = [_padded(c, str.rjust) if at in numbers else list(c) for at, c in enumerate(zip(*rows, strict=True))]
    return Table(names, list(zip(*columns, strict=True)), emphasis=frozenset({len(rows) - 1}))


def _experts(one: Explanation, digits: int) -> Table:
    """Show the chosen experts, and the requested expert; for the final layer, the most likely tokens by id."""
    grouped = one.experts[0].group is not None
    corrected = any(e.score is not None and e.choice != e.score for e in one.experts)
    columns = (
        "id" if one.name == "probs" else "expert",
        *(["group"] if grouped else []),
        "logit",
        "score",
        *(["chosen by"] if corrected else []),
        "weight",
    )
    rows = []
    for e in one.experts:
        score = "-" if e.score is None else _text(e.score, digits)
        choice = [_text(e.choice, digits)] if corrected else []
        weight = _text(e.weight, digits) if e.chosen else "not chosen"
        rows.append(
            (str(e.expert), *([str(e.group)] if grouped else []), _text(e.logit, digits), score, *choice, weight)
        )
    aligned = [_padded(column, str.rjust) for column in zip(*rows, strict=True)]
    asked = frozenset(at for at, e in enumerate(one.experts) if e.expert == one.index[-1])
    return Table(columns, list(zip(*aligned, strict=True)), emphasis=asked)


def _terms(one: Explanation, digits: int) -> list[str]:
    """Return a line such as `route[0,3] 0.25 × experts.3.down[0,1] 0.4 = 0.1` per term, and their sum."""
    places = _padded([" × ".join(f.place for f in term.factors) for term in one.terms], str.ljust)
    values = [" × ".join(_text(f.value, digits) for f in term.factors) for term in one.terms]
    results = [_text(term.value, digits) if len(term.factors) > 1 else "" for term in one.terms]
    lines = [
        f"{place}  {value}{' = ' + result if result else ''}"
        for place, value, result in zip(places, values, results, strict=True)
    ]
    if one.others:
        lines.append(f"{one.others:,} others".ljust(len(places[0])) + f"  {_text(one.others_sum, digits)}")
    if len(one.terms) > 1:
        total = sum(term.value for term in one.terms) + one.others_sum
        lines.append(f"{'sum':{len(places[0])}}  {_text(total, digits)}")
    return lines


def _quantities(one: Explanation, digits: int) -> list[str]:
    """Return one line per quantity, such as `mean square 4.25`: its name, its value and its place."""
    names = _padded([q.name for q in one.quantities], str.ljust)
    values = _padded([_text(q.value, digits) for q in one.quantities], str.rjust)
    return [f"{n}  {v}  {q.place}".rstrip() for n, v, q in zip(names, values, one.quantities, strict=True)]


def _rounding(one: Explanation) -> str:
    if one.rounding == 0:
        return (
            f"in float64 it is {one.computed!r}: nothing was rounded"
            if one.op not in _COPIES
            else "nothing was rounded"
        )
    much = f"{one.ulps:.3g} units in the last place of {one.dtype}" if one.ulps == one.ulps else "beyond its range"
    return f"in float64 it is {one.computed!r}; the step rounded by {one.rounding:+.3g} ({much})"


_COPIES = ("dropout", "allreduce")


def _printed(one: Explanation, result: Trace, digits: int) -> str:
    """Return the value as the trace's page prints it, formatted together with its neighbours."""
    for record in result.steps if one.op != "gradient" else ():
        if record.name == one.name:
            return Excerpt(record.shape, record.values_index, record.values, digits).text(one.value)
    return number_text(one.value, digits)  # inside an expert whose values are not shown


def _text(value: float, digits: int) -> str:
    return f"{value:.{digits}g}"


def _padded(texts: Sequence[str], to: Callable[[str, int], str]) -> list[str]:
    """Return the strings, all padded to the width of the widest; `to` aligns them to the left or to the right."""
    wide = max(map(len, texts), default=0)
    return [to(text, wide) for text in texts]


def change_parts(session: Session, digits: int, with_steps: bool) -> list[Part]:
    """Show a table of the steps, and a table of the tokens whose probabilities change most."""
    if session.changes is None:
        return []
    question, rows = session.question, labels(session.tokens)
    title = ", ".join([*(question.set or ()), *(question.ablate or ()), *(question.edit or ())])
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


def patch_parts(session: Session) -> list[Part]:
    """Show what values of another prompt's run change: by token and by unit, exact and attributed."""
    one = session.patch
    if one is None:
        return []
    of = named(one.towards, one.towards_text)
    of = of if one.away is None else f"{of} minus {named(one.away, one.away_text)}"
    change = f"the logit of {of} goes from {one.base:.4g} to {one.patched:.4g}"
    title = f"{one.step} of {session.question.patch_from!r}: {change}"
    rows = labels(session.prepared.tokens)
    columns = ("token", "exact", "attribution")
    by_token = [(rows[t.place] if t.place < len(rows) else t.place, t.exact, t.attribution) for t in one.tokens]
    by_unit = [(str(u.place), u.exact, u.attribution) for u in one.units]
    error = "" if one.error is None else f"; its error here: {100 * one.error:.3g} % of the largest exact change"
    return [
        Heading("patch", title), Table(columns, by_token, "All units of one token"),
        Table(("unit", *columns[1:]), by_unit, "One unit of all tokens"),
        Line(f"exact: a run with these values; attribution: gradient × difference{error}", quiet=True),
    ]  # fmt: skip


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
    argmax = "another token is now the likeliest" if change.argmax_changed else "the likeliest token is unchanged"
    figures = (
        f"largest change of a logit {number_text(change.logit_change, digits)}, divergence "
        f"{number_text(change.divergence, digits)} nats"
    )
    return [Table(columns, rows, f"The next token after token {after}"), Line(f"{argmax}; {figures}")]
