"""Run a mixture of experts on a corpus; record each layer's routes, and predictions with each expert left out once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from ffncli.block.recipe import route_of, steps
from ffncli.block.steps import Route, ffn_steps
from ffncli.errors import FFNError, option, spelled
from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.likeness import SimilarExperts, add_cosines, similar_experts
from ffncli.run.corpus.listen import Receiver, Tokenized, batch_of, tokenized
from ffncli.run.corpus.placement import (
    CacheHits,
    ExpertParallelism,
    LayerPlacement,
    PlacementWorth,
    cache_hits,
    layer_placement,
    spare_slots,
    spread_of,
    worth,
)
from ffncli.run.corpus.question import POLICIES, ExpertsQuestion, ReadingModel
from ffncli.run.corpus.routes import LayerRoutes, RouterRule, chosen_of, read_routes, save_routes
from ffncli.run.corpus.run import CorpusReader, reader_of
from ffncli.run.corpus.sums import Progress
from ffncli.run.corpus.trend import TENTHS, Tenth, Trend, tenths_of, trends_of
from ffncli.run.engine.changes import changes_of
from ffncli.run.engine.locate import live_ffn
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.engine.router_losses import RouterLoss, RouterSums, load_figures
from ffncli.run.pretrained.capture import batch_arguments
from ffncli.run.pretrained.loading import Pretrained, demanding, load
from ffncli.run.pretrained.what_if import changed_model
from ffncli.show.text import plural
from ffncli.system.notebook import Shown
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]


@dataclass(frozen=True)
class ExpertFigures:
    """The figures of one expert of a layer over the corpus.

    The router chose the expert for `tokens` tokens, which is `share` of all choices and `times_even` times an even
    load. `mean_weight` is the expert's mean router weight over these tokens. Removing the expert would change the FFN's
    output for these tokens by `output_change` of the output's norm, on average. The other two figures cover the texts
    that were read again, and are None if not measured: `divergence` is the mean Kullback-Leibler divergence, in nats,
    from the next-token distribution with the expert to the distribution without it; `argmax_changed` is the share of
    tokens whose likeliest next token changes. `saliency` is REAP's: the mean norm of the expert's output times its
    router weight over the tokens routed to it. `ranks` hold a copy of the expert, if a placement was requested.
    """

    stack: str
    layer: int
    expert: int
    tokens: int
    share: float
    times_even: float
    mean_weight: float | None
    output_change: float | None
    divergence: float | None = None
    argmax_changed: float | None = None
    saliency: float | None = None
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class ExpertPair:
    """Two experts that are chosen together for `tokens` tokens: `lift` times as often as if they were independent."""

    first: int
    second: int
    tokens: int
    lift: float


@dataclass(frozen=True)
class Coverage:
    """The number of distinct `experts` chosen for the first `tokens` tokens."""

    tokens: int
    experts: int


@dataclass(frozen=True)
class LayerExperts:
    """The experts of one layer: the overall load (as in a trace's `routing`), a record for each expert, the pairs most
    often chosen together, and how soon an expert is used again.

    `hit_rates[n - 1]` is the share of choices that hit a cache of n experts with least-recently-used eviction; the
    first choice of an expert never hits. `caches` are the hit rates by other rules, `placement` says where the
    experts should live, and `similar_experts` which are alike, if requested. `tenths` are the balance of each tenth of
    the texts, and `trends` how it changes over them.
    """

    stack: str
    layer: int
    tokens: int
    choices: int
    even_load: float
    idle_experts: tuple[int, ...]
    busiest_expert: int | None
    busiest_share: float | None
    entropy_bits: float | None
    max_entropy_bits: float
    identity_choices: int
    experts: tuple[ExpertFigures, ...]
    pairs: tuple[ExpertPair, ...]
    coverage: tuple[Coverage, ...]
    hit_rates: tuple[float, ...]
    caches: tuple[CacheHits, ...] = ()
    placement: LayerPlacement | None = None
    similar_experts: tuple[SimilarExperts, ...] = ()
    losses: tuple[RouterLoss, ...] = ()
    tenths: tuple[Tenth, ...] = ()
    trends: tuple[Trend, ...] = ()


@dataclass(frozen=True)
class ExpertsSurvey(Shown):
    """The experts of every layer of a mixture over a corpus: `layers` has a record for each layer, `frame()` a row for
    each expert.

    `texts` and `tokens` count what was read; `ablated_texts` and `ablated_tokens` count the texts and tokens that were
    read again for each expert, with that expert removed. Recorded routes have no `model`, and count as one text if they
    do not separate texts. `worth` says what a placement over ranks saves, if requested.
    """

    model: Resolved | None
    where: str
    texts: int
    tokens: int
    cut: int
    ablated_texts: int
    ablated_tokens: int
    seconds: float
    layers: tuple[LayerExperts, ...]
    notes: tuple[str, ...]
    worth: PlacementWorth | None = None

    @package_errors()
    def frame(self) -> DataFrame:
        """Return a row for each expert of each layer, as a pandas DataFrame with the fields of `ExpertFigures`."""
        import pandas

        return pandas.DataFrame([asdict(expert) for layer in self.layers for expert in layer.experts])

    @package_errors()
    def trend_frame(self) -> DataFrame:
        """Return a row for each tenth of the texts and layer, with a column for each loss, as a pandas DataFrame."""
        import pandas

        rows = [
            {"stack": layer.stack, "layer": layer.layer, "tenth": one.tenth, "tokens": one.tokens,
             "busiest_share": one.busiest_share, "entropy_bits": one.entropy_bits, **one.losses}
            for layer in self.layers for one in layer.tenths
        ]  # fmt: skip
        return pandas.DataFrame(rows)


_MOST_PAIRS = 10


# (mean divergence of the predictions without the expert, in nats; share of tokens whose likeliest next token changes)
Worth = tuple[float, float]
Worths = Mapping[tuple[str, int, int], Worth]  # by stack, layer and expert


def experts_of(
    question: ExpertsQuestion, reading: ReadingModel, note: Callable[[str], None], advance: Callable[[int], Any]
) -> ExpertsSurvey:
    """Answer a question about experts; `note` and `advance` are as in `corpus_of`."""
    moes = {layer: layer.spec.moe for layer in reading.layers if layer.spec.moe}
    splits = {layer: spread_of(question, moe.experts, moe.groups) for layer, moe in moes.items()}
    keep = Keep(question.routes_path is not None, bool(question.cache or question.slots),
                question.similar is not None)  # fmt: skip
    with reader_of(question, reading, note) as reader:
        for remark in spare_slots(question.slots, max(moe.experts for moe in moes.values())):
            reader.remark(remark)
        texts = sum(1 for _ in reader.corpus)
        sums = {layer: RouteSums(moe.experts, keep, texts, route_of(layer.spec)) for layer, moe in moes.items()}
        reader.load(in_order=True)
        progress = Progress()
        reader.read(sums, progress, advance)
        if question.routes_path is not None:
            reader.remark(_saved(question.routes_path, reading.model, sums))
        alike = {
            layer: similar_experts(layer, reader.weights_of(layer), one.cosines, one.pairs, question.similar)
            for layer, one in sums.items() if question.similar is not None
        }  # fmt: skip
        again, worths = _ablated(question, reader, sums)
        figures = tuple(
            replace(_layer(layer, one, worths, question, splits[layer]), similar_experts=alike.get(layer, ()))
            for layer, one in sums.items()
        )
        split = next(iter(splits.values()))
        return ExpertsSurvey(
            reading.model, reader.corpus.where, progress.texts, progress.tokens, progress.cut, len(again),
            sum(len(text.ids) for text in again), progress.seconds, figures, tuple(reader.notes),
            None if split is None else worth([one.halves for one in sums.values()], split),
        )  # fmt: skip


def _ablated(
    question: ExpertsQuestion, reader: CorpusReader, sums: Mapping[Layer, RouteSums]
) -> tuple[list[Tokenized], Worths]:
    """Return (the first texts, the effect of each chosen expert on the predictions for these texts).

    Both are empty if no texts were requested or if the model has no head.
    """
    first = [*islice(reader.corpus, question.ablate_texts)]
    if not first:
        return [], {}
    texts = tokenized(first, reader.tokenizer, reader.limits.length)
    used = {layer: one.chosen.nonzero().flatten().tolist() for layer, one in sums.items()}
    del reader.loaded
    try:
        dtype, device = dtype_of(question.dtype), device_of(question.device)
        loaded = load(reader.transformers, reader.path, reader.config, dtype, device, with_head=True)
    except FFNError as error:
        if "no language-model head" not in error.message:
            raise
        reader.remark(f"{error.message}: the effect of each expert on the predictions was not measured")
        return [], {}
    return texts, expert_worths(loaded, reader.reading.model, question.device, texts, used)


def _layer(
    at: Layer | LayerRoutes, sums: RouteSums, worths: Worths, question: ExpertsQuestion,
    split: ExpertParallelism | None,
) -> LayerExperts:  # fmt: skip
    placement = None if split is None else layer_placement(sums.halves, split)
    slots = question.slots or ((sums.experts + 1) // 2,)
    load: list[int] = sums.chosen.tolist()
    choices, tenths = sum(load), tenths_of(sums.tenths, sums.tenth_tokens, sums.router_sums)
    return LayerExperts(
        stack=at.stack,
        layer=at.index,
        tokens=sums.tokens,
        **load_figures(load),
        identity_choices=sums.identity,
        experts=tuple(_expert(at, sums, expert, choices, worths, placement) for expert in range(len(load))),
        pairs=_pairs(sums),
        coverage=tuple(Coverage(*one) for one in dict([*sums.coverage, (sums.tokens, sums.covered)]).items()),
        hit_rates=tuple(sums.hit_rates()),
        caches=cache_hits(sums.order, question.cache or POLICIES, slots) if sums.keep.order else (),
        placement=placement,
        losses=reduce(add, sums.router_sums).losses(load) if sums.router_sums else (),
        tenths=tenths,
        trends=trends_of(tenths),
    )


def _expert(
    at: Layer | LayerRoutes,
    sums: RouteSums,
    expert: int,
    choices: int,
    worths: Worths,
    placement: LayerPlacement | None,
) -> ExpertFigures:
    tokens, (divergence, changed) = int(sums.chosen[expert]), worths.get((at.stack, at.index, expert), (None, None))
    ranks = enumerate(placement.ranks) if placement else ()
    return ExpertFigures(
        at.stack, at.index, expert, tokens, tokens / choices if choices else 0.0,
        tokens * sums.experts / choices if choices else 0.0,
        float(sums.weight[expert]) / tokens if tokens and sums.weighed else None,
        float(sums.change[expert]) / tokens if tokens and sums.measured else None,
        divergence, changed, float(sums.norm[expert]) / tokens if tokens and sums.measured else None,
        tuple(rank for rank, experts in ranks if expert in experts),
    )  # fmt: skip


def _pairs(sums: RouteSums) -> tuple[ExpertPair, ...]:
    """Return the pairs of experts most often chosen together."""
    upper = torch.triu(sums.pairs, 1).flatten()
    counts, order = upper.topk(min(_MOST_PAIRS, upper.numel()))
    out = []
    for count, at in zip(counts.tolist(), order.tolist(), strict=True):
        first, second = divmod(at, sums.experts)
        if count:
            expected = float(sums.chosen[first]) * float(sums.chosen[second]) / sums.tokens
            out.append(ExpertPair(first, second, int(count), count / expected))
    return tuple(out)


@dataclass(frozen=True)
class Keep:
    """What is kept besides sums: the `routes` with weights and logits, the `order` of the choices, and the cosines of
    the `outputs` of experts that are chosen together."""

    routes: bool = False
    order: bool = False
    outputs: bool = False


MOST_ROUTES = 1 << 20  # the largest number of tokens whose routes are kept for a file


class RouteSums(Receiver):
    """Receives a layer's routes. `distances[d]` counts choices of an expert with d other experts chosen since its last
    choice; `first` counts the first choices of experts. A token's experts count as chosen in order of decreasing
    weight; texts are processed in the order of the corpus.

    `coverage` pairs a count of tokens (1, 2, 4, ...) with the number of experts chosen by then. `change` sums, for each
    expert, ‖its contribution to a token's output‖ / ‖the token's whole output‖ over the tokens, and `norm` the former.
    `tenths` [10, experts] counts the choices in each tenth of the `texts`, `tenth_tokens` [10] the tokens; `order`
    lists all choices; `cosines` [experts, experts] sums the cosines of the outputs of two experts over the tokens that
    chose both.
    """

    def __init__(self, experts: int, keep: Keep, texts: int, router: Route | None = None) -> None:
        self.experts, self.tokens, self.first, self.keep, self._texts = experts, 0, 0, keep, texts
        self.chosen = torch.zeros(experts, dtype=torch.int64)
        self.weight = torch.zeros(experts, dtype=torch.float64)
        self.pairs = torch.zeros(experts, experts, dtype=torch.float64)
        self.distances = torch.zeros(experts, dtype=torch.int64)
        self.change = torch.zeros(experts, dtype=torch.float64)
        self.norm = torch.zeros(experts, dtype=torch.float64)
        self.tenths = torch.zeros(TENTHS, experts, dtype=torch.int64)
        self.tenth_tokens = torch.zeros(TENTHS, dtype=torch.int64)
        self.order: list[int] = []
        self.weighed = self.measured = False
        self.coverage: list[tuple[int, int]] = []
        self.identity = 0
        self.routes: list[tuple[Tensor, Tensor, Tensor | None, Tensor]] = []
        self._logits: Tensor | None = None
        self.router_sums = [] if router is None else [RouterSums(router) for _ in range(TENTHS)]
        self._last = torch.full((experts,), -1, dtype=torch.int64)
        self._clock = 0
        self.cosines = torch.zeros(experts, experts, dtype=torch.float64)
        self._norms: list[tuple[int, Tensor, Tensor]] = []
        self._outputs: list[tuple[int, Tensor, Tensor]] = []

    def router(self, logits: Tensor, places: Tensor) -> None:
        """Keep a batch's logits until its choices arrive."""
        self._logits = logits.detach().cpu() if self.keep.routes else None
        if self.router_sums:
            tenth = places[:, 0] * TENTHS // self._texts
            for at in tenth.unique().tolist():  # type: ignore[no-untyped-call]
                self.router_sums[at].add(logits[tenth == at])

    def route(self, weights: Tensor, places: Tensor) -> None:
        """Add a batch's choices; columns beyond `experts` stand for identity experts, which return their input."""
        ids, values = chosen_of(weights.detach().cpu())
        self.identity += int((ids >= self.experts).sum())
        self.measured, text = True, places[:, 0].cpu()
        if self.keep.routes and sum(len(one) for one, *_ in self.routes) < MOST_ROUTES:
            self.routes.append((ids, values, self._logits, text))
        self.add(ids.masked_fill(ids >= self.experts, -1), values, text)

    def add(self, ids: Tensor, weights: Tensor | None, text: Tensor) -> None:
        """Add the choices [tokens, top_k] of tokens, -1 for none; `text` [tokens] are the numbers of their texts."""
        some = ids >= 0
        one = torch.zeros(len(ids), self.experts + 1).scatter_(1, ids + 1, 1.0)[:, 1:]
        self.chosen += one.sum(0).long()
        tenth = text * TENTHS // self._texts
        self.tenths.index_add_(0, tenth, one.long())
        self.tenth_tokens += torch.bincount(tenth, minlength=TENTHS)
        self.pairs += one.t().double() @ one.double()
        if weights is not None:
            self.weighed = True
            self.weight.index_add_(0, ids[some], weights[some].double())
        for row, here in zip(ids, some, strict=True):
            self._token(row[here])

    def count(self, counts: Tensor) -> None:
        """Add the number of choices [passes, experts] in each pass, of which nothing else is known."""
        self.tenths.index_add_(0, torch.arange(len(counts)) * TENTHS // len(counts), counts)
        self.chosen += counts.sum(0)

    @property
    def halves(self) -> Tensor:
        """The choices [2, experts] in the first half of the texts, and in the second."""
        return self.tenths.view(2, TENTHS // 2, -1).sum(1)

    def _token(self, experts: Tensor) -> None:
        """Add one token's experts, in order of decreasing weight."""
        if self.keep.order:
            self.order += experts.tolist()
        last = self._last[experts]
        # Other experts chosen since its last choice: a least-recently-used cache hits if it holds more than `since`.
        since = (self._last[None] > last[:, None]).sum(1)
        since += torch.tril(last[None] < last[:, None], -1).sum(1)  # experts chosen earlier for this token
        known = last >= 0
        self.first += int((~known).sum())
        self.distances += torch.bincount(since[known], minlength=self.experts)
        self._last[experts] = self._clock + torch.arange(len(experts))
        self._clock += len(experts)
        self.tokens += 1
        if self.tokens & (self.tokens - 1) == 0:  # a power of two
            self.coverage.append((self.tokens, self.covered))

    @property
    def covered(self) -> int:
        """The number of experts chosen so far."""
        return int((self._last >= 0).sum())

    def written(self, expert: int, tokens: Tensor, values: Tensor) -> None:
        """Keep the norm of an expert's contribution until the whole output is known."""
        self._norms.append((expert, tokens, torch.linalg.vector_norm(values.double(), dim=-1)))
        if self.keep.outputs:
            self._outputs.append((expert, tokens, functional.normalize(values.double(), dim=-1)))

    def left(self, output: Tensor) -> None:
        """Add each expert's share of the output's norm for the batch's tokens."""
        whole = torch.linalg.vector_norm(output.double(), dim=-1).clamp_min(1e-300)
        for expert, tokens, norm in self._norms:
            self.change[expert] += float((norm / whole[tokens]).sum())
            self.norm[expert] += float(norm.sum())
        self._norms.clear()
        if self._outputs:
            add_cosines(self.cosines, self._outputs, len(output))
            self._outputs.clear()

    def hit_rates(self) -> list[float]:
        """Return the hit rates of least-recently-used caches of 1, 2, ... experts; none of counts without an order."""
        choices = self.first + int(self.distances.sum())
        return [hits / choices for hits in self.distances.cumsum(0).tolist()] if choices else []


def expert_worths(
    loaded: Pretrained, model: Resolved, device: str, texts: Sequence[Tokenized],
    used: Mapping[Layer, Sequence[int]],
) -> dict[tuple[str, int, int], Worth]:  # fmt: skip
    """Measure the effect of each used expert on the predictions; texts run one at a time."""
    out: dict[tuple[str, int, int], Worth] = {}
    before = [*_predictions(loaded, texts, device)]
    for layer, experts in used.items():
        live, block = live_ffn(loaded.module, model, layer), ffn_steps(steps(layer.spec))
        for expert in experts:
            changes = changes_of(block, (), (f"expert:{expert}",))
            with changed_model(loaded.module, layer, live, None, changes):
                after = _predictions(loaded, texts, device)
                out[layer.stack, layer.index, expert] = _worth(before, after)
    return out


def _predictions(loaded: Pretrained, texts: Sequence[Tokenized], device: str) -> Iterator[Tensor]:
    """Yield the log probabilities [tokens, vocabulary] of each text, in float64."""
    for text in texts:
        batch = batch_of([text], 0, device)
        with torch.no_grad(), demanding(loaded):
            logits: Tensor = loaded.module(**batch_arguments(loaded, batch.ids, batch.mask)).logits
        if logits.dim() != 3:
            raise FFNError(f"the logits of {loaded.config.model_type} are {list(logits.shape)}")
        yield logits[0].double().log_softmax(-1)


def _worth(before: Sequence[Tensor], after: Iterator[Tensor]) -> Worth:
    total, changed, tokens = 0.0, 0, 0
    for old, new in zip(before, after, strict=True):
        total += float((old.exp() * (old - new)).nan_to_num(0.0).sum())
        changed += int((old.argmax(-1) != new.argmax(-1)).sum())
        tokens += len(old)
    return max(0.0, total / tokens), changed / tokens


def _saved(path: Path, model: Resolved, sums: Mapping[Layer, RouteSums]) -> str:
    """Write the routes of all layers; return a note."""
    layers, text = [], torch.zeros(0, dtype=torch.int64)
    for layer, one in sums.items():
        op = next(step.op for step in steps(layer.spec) if isinstance(step.op, Route))
        rule = RouterRule(
            op.score, op.order, op.renormalise, op.scale, op.eps, op.score_dtype,
            replays=op.order != "one_by_one" and not op.learned_scale and not op.always,
        )  # fmt: skip
        most = max((ids.shape[1] for ids, *_ in one.routes), default=0)
        ids = torch.cat([functional.pad(ids, (0, most - ids.shape[1]), value=-1) for ids, *_ in one.routes])
        weights = torch.cat([functional.pad(values, (0, most - values.shape[1])) for _, values, *_ in one.routes])
        logits = [logits for *_, logits, _ in one.routes if logits is not None]
        text = torch.cat([text for *_, text in one.routes])
        some = torch.cat(logits) if len(logits) == len(one.routes) else None
        layers.append(LayerRoutes(layer.stack, layer.index, one.experts, ids, weights, some, rule=rule))
    save_routes(path, model.model.name, layers, text)
    first = "the first " if len(text) >= MOST_ROUTES else ""
    return f"saved the routes of {first}{len(text):,} {plural('token', len(text))} to {path}"


def experts_of_routes(question: ExpertsQuestion, path: Path, note: Callable[[str], None]) -> ExpertsSurvey:
    """Answer a question about recorded routes: everything that follows from the choices alone."""
    started = time.monotonic()
    routes = read_routes(path, question.recorded_experts, question.recorded_top_k)
    asked = str(question.layer or "all")
    layers = [one for one in routes.layers if asked in ("all", str(one.index), f"{one.stack}.{one.index}")]
    if not layers:
        known = ", ".join(str(one.index) for one in routes.layers)
        raise FFNError(f"{routes.where} has no layer {asked}", f"its layers are {known}")
    notes = routes.notes
    if routes.named is not None:
        many = f"{routes.named} are named ({option('recorded_experts')})"
        notes += (f"{routes.where} does not say how many experts there are: {many}",)
    keep = Keep(order=bool(question.cache or question.slots))
    if keep.order and any(one.counts is not None for one in layers):
        notes += (f"{routes.where} counts the choices of each pass: without their order no cache can be replayed",)
    notes += spare_slots(question.slots, max(one.experts for one in layers))
    for remark in notes:
        note(remark)
    splits = {at: spread_of(question, one.experts, 1) for at, one in enumerate(layers)}
    text = routes.text
    texts = 1 if text is None else int(text.max()) + 1
    figures, halves, tokens = [], [], 0
    for at, one in enumerate(layers):
        real = one.ids.masked_fill(one.ids >= one.experts, -1)
        number = torch.arange(len(real)) if text is None or texts < 2 else text
        sums = RouteSums(one.experts, keep, len(real) if number is not text else texts)
        if one.counts is not None:
            sums.count(one.counts)
        else:
            sums.identity = int((one.ids >= one.experts).sum())
            sums.add(real, one.weights, number)
        figures.append(_layer(one, sums, {}, question, splits[at]))
        halves.append(sums.halves)
        tokens = max(tokens, sums.tokens)
    return ExpertsSurvey(
        None, routes.where, texts, tokens, 0, 0, 0, time.monotonic() - started, tuple(figures),
        tuple(map(spelled, notes)), None if splits[0] is None else worth(halves, splits[0]),
    )  # fmt: skip
