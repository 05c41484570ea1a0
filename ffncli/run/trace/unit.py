"""One hidden unit over many texts: its values, the words around the largest, what it writes, the units most like it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ffncli.block.recipe import steps
from ffncli.block.steps import ffn_steps
from ffncli.errors import FFNError, option
from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.listen import Batch, Receiver
from ffncli.run.corpus.question import ReadingModel, UnitQuestion
from ffncli.run.corpus.results import Context, Places
from ffncli.run.corpus.run import reader_of
from ffncli.run.corpus.sums import Progress
from ffncli.run.engine.trace import UnitEvents, UnitGroup
from ffncli.run.pretrained.tokens import token_text
from ffncli.run.trace.unembed import Added, PromotedTokens, TokenLimits, unembed
from ffncli.system.notebook import Shown
from ffncli.system.packages import package_errors

if TYPE_CHECKING:
    from pandas import DataFrame  # type: ignore[import-untyped]

QUANTILES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99, 0.999, 1.0)
BINS, MOST_TOKENS, PROMOTED = 24, 10, 10


@dataclass(frozen=True)
class Quantile:
    """The `value` below which a `share` of the unit's values lie, by linear interpolation."""

    share: float
    value: float


@dataclass(frozen=True)
class Bin:
    """How many of the unit's values lie from `low` to below `high` (the last bin includes it)."""

    low: float
    high: float
    count: int


@dataclass(frozen=True)
class FiringToken:
    """A token of the vocabulary: how often it occurs, for which `share` of its occurrences the unit is active, and its
    `mean` and `max` value there."""

    id: int
    text: str | None
    tokens: int
    share: float
    mean: float
    max: float


@dataclass(frozen=True)
class SimilarUnit:
    """A unit of the same layer (and expert): the cosine of its input weights with the unit's (the projection that the
    activation reads), of its output weights, and the correlation of both values over the corpus; None for a unit that
    never changes."""

    unit: int
    cosine_in: float
    cosine_out: float
    correlation: float | None


@dataclass(frozen=True)
class UnitSurvey(Shown):
    """A unit over the tokens of a corpus; in a mixture, over the tokens that are routed to its expert.

    `active_share` is the share of tokens with an activation above zero; the other figures describe the down
    projection's input, None without tokens. `fires_on` are the tokens with the largest mean, `writes` the tokens that
    the unit promotes with a positive and a negative value. `values` [tokens] are all of its values in the corpus's
    order, `places` [tokens, 2] their texts and positions.
    """

    model: Resolved
    where: str
    texts: int
    read_tokens: int
    seconds: float
    stack: str
    layer: int
    expert: int | None
    unit: int
    tokens: int
    active_share: float | None
    mean: float | None
    std: float | None
    kurtosis: float | None
    quantiles: tuple[Quantile, ...]
    histogram: tuple[Bin, ...]
    top: tuple[Context, ...]
    fires_on: tuple[FiringToken, ...]
    writes: tuple[PromotedTokens, ...]
    similar: tuple[SimilarUnit, ...]
    notes: tuple[str, ...]
    values: Tensor
    places: Tensor

    @package_errors()
    def frame(self) -> DataFrame:
        """Return a row for each value: `text`, `token` and `value`, as a pandas DataFrame."""
        import pandas

        text, token = self.places.t().numpy()
        return pandas.DataFrame({"text": text, "token": token, "value": self.values.numpy()})

    def record(self) -> dict[str, Any]:
        """Return all figures as JSON values, without the tensors and the model."""
        left_out = ("model", "values", "places", "notes")
        kept = {name: value for name, value in vars(self).items() if name not in left_out}
        return {name: [asdict(one) for one in v] if isinstance(v, tuple) else v for name, v in kept.items()}


class UnitValues(Receiver):
    """Keeps the values of one unit, and what the correlations with the other units of its group need."""

    def __init__(self, group: UnitGroup, unit: int, d_ff: int) -> None:
        self.group, self.unit = group, unit
        self.total, self.square, self.cross = (torch.zeros(d_ff, dtype=torch.float64) for _ in range(3))
        self.values: list[Tensor] = []
        self.active: list[Tensor] = []
        self.places: list[Tensor] = []
        self.ids: list[Tensor] = []

    def units(self, of: UnitGroup, values: Tensor, active: Tensor, places: Tensor) -> None:
        """Add a group's values; groups other than the unit's are ignored."""
        if of != self.group:
            return
        double = values.detach().double()
        column = double[:, self.unit]
        self.total += double.sum(0).cpu()
        self.square += (double * double).sum(0).cpu()
        self.cross += (double.t() @ column).cpu()
        self.values.append(column.cpu())
        self.active.append((active[:, self.unit] > 0).cpu())
        self.places.append(places.cpu())

    def leaving(self, stream: Tensor, batch: Batch) -> None:
        """Look up the token ids of the batch's values, once all of them have arrived."""
        if len(self.ids) == len(self.places):
            return
        at, wanted = (places[:, 0] << 32 | places[:, 1] for places in (batch.places.cpu(), self.places[-1]))
        order = at.argsort()
        ids = batch.tokens_of(batch.ids[..., None])[:, 0].cpu()
        self.ids.append(ids[order[torch.searchsorted(at[order], wanted)]])

    def sorted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return (values, whether active, places, token ids) of all tokens, in the order of the corpus."""
        none = torch.zeros(0, dtype=torch.int64)
        places = torch.cat([none.view(0, 2), *self.places])
        order = (places[:, 0] << 32 | places[:, 1]).argsort()
        values = torch.cat([none.double(), *self.values])[order]
        return values, torch.cat([none.bool(), *self.active])[order], places[order], torch.cat([none, *self.ids])[order]


def unit_of(
    question: UnitQuestion, reading: ReadingModel, note: Callable[[str], None], advance: Callable[[int], Any]
) -> UnitSurvey:
    """Answer a question about a unit; `note` and `advance` are as in `corpus_of`."""
    layer, group, unit = _checked(question, reading)
    with reader_of(question, reading, note) as reader:
        kept, progress = UnitValues(group, unit, layer.spec.d_ff), Progress()
        reader.load()
        reader.read({layer: kept}, progress, advance)
        similar, column = _similar(layer, group, kept, reader.weights_of(layer), question.top_units)
        values, active, places, ids = kept.sorted()
        best = values.argsort(descending=True, stable=True)[: question.top_contexts]
        contexts = Places(reader.corpus, reader.tokenizer, reader.limits.length, places[best, 0].tolist())
        count = len(values)
        mean, std = (float(values.mean()), float(values.std(correction=0))) if count else (None, None)
        fourth = float(((values - values.mean()) ** 4).mean()) if count else 0.0
        writes: tuple[PromotedTokens, ...] = ()
        try:
            added = [Added(sign * column, None, unit, question.expert, sign) for sign in (1, -1)]
            limits = TokenLimits(PROMOTED, PROMOTED, 1.0)
            writes = unembed(reading.model, layer, added, limits, question.dtype, question.device)
        except FFNError as error:
            reader.remark(f"what the unit writes is unknown: {error.message}")
        return UnitSurvey(
            reading.model, reader.corpus.where, progress.texts, progress.tokens, progress.seconds, layer.stack,
            layer.index, question.expert, unit, count,
            float(active.double().mean()) if count else None, mean, std,
            fourth / std**4 if std else None, _quantiles(values), _histogram(values),
            tuple(contexts.context(float(values[at]), places[at]) for at in best.tolist()),
            _fires_on(ids, active, values, reader.tokenizer), writes, similar, tuple(reader.notes), values, places,
        )  # fmt: skip


def _checked(question: UnitQuestion, reading: ReadingModel) -> tuple[Layer, UnitGroup, int]:
    """Return the unit's layer, group and index. Raises FFNError if the question does not name one unit."""
    if question.layer in (None, "all") or question.neuron is None:
        raise FFNError(f"{option('neuron')} is a unit of one layer", f"give {option('layer')} and {option('neuron')}")
    (layer,), unit = reading.layers, question.neuron
    if unit >= layer.spec.d_ff:
        raise FFNError(f"{option('neuron', unit)} is out of range", f"d_ff is {layer.spec.d_ff}")
    experts = layer.spec.moe.experts if layer.spec.moe else 0
    if (question.expert is not None) != bool(experts) or (question.expert or 0) >= max(1, experts):
        hint = f"add {option('expert', 0)} to {option('expert', experts - 1)}" if experts else "leave it out"
        raise FFNError(f"{option('expert')}: the layer has {experts or 'no'} experts", hint)
    groups = UnitEvents(ffn_steps(steps(layer.spec))).groups
    group = next(one for one in groups if (one.experts > 1 and one.expert == question.expert) == bool(experts))
    return layer, group, unit


def _similar(
    layer: Layer, group: UnitGroup, kept: UnitValues, weights: Mapping[str, Tensor], most: int
) -> tuple[tuple[SimilarUnit, ...], Tensor]:
    """Return the units most like the unit by any of the three figures, by the largest of them; and its column."""
    unit_events = UnitEvents(ffn_steps(steps(layer.spec)))
    written = unit_events.columns(group, weights)
    columns = written.double().cpu()
    into = unit_events.rows(group, weights)[0].double().cpu()
    cosines = [torch.nn.functional.cosine_similarity(rows, rows[kept.unit][None], dim=-1) for rows in (into, columns.T)]
    count, u = sum(map(len, kept.values)), kept.unit
    spread = kept.square - kept.total**2 / max(1, count)
    together = kept.cross - kept.total * kept.total[u] / max(1, count)
    changes = spread > 1e-12 * kept.square  # a unit that never changes correlates with nothing
    correlation = torch.where(changes & changes[u], together / (spread * spread[u]).clamp_min(1e-300).sqrt(), torch.nan)
    best: set[int] = set()
    for figure in (*cosines, correlation.nan_to_num(0.0)):
        best |= {at for at in figure.abs().topk(min(most + 1, len(figure))).indices.tolist() if at != u}
    rows = [
        SimilarUnit(at, float(cosines[0][at]), float(cosines[1][at]),
                    float(correlation[at]) if not correlation[at].isnan() else None)
        for at in best
    ]  # fmt: skip
    rows.sort(key=lambda one: (-max(abs(one.cosine_in), abs(one.cosine_out), abs(one.correlation or 0.0)), one.unit))
    return tuple(rows), written[:, u]


def _quantiles(values: Tensor) -> tuple[Quantile, ...]:
    if not len(values):
        return ()
    ordered, last = values.sort().values, len(values) - 1
    out = []
    for share in QUANTILES:
        low, part = divmod(share * last, 1)
        a, b = float(ordered[int(low)]), float(ordered[min(last, int(low) + 1)])
        out.append(Quantile(share, a + part * (b - a)))
    return tuple(out)


def _histogram(values: Tensor) -> tuple[Bin, ...]:
    if not len(values):
        return ()
    low, high = float(values.min()), float(values.max())
    if low == high:
        return (Bin(low, high, len(values)),)
    counts = torch.histc(values, BINS, low, high).long().tolist()
    edges = torch.linspace(low, high, BINS + 1, dtype=torch.float64).tolist()
    return tuple(Bin(*row) for row in zip(edges, edges[1:], counts, strict=False))


def _fires_on(ids: Tensor, active: Tensor, values: Tensor, tokenizer: Any) -> tuple[FiringToken, ...]:
    """Return the tokens of the vocabulary with the largest mean value."""
    known, row = ids.unique(return_inverse=True)  # type: ignore[no-untyped-call]
    tokens = torch.bincount(row)
    mean = torch.zeros(len(known), dtype=torch.float64).index_add_(0, row, values) / tokens
    share = torch.zeros(len(known), dtype=torch.float64).index_add_(0, row, active.double()) / tokens
    most = torch.full((len(known),), -torch.inf, dtype=torch.float64).scatter_reduce(0, row, values, "amax")
    best = mean.argsort(descending=True, stable=True)[:MOST_TOKENS].tolist()
    return tuple(
        FiringToken(int(known[at]), token_text(tokenizer, int(known[at])), int(tokens[at]), float(share[at]),
                    float(mean[at]), float(most[at]))
        for at in best
    )  # fmt: skip
