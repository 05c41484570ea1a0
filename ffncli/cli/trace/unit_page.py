"""One hidden unit over many texts, as JSON, CSV (a row for each of its largest values) and as a page."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ffncli.cli.common.summaries import named
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.tensors import number_text
from ffncli.show.text import bars, in_percent, plural

if TYPE_CHECKING:
    from ffncli.run.trace.unit import UnitSurvey

_MOST_TOKENS = 6
CONVENTIONS = {
    "kurtosis": "fourth central moment divided by the square of the variance; 3 for a normal distribution",
    "cosine_in": "of the rows of the projection that the activation reads: gate, or up in a plain FFN",
    "cosine_out": "of the columns of the down projection",
    "correlation": "Pearson's, of both units' inputs to the down projection over the tokens of the corpus",
    "writes": "the tokens that the unit's column of the down projection promotes, as in ffn trace --unembed --neuron",
}


def unit_answer(survey: UnitSurvey, digits: int) -> Answer:
    """Show a unit: `unit` in JSON."""
    body = {
        "model": {"name": survey.model.model.name, "source": survey.model.source},
        "unit": survey.record(),
    }
    csv = Table(
        ("value", "text", "token", "token_text", "context"),
        [(one.value, one.at.text, one.at.token, one.at.token_text, one.context) for one in survey.top],
    )
    inside = "" if survey.expert is None else f" of expert {survey.expert}"
    name = f"{survey.stack} layer {survey.layer}, unit {survey.unit}{inside}"
    read = f"{survey.where}: {survey.texts:,} {plural('text', survey.texts)}, {survey.read_tokens:,} tokens"
    routed = "" if survey.expert is None else f"; {survey.tokens:,} of them go to the expert"
    parts: list[Part] = [Heading(survey.model.model.name, name), Line(read + routed)]
    if not survey.tokens:
        return Answer("trace", body, csv, [*parts, Line("no token reaches the unit")], CONVENTIONS)
    figures = {"mean": survey.mean, "std": survey.std, "kurtosis": survey.kurtosis}
    text = ", ".join(f"{name} {number_text(value, digits)}" for name, value in figures.items() if value is not None)
    parts.append(Line(f"active for {in_percent(survey.active_share)} % of them; {text}"))
    if drawn := bars([one.count for one in survey.histogram]):
        ends = [number_text(at, digits) for at in (survey.histogram[0].low, survey.histogram[-1].high)]
        parts.append(Line(f"{ends[0]} {drawn} {ends[1]}"))
    parts.append(Table(
        ("share below", *(f"{100 * one.share:g} %" for one in survey.quantiles)),
        [("value", *(one.value for one in survey.quantiles))],
    ))  # fmt: skip
    contexts = [(one.value, f"{one.at.text}: {one.at.token}", one.context) for one in survey.top]
    parts.append(Table(("value", "at", "context"), contexts, "Largest values"))
    tokens = [(named(t.id, t.text), t.tokens, in_percent(t.share), t.mean, t.max) for t in survey.fires_on]
    parts.append(Table(("token", "occurs", "active %", "mean", "max"), tokens, "Fires on"))
    for one in survey.writes:
        promoted = ", ".join(
            f"{named(t.id, t.text)} {number_text(t.logit, digits)}" for t in one.promoted[:_MOST_TOKENS]
        )
        parts.append(Line(f"promotes with a {'positive' if one.sign == 1 else 'negative'} value: {promoted}"))
    similar = [(str(one.unit), one.cosine_in, one.cosine_out, one.correlation) for one in survey.similar]
    parts.append(Table(("unit", "cosine in", "cosine out", "correlation"), similar, "Units most like it"))
    return Answer("trace", body, csv, parts, CONVENTIONS)
