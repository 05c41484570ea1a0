"""Run a mixture of experts on a corpus; record each layer's routes, and predictions with each expert left out once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from math import log2
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps
from ffncli.errors import FFNError
from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.listen import Receiver, Tokenized, batch_of, tokenized
from ffncli.run.corpus.placement import (
    CacheHits,
    ExpertParallelism,
    LayerPlacement,
    PlacementWorth,
    cache_hits,
    layer_placement,
    spread_of,
    worth,
)
from ffncli.run.corpus.question import POLICIES, ExpertsQuestion, ReadingModel
from ffncli.run.corpus.run import CorpusReader, reader_of
from ffncli.run.corpus.sums import Progress
from ffncli.run.engine.changes import changes_of
from ffncli.run.engine.locate import live_ffn
from ffncli.run.engine.prepare import device_of, dtype_of
from ffncli.run.engine.trace import Trace, input_record
from ffncli.run.pretrained.capture import batch_arguments
from ffncli.run.pretrained.loading import Pretrained, demanding, load
from ffncli.run.pretrained.what_if import changed_model
from ffncli.run.saved.saved import save
from ffncli.show.text import plural
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
    first choice of an expert never hits. `caches` are the hit rates by other rules, and `placement` says where the
    experts should live, if requested.
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


@dataclass(frozen=True)
class ExpertsSurvey:
    """The experts of every layer of a mixture over a corpus: `layers` has a record for each layer, `frame()` a row for
    each expert.

    `texts` and `tokens` count what was read; `ablated_texts` and `ablated_tokens` count the texts and tokens that were
    read again for each expert, with that expert removed. `worth` says what a placement over ranks saves, if requested.
    """

    model: Resolved
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


_MOST_PAIRS = 10


# (mean divergence of the predictions without the expert, in nats; share of tokens whose likeliest next token changes)
Worth = tuple[float, float]
Worths = Mapping[tuple[Layer, int], Worth]


def experts_of(
    question: ExpertsQuestion, reading: ReadingModel, note: Callable[[str], None], advance: Callable[[int], Any]
) -> ExpertsSurvey:
    """Answer a question about experts; `note` and `advance` are as in `corpus_of`."""
    moes = {layer: layer.spec.moe for layer in reading.layers if layer.spec.moe}
    splits = {layer: spread_of(question, moe.experts, moe.groups) for layer, moe in moes.items()}
    keep = Keep(question.routes_path is not None, bool(question.cache or question.slots))
    with reader_of(question, reading, note) as reader:
        half = (sum(1 for _ in reader.corpus) + 1) // 2 if question.ep else 0
        sums = {layer: RouteSums(moe.experts, keep, half) for layer, moe in moes.items()}
        reader.load(in_order=True)
        progress = Progress()
        reader.read(sums, progress, advance)
        if question.routes_path is not None:
            (layer,) = reading.layers
            reader.remark(save_routes(question.routes_path, layer, torch.cat(sums[layer].routes)))
        texts, worths = _ablated(question, reader, sums)
        figures = tuple(_layer(layer, one, worths, question, splits[layer]) for layer, one in sums.items())
        split = next(iter(splits.values()))
        return ExpertsSurvey(
            reading.model, reader.corpus.where, progress.texts, progress.tokens, progress.cut, len(texts),
            sum(len(text.ids) for text in texts), progress.seconds, figures, tuple(reader.notes),
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
    layer: Layer, sums: RouteSums, worths: Worths, question: ExpertsQuestion, split: ExpertParallelism | None
) -> LayerExperts:
    placement = None if split is None else layer_placement(sums.halves, split)
    slots = question.slots or ((sums.experts + 1) // 2,)
    load: list[int] = sums.chosen.tolist()
    choices, most = sum(load), max(load)
    shares = [tokens / choices for tokens in load if tokens]
    return LayerExperts(
        stack=layer.stack,
        layer=layer.index,
        tokens=sums.tokens,
        choices=choices,
        even_load=choices / len(load),
        idle_experts=tuple(expert for expert, tokens in enumerate(load) if not tokens),
        busiest_expert=load.index(most) if choices else None,
        busiest_share=most / choices if choices else None,
        entropy_bits=sum(-share * log2(share) for share in shares) if choices else None,
        max_entropy_bits=log2(len(load)),
        identity_choices=sums.identity,
        experts=tuple(_expert(layer, sums, expert, choices, worths, placement) for expert in range(len(load))),
        pairs=_pairs(sums),
        coverage=tuple(Coverage(*one) for one in dict([*sums.coverage, (sums.tokens, sums.covered)]).items()),
        hit_rates=tuple(sums.hit_rates()),
        caches=cache_hits(sums.order, question.cache or POLICIES, slots) if sums.keep.order else (),
        placement=placement,
    )


def _expert(
    layer: Layer, sums: RouteSums, expert: int, choices: int, worths: Worths, placement: LayerPlacement | None
) -> ExpertFigures:
    tokens, (divergence, changed) = int(sums.chosen[expert]), worths.get((layer, expert), (None, None))
    ranks = enumerate(placement.ranks) if placement else ()
    return ExpertFigures(
        layer.stack, layer.index, expert, tokens, tokens / choices if choices else 0.0,
        tokens * sums.experts / choices if choices else 0.0,
        float(sums.weight[expert]) / tokens if tokens else None,
        float(sums.change[expert]) / tokens if tokens else None,
        divergence, changed, float(sums.norm[expert]) / tokens if tokens else None,
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
    """What is kept besides sums: the router's weights as `routes`, and the `order` of the choices."""

    routes: bool = False
    order: bool = False


MOST_ROUTES = 1 << 20  # the largest number of tokens whose routes are kept for a file


class RouteSums(Receiver):
    """Receives a layer's routes. `distances[d]` counts choices of an expert with d other experts chosen since its last
    choice; `first` counts the first choices of experts. A token's experts count as chosen in order of decreasing
    weight; texts are processed in the order of the corpus.

    `coverage` pairs a count of tokens (1, 2, 4, ...) with the number of experts chosen by then. `change` sums, for each
    expert, ‖its contribution to a token's output‖ / ‖the token's whole output‖ over the tokens, and `norm` the former.
    `halves` [2, experts] counts the choices in texts before text `half` and in the others; `order` lists all choices.
    """

    def __init__(self, experts: int, keep: Keep, half: int) -> None:
        self.experts, self.tokens, self.first, self.keep, self._half = experts, 0, 0, keep, half
        self.chosen = torch.zeros(experts, dtype=torch.int64)
        self.weight = torch.zeros(experts, dtype=torch.float64)
        self.pairs = torch.zeros(experts, experts, dtype=torch.float64)
        self.distances = torch.zeros(experts, dtype=torch.int64)
        self.change = torch.zeros(experts, dtype=torch.float64)
        self.norm = torch.zeros(experts, dtype=torch.float64)
        self.halves = torch.zeros(2, experts, dtype=torch.int64)
        self.order: list[int] = []
        self.coverage: list[tuple[int, int]] = []
        self.identity = 0
        self.routes: list[Tensor] = []
        self._last = torch.full((experts,), -1, dtype=torch.int64)
        self._clock = 0
        self._norms: list[tuple[int, Tensor, Tensor]] = []

    def route(self, weights: Tensor, places: Tensor) -> None:
        """Add a batch's choices; columns beyond `experts` stand for identity experts, which return their input."""
        weights = weights.detach().cpu()
        self.identity += int((weights[:, self.experts :] != 0).sum())
        weights = weights[:, : self.experts]
        chosen = weights != 0
        self.chosen += chosen.sum(0)
        later = (places[:, 0] >= self._half).cpu()
        self.halves += torch.stack([chosen[~later].sum(0), chosen[later].sum(0)])
        self.weight += weights.double().sum(0)
        one = chosen.float()
        self.pairs += one.t().double() @ one.double()
        if self.keep.routes and sum(map(len, self.routes)) < MOST_ROUTES:
            self.routes.append(weights)
        order = weights.double().abs().argsort(dim=1, descending=True, stable=True)
        for row, count in zip(order, chosen.sum(1).tolist(), strict=True):
            self._token(row[:count])

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

    def left(self, output: Tensor) -> None:
        """Add each expert's share of the output's norm for the batch's tokens."""
        whole = torch.linalg.vector_norm(output.double(), dim=-1).clamp_min(1e-300)
        for expert, tokens, norm in self._norms:
            self.change[expert] += float((norm / whole[tokens]).sum())
            self.norm[expert] += float(norm.sum())
        self._norms.clear()

    def hit_rates(self) -> list[float]:
        """Return the hit rates of least-recently-used caches of 1, 2, ... experts."""
        choices = int(self.chosen.sum())
        return [hits / choices for hits in self.distances.cumsum(0).tolist()] if choices else []


def expert_worths(
    loaded: Pretrained, model: Resolved, device: str, texts: Sequence[Tokenized],
    used: Mapping[Layer, Sequence[int]],
) -> dict[tuple[Layer, int], Worth]:  # fmt: skip
    """Measure the effect of each used expert on the predictions; texts run one at a time."""
    out: dict[tuple[Layer, int], Worth] = {}
    before = [*_predictions(loaded, texts, device)]
    for layer, experts in used.items():
        live, block = live_ffn(loaded.module, model, layer), ffn_steps(steps(layer.spec))
        for expert in experts:
            changes = changes_of(block, (), (f"expert:{expert}",))
            with changed_model(loaded.module, layer, live, None, changes):
                after = _predictions(loaded, texts, device)
                out[layer, expert] = _worth(before, after)
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


def save_routes(path: Path, layer: Layer, routes: Tensor) -> str:
    """Write a router's weights [tokens, experts]; return a note."""
    result = Trace("route", "route", (input_record("route", routes),), {"route": routes})
    about = {"name": f"routes of {layer.stack} layer {layer.index}", "stack": layer.stack, "layer": layer.index}
    save(path, ffn_steps(steps(layer.spec)), result, about, {})
    first = "the first " if len(routes) >= MOST_ROUTES else ""
    return f"saved the routes of {first}{len(routes):,} {plural('token', len(routes))} to {path}"
