"""`ffn experts`: how a mixture uses its experts on given texts, as JSON, CSV and tables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated

from ffncli.cli.common.options import ONE_OR_MANY, OutputOptions, corpus_size
from ffncli.cli.common.spread import spread
from ffncli.cli.common.summaries import csv_table, layer_name, loss_lines
from ffncli.errors import FFNError, option
from ffncli.options import conflicts
from ffncli.options.accept import TEXTS
from ffncli.options.opt import INPUT, Opt
from ffncli.run.corpus.call import experts_for
from ffncli.run.corpus.question import ExpertsQuestion, recorded
from ffncli.show.color import progress
from ffncli.show.parts import Answer, Heading, Line, Part, Table
from ffncli.show.plots.plot import Plot, Series
from ffncli.show.text import in_percent, plural

if TYPE_CHECKING:
    from ffncli.run.corpus.experts import ExpertFigures, ExpertsSurvey, LayerExperts
    from ffncli.run.corpus.placement import PlacementWorth
    from ffncli.run.corpus.trend import Trend
    from ffncli.show.page.document import PageParts


_MOST_EXPERTS, _MOST_PAIRS, _MOST_CACHES, _TENTHS = 8, 3, 6, 10
CONVENTIONS = {
    "output_change": "the norm of the expert's contribution to a token's output, divided by the norm of the output: "
    "mean over the tokens routed to the expert",
    "divergence": "mean Kullback-Leibler divergence, in nats, of the next token's distribution without the expert from "
    "the distribution with it, over the texts that were read again",
    "hit_rates": "share of the choices that a cache of 1, 2, ... experts would serve, if it evicts the expert chosen "
    "longest ago; a token's experts are chosen one after the other, heaviest first",
    "saliency": "REAP's: the norm of the expert's output times its router weight, mean over the tokens routed to it",
    "caches": "share of the choices that find their expert in a cache of `slots` experts of the layer, empty at first. "
    "lru evicts the expert whose use is longest ago, lfu the one used least since the start; pin holds only those used "
    "most in the whole replay; best is Belady's: whose next use is farthest, the requested one included",
    "placement": "deepseek-ai/EPLB's, by the load on all texts; imbalance: the busiest rank's choices divided by the "
    "mean over ranks, copies of an expert sharing its choices evenly",
    "worth": "share of the MoE time saved in the second half of the texts, if a layer takes as long as its busiest "
    "rank has rows: `saved` by a placement for that half itself, `kept` by the placement for the first half",
    "tenths": "the load of each tenth of the texts; trends: the change from the first text to the last, by a line "
    "fitted to the tenths (ordinary least squares), and its standard error",
    "similar_experts": "cosine of all weights, unit by unit, and mean cosine of the outputs for tokens that go to both",
    "lift": "how often two experts are chosen together, divided by how often they would be if choices were independent",
}


# texts typed on the command line instead of a file of texts
_Prompt = Annotated[
    Sequence[str],
    Opt(
        "-p", "--prompt", metavar="TEXT", accepts=TEXTS, group=INPUT, daily=True,
        help="Run the model on TEXT; repeatable.",
    ),
]  # fmt: skip


@spread
def command(*, prompt: _Prompt = (), question: ExpertsQuestion, show: OutputOptions) -> None:
    """Show how a mixture's experts are used over many texts, and what each is worth.

    Examples:
      ffn experts ./my-mixture --prompts texts.txt        # load, pairs, caches
      ffn experts ./my-mixture -p "The cat sat" -l 2      # one layer, one text
      ffn experts ./my-mixture --prompts texts.txt --ep 2 # where experts live
      ffn experts ./my-mixture --prompts texts.txt --cache lru,best --slots 2,4
    """
    output = show.output()
    conflicts.check(ONE_OR_MANY, {"prompt": prompt}, question)
    if prompt:
        question = replace(question, prompts=prompt)
    if question.prompts is None and recorded(question) is None:
        raise FFNError("ffn experts needs texts", f"give {option('prompts')} FILE, or {option('prompt')} TEXT")
    with progress(corpus_size(question.prompts), "texts", show.quiet, show.color_choice()) as advance:
        survey = experts_for(question, output.note, advance)
    output.show(experts_answer(survey))


def experts_answer(survey: ExpertsSurvey) -> Answer:
    """Build the answer: `layers` in JSON, a CSV row per expert, tables of layers and important experts."""
    figures = ("where", "texts", "tokens", "cut", "ablated_texts", "ablated_tokens", "seconds")
    body = {
        "model": {"name": survey.model.model.name, "source": survey.model.source} if survey.model else None,
        "corpus": {name: getattr(survey, name) for name in figures},
        "layers": [asdict(layer) for layer in survey.layers],
        "worth": None if survey.worth is None else asdict(survey.worth),
    }
    experts = [expert for layer in survey.layers for expert in layer.experts]
    csv = csv_table([vars(expert) for expert in experts])
    read = f"{survey.texts:,} {plural('text', survey.texts)}, {survey.tokens:,} {plural('token', survey.tokens)}"
    if not survey.tokens:
        read = "choices that were only counted, not recorded token by token"
    parts: list[Part] = [
        Heading(
            survey.model.model.name if survey.model else "recorded routes",
            f"{len(survey.layers)} {plural('layer', len(survey.layers))} with experts",
        ),
        Line(f"{survey.where}: {read}"),
        _layers(survey),
        Line("hits: share of the choices that a cache of half the experts would serve", quiet=True),
        *_trend(survey),
        *_placement(survey),
        *_cache_table(survey),
        *(part for layer in survey.layers for part in _layer(survey, layer)),
    ]
    if survey.ablated_texts:
        again = f"{survey.ablated_texts:,} {plural('text', survey.ablated_texts)}"
        parts.append(Line(f"nats: mean KL divergence of the next token without the expert, over {again}", quiet=True))
    return Answer("experts", body, csv, parts, CONVENTIONS, lambda: _trend_charts(survey))


def _name(layer: LayerExperts, survey: ExpertsSurvey) -> str:
    return layer_name(layer, survey.model.model) if survey.model else str(layer.layer)


def _layers(survey: ExpertsSurvey) -> Table:
    rows = []
    for layer in survey.layers:
        count = len(layer.experts)
        half = layer.hit_rates[(count + 1) // 2 - 1] if layer.hit_rates else None
        rows.append((
            _name(layer, survey), f"{count - len(layer.idle_experts)} of {count}",
            layer.busiest_expert, in_percent(layer.busiest_share), in_percent(1 / count), layer.entropy_bits,
            layer.max_entropy_bits, in_percent(half),
        ))  # fmt: skip
    columns = ("layer", "experts used", "busiest", "share %", "even %", "entropy bits", "at most", "hits %")
    return Table(columns, rows)


_MOST_LINES = 8  # of layers in a chart


def _trend(survey: ExpertsSurvey) -> list[Part]:
    """Show how the balance of each layer changes over the texts, if every tenth has some."""
    layers = [layer for layer in survey.layers if _balance(layer)]
    if not layers:
        return []
    rows = [
        (_name(layer, survey), *(f"{one.change:+.3g} ± {one.error:.2g}" for one in _balance(layer))) for layer in layers
    ]
    columns = ("layer", *(one.figure.replace("_", " ") for one in _balance(layers[0])))
    return [Table(columns, rows, "Change of the balance from the first text to the last, with its standard error")]


def _balance(layer: LayerExperts) -> list[Trend]:
    """Return the trends to show, if every tenth of the texts has choices; one loss is top_k times another."""
    return [one for one in layer.trends if one.figure != "transformers"] if len(layer.tenths) == _TENTHS else []


def _trend_charts(survey: ExpertsSurvey) -> list[PageParts]:
    """Draw the balance of some layers over the tenths of the texts, as a section of a page."""
    from ffncli.show.page.answer import answer_parts

    layers = [layer for layer in survey.layers if _balance(layer)]
    plots = [
        Plot(f"{one.figure} in each tenth of the texts".replace("_", " "), "% of the texts", one.figure, [
            Series(f"layer {_name(layer, survey)}", [
                (10 * at.tenth + 5, at.losses.get(one.figure, at.entropy_bits)) for at in layer.tenths
            ])
            for layer in layers[:: -(-len(layers) // _MOST_LINES)]
        ], marks=True)
        for one in (_balance(layers[0]) if layers else ())
    ]  # fmt: skip
    title = Heading(survey.model.model.name if survey.model else survey.where, "the balance over the texts")
    return [answer_parts(Answer("experts", {}, Table((), []), [title, *plots]), "trend")] if plots else []


def worth_text(worth: PlacementWorth) -> str:
    """Return what a placement is worth: `worth 12 % of the MoE time at 8 ranks; the placement of ...`."""
    copies = f" with {worth.redundant} copies" if worth.redundant else ""
    text = f"a placement by load{copies} is worth {_points(worth.saved)} % of the MoE time at {worth.ranks} ranks"
    if worth.kept is None:
        return f"{text}; give several texts to see how much of it holds on others"
    does = f"keeps {_points(worth.kept)} of it" if worth.kept >= 0 else f"costs {_points(-worth.kept)} % more time"
    return f"{text}; the placement of the first half of the texts {does} on the second"


def _points(share: float) -> str:
    return f"{100 * share:.2g}" if abs(share) < 0.1 else f"{100 * share:.0f}"


def _placement(survey: ExpertsSurvey) -> list[Part]:
    """Show each layer's rank imbalance, experts in order against placed, and what the placement is worth."""
    if survey.worth is None:
        return []
    rows = [
        (_name(layer, survey), p.imbalance_in_order, p.imbalance, p.second_half, p.second_half_placed)
        for layer in survey.layers if (p := layer.placement) is not None
    ]  # fmt: skip
    columns = ("layer", "in order", "placed", "2nd half in order", "placed by the 1st")
    title = "The busiest rank's load divided by the mean"
    return [Table(columns, rows, title), Line(worth_text(survey.worth))]


def _cache_table(survey: ExpertsSurvey) -> list[Part]:
    """Show the hit rates of caches, over the choices of all layers."""
    choices, hits = sum(layer.choices for layer in survey.layers), dict[tuple[str, int], float]()
    for layer in survey.layers:
        for one in layer.caches:
            if one.hit_rate is not None:
                hits[one.policy, one.slots] = hits.get((one.policy, one.slots), 0.0) + one.hit_rate * layer.choices
    if not hits:
        return []
    slots = list(dict.fromkeys(size for _, size in hits))
    rows = [
        (policy, *(in_percent(hits[policy, size] / max(1, choices)) for size in slots))
        for policy in dict.fromkeys(policy for policy, _ in hits)
    ]
    title = f"Hits %, with caches of so many experts {'per' if len(survey.layers) > 1 else 'of the'} layer"
    return [Table(("evicts", *map(str, slots)), rows, title, side_by_side=True)]


def _layer(survey: ExpertsSurvey, layer: LayerExperts) -> list[Part]:
    """Show a layer's most important experts, the pairs chosen together, and the hit rates of caches."""
    title = f"Layer {_name(layer, survey)}"
    known = any(expert.divergence is not None for expert in layer.experts)
    order = sorted(layer.experts, key=_worth)[:_MOST_EXPERTS]
    by = "that change the prediction most" if known else "that add most to the output"
    rows = [_row(expert, known) for expert in order if expert.tokens]
    columns = ("expert", "tokens", "share %", "× even", "weight", "output %", "saliency",
               *(("nats", "argmax %") if known else ()))  # fmt: skip
    parts: list[Part] = [Table(columns, rows, f"{title}: the experts {by}")]
    parts += loss_lines(layer.losses)
    pairs = [
        f"{p.first} and {p.second} for {p.tokens:,} {plural('token', p.tokens)} ({p.lift:.2f} × chance)"
        for p in layer.pairs[:_MOST_PAIRS]
    ]
    parts += [Line(f"chosen together: {', '.join(pairs)}", quiet=True)] if pairs else []
    if layer.similar_experts:
        alike = [(str(a.first), str(a.second), a.weights, a.outputs, a.tokens)
                 for a in layer.similar_experts[:_MOST_EXPERTS]]  # fmt: skip
        parts.append(
            Table(("expert", "expert", "weights", "outputs", "tokens"), alike, f"{title}: experts that are alike")
        )
    tokens = ", ".join(f"{one.tokens:,}" for one in layer.coverage)
    experts = ", ".join(str(one.experts) for one in layer.coverage)
    parts += (
        [Line(f"distinct experts after {tokens} tokens: {experts}", quiet=True)] if layer.coverage[-1].tokens else []
    )
    return [*parts, Line(f"hits of a cache of {_caches(layer.hit_rates)}", quiet=True)] if layer.hit_rates else parts


def _worth(expert: ExpertFigures) -> tuple[float, float]:
    return -(expert.divergence or 0.0), -(expert.output_change or 0.0) * expert.tokens


def _row(expert: ExpertFigures, known: bool) -> tuple[object, ...]:
    row = (
        str(expert.expert), expert.tokens, in_percent(expert.share), expert.times_even, expert.mean_weight,
        in_percent(expert.output_change), expert.saliency,
    )  # fmt: skip
    return (*row, expert.divergence, in_percent(expert.argmax_changed)) if known else row


def _caches(rates: Sequence[float]) -> str:
    """Format cache hit rates: `1 expert 12 %, 2 31 %, 4 60 %`; each size is twice the previous one."""
    sizes = [size for size in (2**power for power in range(_MOST_CACHES)) if size <= len(rates)]
    return ", ".join(f"{size}: {100 * rates[size - 1]:.0f} %" for size in sizes)
