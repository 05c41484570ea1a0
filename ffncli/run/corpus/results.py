"""The figures of a corpus as records: places with their tokens' texts, contexts, outliers, a table of all units."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ffncli.models.model import Layer, Resolved
from ffncli.run.corpus.batches import tokenized
from ffncli.run.corpus.figures import Context, CorpusLayer, CorpusSurvey, OutlierDimension, TokenPlace, UnitFigures
from ffncli.run.corpus.layer import LayerSums
from ffncli.run.corpus.outliers import Exceeding, in_many_layers
from ffncli.run.corpus.progress import Progress
from ffncli.run.corpus.question import CorpusQuestion
from ffncli.run.corpus.texts import Corpus, Text
from ffncli.run.pretrained.tokens import token_text

TOP_UNITS = 3
_BEFORE, _AFTER = 8, 4  # tokens of a context
_MOST_MASSIVE = 10


@dataclass(frozen=True)
class CorpusResults:
    """A finished run over a corpus, and what turns its numbers of texts and tokens into text."""

    question: CorpusQuestion
    model: Resolved
    corpus: Corpus
    progress: Progress
    sums: Mapping[Layer, LayerSums]
    tokenizer: Any
    length: int | None


def survey_of(results: CorpusResults, notes: tuple[str, ...]) -> CorpusSurvey:
    """The records of a run."""
    question, progress, sums = results.question, results.progress, results.sums
    most = TOP_UNITS if question.top_units is None else question.top_units
    top = {layer: _top_units(one, most) for layer, one in sums.items()}
    places = _Places(results, [at for layer, one in sums.items() for at in _named_texts(one, top[layer])])
    rows = tuple(_row(layer, one, top[layer], places) for layer, one in sums.items())
    inputs = [one.inputs for one in sums.values() if one.inputs is not None]
    return CorpusSurvey(
        results.model, results.corpus.where, progress.texts, progress.tokens, progress.cut, question.limit,
        rows, in_many_layers(inputs), progress.seconds, notes, sums,
    )  # fmt: skip


# --- which units ------------------------------------------------------------------------------------------------------


def _top_units(sums: LayerSums, most: int) -> list[tuple[str, int]]:
    """(part, column) of the units of a layer with the largest maxima."""
    largest: list[tuple[float, str, int]] = []
    for part, columns in sums.parts.items():
        values, order = columns.high.topk(min(most, columns.high.numel()))
        largest += [(value, part, at) for value, at in zip(values.tolist(), order.tolist(), strict=True)]
    return [(part, at) for value, part, at in sorted(largest, key=lambda one: -one[0])[:most] if value > -torch.inf]


def _extreme(sums: LayerSums, largest: bool) -> tuple[str, int] | None:
    """(part, column) of the unit with the layer's largest, or smallest, value; None without any token."""
    ends = []
    for part, columns in sums.parts.items():
        at = int(columns.high.argmax() if largest else columns.low.argmin())
        value = float(columns.high[at] if largest else -columns.low[at])
        ends += [(value, part, at)] if value > -torch.inf else []
    return max(ends)[1:] if ends else None


def _named_texts(sums: LayerSums, units: Sequence[tuple[str, int]]) -> Iterator[int]:
    """The numbers of all texts that the layer's records name."""
    ends = [end for end in (_extreme(sums, True), _extreme(sums, False)) if end is not None]
    for part, at in [*units, *ends]:
        columns = sums.parts[part]
        yield from (int(columns.high_at[at, 0]), int(columns.low_at[at, 0]))
    for part, at in units:
        yield from sums.parts[part].largest_at[at, :, 0].tolist()
    if sums.inputs is not None:
        yield from sums.inputs.largest_at[sums.inputs.outliers, 0].tolist()


class _Places:
    """Places in the corpus as records: the texts that are named are read and tokenized once more."""

    def __init__(self, results: CorpusResults, numbers: Iterable[int]) -> None:
        self._tokenizer = results.tokenizer
        texts = [Text(n, text, 0) for n, text in results.corpus.texts([n for n in numbers if n >= 0]).items()]
        again = tokenized(texts, results.tokenizer, results.length) if texts else []
        self._ids = {one.number: one.ids for one in again}

    def place(self, at: Tensor) -> TokenPlace:
        """The place (text, token)."""
        text, token = at.tolist()
        ids = self._ids.get(text, ())
        return TokenPlace(text, token, token_text(self._tokenizer, ids[token]) if token < len(ids) else None)

    def context(self, value: float, at: Tensor) -> Context:
        """The place with the tokens around it."""
        place = self.place(at)
        ids = self._ids.get(place.text, ())[: place.token + 1 + _AFTER]
        start = max(0, place.token - _BEFORE)
        left, to_token, whole = (self._text(ids[start:end]) for end in (place.token, place.token + 1, len(ids)))
        token = to_token.removeprefix(left)
        space = token[: len(token) - len(token.lstrip())]
        return Context(value, place, f"{left}{space}«{token.strip()}»{whole.removeprefix(to_token)}")

    def _text(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


# --- records ----------------------------------------------------------------------------------------------------------


def _row(layer: Layer, sums: LayerSums, top: Sequence[tuple[str, int]], places: _Places) -> CorpusLayer:
    parts = sums.parts.values()
    tokens = [columns.tokens.repeat_interleave(columns.columns) for columns in parts]
    used = torch.cat(tokens) if tokens else torch.zeros(0, dtype=torch.int64)
    active = torch.cat([columns.active.cpu() for columns in parts]) if tokens else torch.zeros(0)
    alive = active > 0
    shares = active[alive] / used[alive]
    low, high = _extreme(sums, False), _extreme(sums, True)
    of_low = None if low is None else unit_figures(layer, sums, low, places)
    of_high = None if high is None else unit_figures(layer, sums, high, places)
    massive = sums.massive
    return CorpusLayer(
        stack=layer.stack,
        layer=layer.index,
        tokens=0 if sums.inputs is None else int(sums.inputs.tokens),
        units=used.numel(),
        active_share=float(shares.mean()) if shares.numel() else None,
        dead_units=int((~alive).sum()),
        unused_units=int((used == 0).sum()),
        min=None if of_low is None else of_low.min,
        min_at=None if of_low is None else of_low.min_at,
        min_unit=None if of_low is None else unit_name(of_low),
        max=None if of_high is None else of_high.max,
        max_at=None if of_high is None else of_high.max_at,
        max_unit=None if of_high is None else unit_name(of_high),
        not_finite=sum(int(columns.not_finite.sum()) for columns in parts),
        top_units=tuple(unit_figures(layer, sums, one, places) for one in top),
        outliers=_outliers(sums.inputs, places),
        massive=massive.count,
        largest_massive=tuple(massive.kept[:_MOST_MASSIVE]),
    )


def unit_figures(layer: Layer, sums: LayerSums, unit: tuple[str, int], places: _Places) -> UnitFigures:
    """The record of one unit of a layer: (part, column)."""
    part, at = unit
    columns = sums.parts[part]
    group, number = divmod(at, columns.columns)
    tokens = int(columns.tokens[group])
    expert = group if columns.groups > 1 else None
    if not tokens:
        unknown = (None, None, None, None, None, None)
        return UnitFigures(layer.stack, layer.index, part, expert, number, 0, *unknown)
    top = tuple(
        places.context(value, where)
        for value, where in zip(columns.largest[at].tolist(), columns.largest_at[at], strict=True)
        if value > -torch.inf
    )
    return UnitFigures(
        layer.stack, layer.index, part, expert, number, tokens, float(columns.active[at]) / tokens,
        float(columns.total[at]) / tokens, float(columns.low[at]), places.place(columns.low_at[at]),
        float(columns.high[at]), places.place(columns.high_at[at]), top,
    )  # fmt: skip


def unit_name(unit: UnitFigures) -> str:
    """`3`, `7:3` inside expert 7, `shared:3`."""
    if unit.expert is not None:
        return f"{unit.expert}:{unit.unit}"
    return f"{unit.part}:{unit.unit}" if unit.part else str(unit.unit)


def _outliers(inputs: Exceeding | None, places: _Places) -> tuple[OutlierDimension, ...]:
    """The outlier dimensions, the largest first."""
    if inputs is None:
        return ()
    tokens = max(1, int(inputs.tokens))
    every = [
        OutlierDimension(
            at, int(inputs.count[at]) / tokens, float(inputs.largest[at]), places.place(inputs.largest_at[at])
        )
        for at in inputs.outliers
    ]
    return tuple(sorted(every, key=lambda one: -abs(one.value)))
