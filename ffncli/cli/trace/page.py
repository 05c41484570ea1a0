"""A trace as JSON, CSV and a readable page: turns a session into an Answer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import prod
from typing import TYPE_CHECKING

from ffncli.block.cost import CONVENTIONS
from ffncli.block.steps import Experts
from ffncli.block.value import NEAR_ZERO
from ffncli.cli.common.summaries import agreement_text, csv_table, dimensions_text, in_json, labels, listed
from ffncli.cli.trace.backward_page import step_json, step_parts
from ffncli.cli.trace.explain_page import change_parts, explanation_parts, patch_parts
from ffncli.cli.trace.layers_page import routing_parts
from ffncli.cli.trace.ranks_page import ranks_parts
from ffncli.cli.trace.unembed_page import promotes_parts, sampling_parts, unembed_json, unembed_parts
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.tensors import Excerpt, HeatMap, edges, number_text
from ffncli.show.text import bars, plural, width

if TYPE_CHECKING:
    from ffncli.run.engine.trace import StepRecord, Trace
    from ffncli.run.texts.fact import Fact
    from ffncli.run.trace.session import Session


_MOST_COLUMNS = 80
_CELLS = 24, 76  # rows and columns of a heat map
_NOT_IN_CSV = ("parameters", "values", "values_index", "tokens", "units")


def trace_answer(session: Session, digits: int, with_steps: bool = True, heatmap: bool = False) -> Answer:
    """Return a session as JSON, as CSV (one row per step without its values, or one row per rank), and as a page that
    shows values with `digits` digits.

    If there was a prompt, rows are labelled with its tokens. Without `with_steps` the page starts with the other
    requested parts.
    """
    steps = in_json(session.steps)
    body = {
        "block": in_json(session.block),
        "ffn_input": session.ffn_input,
        "ffn_output": session.ffn_output,
        "flow": session.flow,
        "not_finite": in_json(session.not_finite),
        "steps": steps,
        **step_json(session.training_step),
    }
    names = [name for name in steps[0] if name not in _NOT_IN_CSV]
    rows = Table(tuple(names), [tuple(step[name] for name in names) for step in steps])
    if session.training_step is not None:
        kept = [
            {n: v for n, v in one.items() if n not in _NOT_IN_CSV} for one in in_json(session.training_step.gradients)
        ]
        rows = csv_table(kept)
    rows = rows if session.over_ranks is None else csv_table(in_json(session.over_ranks.shares))
    parts = [*_head(session)]
    for record in session.steps if with_steps else ():
        picture = HeatMap(*session.heat_map(record.name, *_CELLS)) if heatmap else None
        parts += _step(record, session.trace, digits, labels(session.tokens), picture)
    page = Answer("trace", body, rows, [*parts, *step_parts(session, digits)], CONVENTIONS)
    return (
        page.with_section("model_run", in_json(session.model_run))
        .with_section("routes", in_json(session.routes) or None, routes_table(session))
        .with_section("routing", in_json(session.routing), routing_parts(session.routing))
        .with_section("unembed", unembed_json(session), unembed_parts(session, digits, with_steps))
        .with_section("promotes", in_json(session.promotes), promotes_parts(session, digits, with_steps))
        .with_section("changes", in_json(session.changes), change_parts(session, digits, with_steps))
        .with_section("prediction", in_json(session.prediction))
        .with_section("patch", in_json(session.patch), patch_parts(session))
        .with_section("sampling", in_json(session.sampling), sampling_parts(session, digits))
        .with_section("aliases", None if session.facts is None else session.aliases)
        .with_section("facts", in_json(session.facts), facts_table(session.facts or ()))
        .with_section("explain", in_json(session.explain or None), explanation_parts(session, digits))
        .with_section("over_ranks", in_json(session.over_ranks), ranks_parts(session, digits))
    )


def _head(session: Session) -> list[Part]:
    """Show the run: the block, its flow of dimensions, the model's run, then the evidence."""
    block = session.block
    parts: list[Part] = [Heading(block.name, block.weights), Line(dimensions_text(block))]
    parts += [Line(line) for line in session.flow]
    if block.random_weights and block.layer is not None:
        where = "a model directory or a GGUF file has the real ones"
        parts.append(Line(f"random weights, not {session.model.model.name}'s: {where}"))
    if run := session.model_run:
        parts += [Line(listed(run.tokens)), Line(agreement_text(run.agreement))]
    parts += [Line(text, quiet=True) for text in block.evidence]
    if block.mask is not None:
        parts.append(Line(f"dropout is on, with a fixed mask ({block.mask})", quiet=True))
    return parts


def _step(
    record: StepRecord, result: Trace, digits: int, rows: tuple[str, ...], picture: HeatMap | None = None
) -> list[Part]:
    """Show one step: its formula and shape, its values or a picture of them, their statistics, the step's cost."""
    marks = {result.ffn_input: "enters the FFN", result.ffn_output: "leaves the FFN"}
    if result.ffn_output == "logits":  # a lone final layer is not an FFN
        marks = {}
    head = record.name if record.op == "input" else f"{record.name} = {record.formula}"
    about = [
        f"[{', '.join(map(str, record.shape))}] {record.dtype}",
        *([marks[record.name]] if record.name in marks else []),
    ]
    if record.tokens is not None:
        few = [*map(str, record.tokens[:8]), *(["…"] if len(record.tokens) > 8 else [])]
        about.append(f"{plural('token', len(record.tokens))} {', '.join(few)}")
    parts: list[Part] = [Heading(head, ", ".join(about))]
    at = range(len(rows)) if record.tokens is None else record.tokens
    names = tuple(rows[row] for row in at) if rows else record.tokens
    if record.dtype.startswith("int"):  # these are token ids
        return [*parts, Excerpt(record.shape, record.values_index, record.values, 0, names)]
    parts.append(picture or Excerpt(record.shape, record.values_index, record.values, digits, names))
    lines = (*_statistics(record, digits, names), _counts(record), _weights(record))
    parts += [Line(text, quiet=True) for text in lines if text]
    if record.live is not None and record.dropped is not None:
        share = f" ({100 * record.dropped / record.live:.0f} %)" if record.live else ""
        text = f"dropped {record.dropped} of {record.live} live values{share}, the kept values scaled"
        parts.append(Line(text, quiet=True))
    elif record.op == "dropout":
        parts.append(Line("eval mode: passes everything through", quiet=True))
    return parts + unit_parts(record, rows)


def _statistics(record: StepRecord, digits: int, rows: Sequence[int | str] | None) -> list[str]:
    """Return minimum and maximum with their places, mean and spread, and the histogram: on one line if it fits in 80
    columns, otherwise on several.

    A terminal that wrapped a longer line could break the histogram at an empty bar.
    """
    ends = [
        f"{name} {number_text(value, digits)} at {_place(at, rows)}"
        for name, value, at in (("min", record.min, record.min_at), ("max", record.max, record.max_at))
        if value is not None and at is not None
    ]
    numbers = (("mean", record.mean), ("std", record.std))
    spread = "  ".join(f"{name} {number_text(value, digits)}" for name, value in numbers if value is not None)
    bar = bars(record.histogram)
    if bar and record.histogram_stride > 1:
        bar += f"  1 in {record.histogram_stride:,} values"
    return _fitted([*ends, spread, bar]) or [*(_fitted(ends) or ends), *(_fitted([spread, bar]) or [spread, bar])]


def _fitted(texts: Sequence[str]) -> list[str]:
    """Return the strings joined into one line, or [] if they need more than 80 columns."""
    whole = "  ".join(filter(None, texts))
    return [whole] if width(whole) <= _MOST_COLUMNS - 2 else []


def _place(at: Sequence[int], rows: Sequence[int | str] | None) -> str:
    """Return an index as text such as `[0 "[CLS]", 99]`; its first entry is the row's name if rows have names."""
    first = rows[at[0]] if rows and at else None
    return f"[{', '.join(map(str, at if first is None else (first, *at[1:])))}]"


def _counts(record: StepRecord) -> str:
    share = f" ({100 * record.zeros / prod(record.shape):.0f} %)" if record.zeros else ""
    counts = [f"{record.negatives:,} negative", f"{record.zeros:,} zero{share}"]
    near = record.near_zero_share or 0.0
    if record.near_zeros > record.zeros and near >= 0.01:
        counts.append(f"{record.near_zeros:,} within {NEAR_ZERO:g} of zero ({100 * near:.0f} %)")
    counts += [f"{n:,} {name}" for name, n in (("NaN", record.nan), ("Inf", record.inf)) if n]
    cost = [f"{record.params:,} parameters"] if record.params else []
    cost += [f"{record.flops:,} FLOPs"] if record.flops else []
    return ", ".join(counts) + (" · " + ", ".join(cost) if cost else "")


def _weights(record: StepRecord) -> str:
    """Return text such as `W1 = up.weightᵀ [4, 8], b1 = up.bias [8]`; shapes are transposed to match the formula."""
    out = []
    for p in record.parameters:
        matrix = len(p.shape) >= 2 and p.name.endswith(".weight")
        shape = (*p.shape[:-2], p.shape[-1], p.shape[-2]) if matrix else p.shape
        symbol = f"{p.symbol} = " if p.symbol in record.formula or record.op == "experts" else ""
        out.append(f"{symbol}{p.name}{'ᵀ' if matrix else ''} [{', '.join(map(str, shape))}]")
    return ", ".join(out)


def routes_table(session: Session) -> list[Part]:
    """Show the chosen experts of each token, and their weights."""
    steps, rows = session.prepared.steps, labels(session.tokens)
    experts = {step.inputs[1]: step.op.experts.size for step in steps if isinstance(step.op, Experts)}
    table: list[tuple[str, str]] = []
    last = 0
    for one in session.routes:
        if one.token > last + 1:
            table.append(("…", ""))
        last = one.token
        pairs = zip(one.experts, one.weights, strict=True)
        texts = [f"{_expert(e, experts[one.step])}: {weight:.4f}" for e, weight in pairs]
        table.append((rows[one.token] if rows else str(one.token), ", ".join(texts) or "none: it is skipped"))
    return [Table(("token", "expert: weight"), table, title="The chosen experts, heaviest first")]


def _expert(number: int, count: int) -> str:
    """Return an expert's name: `3`, or `identity 8` for an identity expert. The indices of identity experts start at
    `count`, after the routed experts."""
    return str(number) if number < count else f"identity {number}"


def unit_parts(record: StepRecord, tokens: Sequence[str]) -> list[Part]:
    """Show the number of dead units (if there are dead units, and several tokens), then the units that were requested.

    `tokens` are the labels of the input's rows; empty without a prompt.
    """
    units = record.units
    if units is None:
        return []
    parts: list[Part] = []
    if units.near_dead and units.tokens > 1:
        near = f"{units.near_dead:,} within {NEAR_ZERO:g} of zero" if units.near_dead > units.dead else ""
        text = f"{units.dead:,} of {units.units:,} units are zero for every token"
        parts.append(Line(", ".join(filter(None, (text, near))), quiet=True))
    if units.largest_norm:
        parts.append(_sizes_table(record, tokens))
        if any(unit.writes is not None for unit in units.largest_norm):
            parts.append(
                Line("writes: the norm of what the unit adds to the output: its norm × the norm of its W2 column", True)
            )
        if units.tokens > 1:
            parts.append(_token_table(record, tokens))
    return parts


def _sizes_table(record: StepRecord, tokens: Sequence[str]) -> Table:
    """Show one row per unit: its size over all tokens, its largest value and that value's token, what it writes."""
    assert record.units is not None
    order = {unit.unit: unit for unit in (*record.units.largest_norm, *record.units.most_active)}.values()
    writes = any(unit.writes is not None for unit in order)
    columns = ("unit", "norm", "mean |x|", "largest", "at token", *(("writes",) if writes else ()))
    rows = [
        (
            str(u.unit), u.norm, u.mean_abs, u.largest, _label(u.token, tokens),
            *((u.writes,) if u.writes is not None else ()),
        )
        for u in sorted(order, key=lambda unit: -unit.norm)
    ]  # fmt: skip
    count = f"{record.units.tokens:,} {plural('token', record.units.tokens)}"
    title = f"{record.name}: the {plural('unit', len(rows))} with the largest norm or mean |x| over {count}"
    return Table(columns, rows, title)


def _token_table(record: StepRecord, tokens: Sequence[str]) -> Table:
    """Show one row per token, for as many tokens as the step shows: the units with the token's largest values."""
    assert record.units is not None
    every = record.units.per_token
    shown = edges(len(every), max(1, len(record.values_index[-2])))
    rows: list[tuple[str, ...]] = []
    for before, at in pairwise((-1, *shown)):
        one = every[at]
        if at > before + 1:
            rows.append(("…", *("" for _ in one.units)))
        cells = (f"{unit}: {value:.4g}" for unit, value in zip(one.units, one.values, strict=True))
        rows.append((_label(one.token, tokens), *cells))
    columns = ("token", *map(str, range(1, len(every[0].units) + 1)))
    return Table(columns, rows, f"{record.name}: each token's units with the largest |x|", labels=1)


def _label(token: int, tokens: Sequence[str]) -> str:
    return tokens[token] if tokens else str(token)


def sentence(fact: Fact) -> str:
    """Return a line such as `gelu(0.21): 0.1225; the text says 0.115`. A stated value that is right is omitted."""
    stated = f"; the text says {fact.said}" if fact.said not in ("", fact.found) else ""
    return f"{fact.topic}: {fact.found}{stated}"


def facts_table(facts: Sequence[Fact]) -> list[Part]:
    """Show a verdict and a sentence per fact, with its note below, in two columns, because long sentences may wrap."""
    rows: list[tuple[str | None, str]] = []
    wrong: set[int] = set()
    for fact in facts:
        if fact.verdict == "wrong":
            wrong.add(len(rows))
        rows.append((fact.verdict or None, sentence(fact)))
        if fact.note:
            rows.append(("", f"  {fact.note}"))
    return [Table(("verdict", "fact"), rows, "statements of the text, recomputed", frozenset(wrong))]
